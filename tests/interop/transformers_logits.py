"""Loads full checkpoints with transformers and compares their logits.

transformers_logits.py DIRECTORY EXPECTED.safetensors [DIRECTORY EXPECTED.safetensors ...]

EXPECTED has `input_ids` and `logits`, as `tests/fixtures/*/expected.safetensors` do.
"""

import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def compare(directory, expected_path):
    expected = load_file(expected_path)
    # Other implementations of attention lack the soft limit of scores.
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    for kind in ["missing_keys", "unexpected_keys", "mismatched_keys"]:
        assert not report[kind], f"{directory}: {kind}: {report[kind]}"
    with torch.no_grad():
        logits = model(expected["input_ids"].long()).logits
    assert logits.shape == expected["logits"].shape, f"{directory}: shape {tuple(logits.shape)}"
    difference = (logits - expected["logits"]).abs().max().item()
    assert difference <= 1e-5 * expected["logits"].abs().max().item(), f"{directory}: logits differ by {difference}"
    print(f"{directory}: {type(model).__name__}, logits are equal up to {difference}")


paths = sys.argv[1:]
assert paths and len(paths) % 2 == 0, "expected pairs of a directory and a file"
for directory, expected_path in zip(paths[::2], paths[1::2]):
    compare(directory, expected_path)
