"""Evaluates a tiny model with lm-eval twice, by its backend `hf` and by `fulgurite serve`, and
compares each log-likelihood, each greedy flag and each generated text.

    python lm_eval_server.py PROGRAM
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import lm_eval  # noqa: E402
import torch  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

ROWS = [
    ("The sky is", ["blue", "a green stone", "12"]),
    ("Two and two are", ["five", "four", "twenty-two"]),
    ("Cats say", ["woof", "moo", "meow", "naïve ✓"]),
    ("Water is", ["wet", "dry"]),
    ("A week has days:", ["seven", "eight", "nine"]),
    ("Iron is", ["a metal", "a fruit"]),
]
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    },
    "text": {
        "output_type": "generate_until",
        "doc_to_text": "{{q}}",
        "doc_to_target": "x",
        "generation_kwargs": {"until": ["q"], "max_gen_toks": 12, "do_sample": False, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
    "whole": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{q}} {{choices}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
}


def write_model(path):
    """A llama of bytes. Its weights are large, so tokens differ in their probability."""
    torch.manual_seed(0)
    vocab = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab["<end>"] = end = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>").save_pretrained(path)
    config = LlamaConfig(
        vocab_size=len(vocab), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=512, eos_token_id=end, bos_token_id=None, initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(path)


def responses(model, arguments, tasks):
    """The responses of a backend, by task and document."""
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=list(TASKS), task_manager=manager, device="cpu", bootstrap_iters=0,
        log_samples=True,
    )
    return {
        (task, sample["doc_id"]): sample["resps"] for task in TASKS for sample in found["samples"][task]
    }


def flat(value):
    """The values in nested lists."""
    return [leaf for item in value for leaf in flat(item)] if isinstance(value, (list, tuple)) else [value]


def main(program):
    folder = Path(tempfile.mkdtemp())
    model, tasks, rows = folder / "model", folder / "tasks", folder / "rows.jsonl"
    write_model(model)
    rows.write_text("".join(json.dumps({"q": q, "choices": choices}) + "\n" for q, choices in ROWS))
    tasks.mkdir()
    for name, task in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(rows)}}, "test_split": "test"}
        # YAML holds JSON.
        (tasks / f"{name}.yaml").write_text(json.dumps({"task": name, **data, **task}))
    command = [program, "serve", "--model", str(model), "--name", "tiny", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().split(" at ")[1].split(",")[0] + "/completions"
            arguments = {
                "model": "tiny", "base_url": url, "tokenizer": str(model), "tokenizer_backend": "huggingface",
                "max_length": 512,
            }
            ours = responses("local-completions", arguments, tasks)
        finally:
            server.terminate()
    theirs = responses("hf", {"pretrained": str(model), "max_length": 512, "dtype": "float32"}, tasks)
    assert ours.keys() == theirs.keys()
    count, largest = 0, 0.0
    for key, own in ours.items():
        own, other = flat(own), flat(theirs[key])
        assert len(own) == len(other), (key, own, other)
        for a, b in zip(own, other):
            count += 1
            # The samples of lm-eval are texts.
            try:
                a, b = float(a), float(b)
            except ValueError:
                assert a == b, (key, a, b)
                continue
            assert math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-4), (key, a, b)
            largest = max(largest, abs(a - b))
    print(f"{count} values are equal; the largest difference is {largest:.1e}")
    assert count == 46, count


main(sys.argv[1])
