"""Makes an adapter of a base with peft, and writes it and what the two compute.

write_peft.py BASE DIRECTORY lora|dora

Writes DIRECTORY/adapter and DIRECTORY/expected.safetensors with `input_ids` and `logits`.
"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

base, directory, kind = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
dora = kind == "dora"
torch.manual_seed(3)
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
config = LoraConfig(
    r=4,
    lora_alpha=6,
    use_rslora=True,
    use_dora=dora,
    lora_dropout=0.1,
    # Fulgurite does not support magnitudes of embeddings.
    target_modules=["q_proj", "v_proj", "down_proj"] + ([] if dora else ["embed_tokens"]),
    modules_to_save=["lm_head"],
    task_type="CAUSAL_LM",
)
model = get_peft_model(model, config)
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.add_(0.05 * torch.randn_like(parameter))
model.eval()
ids = load_file(Path(base) / "expected.safetensors")["input_ids"]
with torch.no_grad():
    logits = model(ids.long()).logits
# peft would save the base's embedding beside its adapter.
model.save_pretrained(directory / "adapter", save_embedding_layers=False)
save_file({"input_ids": ids, "logits": logits}, directory / "expected.safetensors")
