"""Loads a base with transformers and an adapter with peft, and compares their logits.

peft_logits.py BASE ADAPTER EXPECTED.safetensors

EXPECTED has `input_ids` and `logits`.
"""

import sys
import warnings

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

base, adapter, expected_path = sys.argv[1:]
# peft only warns of keys that do not fit, so warnings are errors; deprecation warnings are ignored.
warnings.simplefilter("error", UserWarning)
expected = load_file(expected_path)
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
with torch.no_grad():
    plain = model(expected["input_ids"].long()).logits
model = PeftModel.from_pretrained(model, adapter)
model.eval()
with torch.no_grad():
    logits = model(expected["input_ids"].long()).logits
scale = expected["logits"].abs().max().item()
difference = (logits - expected["logits"]).abs().max().item()
assert difference <= 1e-5 * scale, f"logits differ by {difference}"
assert (plain - logits).abs().max().item() > 1e-3 * scale, "the adapter changes nothing"
print(f"logits are equal up to {difference}")
