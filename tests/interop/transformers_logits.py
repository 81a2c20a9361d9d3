"""Loads a full checkpoint with transformers and compares its logits.

transformers_logits.py DIRECTORY EXPECTED.safetensors

EXPECTED has `input_ids` and `logits`, as `tests/fixtures/*/expected.safetensors` do.
"""

import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

directory, expected_path = sys.argv[1:]
expected = load_file(expected_path)
model, report = AutoModelForCausalLM.from_pretrained(
    directory, dtype=torch.float32, output_loading_info=True
)
for kind in ["missing_keys", "unexpected_keys", "mismatched_keys"]:
    assert not report[kind], f"{kind}: {report[kind]}"
with torch.no_grad():
    logits = model(expected["input_ids"].long()).logits
difference = (logits - expected["logits"]).abs().max().item()
assert difference <= 1e-5 * expected["logits"].abs().max().item(), f"logits differ by {difference}"
print(f"logits are equal up to {difference}")
