"""Trains a tiny model with TRL on one CPU, and writes the loss of each step as JSON.

trl_curves.py KIND MODEL ROWS.jsonl STEPS

KIND is `sft`, `dpo`, `kto` or `reward`. MODEL is a directory with weights and a tokenizer. Rows are taken in their
order, four a step.
"""

import json
import sys
import tempfile

import datasets
import torch
import transformers
import trl

kind, model, rows, steps = sys.argv[1:]
torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()
datasets.disable_progress_bars()

losses = []


def recorded(trainer):
    class Recorded(trainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            return loss

    return Recorded


common = dict(
    per_device_train_batch_size=4,
    max_steps=int(steps),
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    weight_decay=0.0,
    max_grad_norm=1.0,
    train_sampling_strategy="sequential",
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    max_length=16,
)
tokenizer = transformers.AutoTokenizer.from_pretrained(model)
with open(rows) as file:
    data = datasets.Dataset.from_list([json.loads(line) for line in file])
one_label = dict(num_labels=1) if kind == "reward" else {}
auto = transformers.AutoModelForSequenceClassification if kind == "reward" else transformers.AutoModelForCausalLM
policy = auto.from_pretrained(model, dtype=torch.float32, attn_implementation="eager", **one_label)
with tempfile.TemporaryDirectory() as scratch:
    common["output_dir"] = scratch
    match kind:
        case "sft":
            trainer = recorded(trl.SFTTrainer)(policy, args=trl.SFTConfig(**common), train_dataset=data, processing_class=tokenizer)
        case "dpo":
            trainer = recorded(trl.DPOTrainer)(policy, args=trl.DPOConfig(beta=0.3, **common), train_dataset=data, processing_class=tokenizer)
        case "kto":
            config = trl.KTOConfig(beta=0.3, desirable_weight=1.5, undesirable_weight=0.5, **common)
            trainer = recorded(trl.KTOTrainer)(policy, args=config, train_dataset=data, processing_class=tokenizer)
        case "reward":
            config = trl.RewardConfig(center_rewards_coefficient=0.05, **common)
            trainer = recorded(trl.RewardTrainer)(policy, args=config, train_dataset=data, processing_class=tokenizer)
    trainer.train()
print(json.dumps(losses))
