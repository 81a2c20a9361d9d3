"""Loads a base with transformers, quantised by bitsandbytes, and an adapter with peft, and compares their logits.

qlora_logits.py BASE ADAPTER EXPECTED.safetensors

EXPECTED has `input_ids` and `logits`. Both quantise the scales of blocks a second time, in ways of their own, so that
logits are not equal to the bit.
"""

import sys

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

base, adapter, expected_path = sys.argv[1:]
expected = load_file(expected_path)
ids = expected["input_ids"].long()


def logits(double):
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, quantization_config=quantization, device_map="cpu"
    )
    model = PeftModel.from_pretrained(model, adapter).eval()
    with torch.no_grad():
        return model(ids).logits


scale = expected["logits"].abs().max().item()
single, double = logits(False), logits(True)


def difference(a, b):
    return ((a - b).norm() / b.norm()).item()


own = difference(double, single)
ours = difference(expected["logits"], single)
print(f"from bitsandbytes with exact scales: ours {ours}, bitsandbytes with double quantisation {own}")
assert ours <= 1.5 * own + 1e-3, f"{ours}, and {own} within bitsandbytes"
