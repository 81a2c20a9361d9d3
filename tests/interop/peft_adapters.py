#!/usr/bin/env python3
"""Compares adapters that `fulgurite checkpoint convert --to peft` writes with the merged models.

    peft_adapters.py BASE ADAPTER MERGED [BASE ADAPTER MERGED ...]

PEFT's model of BASE and ADAPTER has the logits of transformers' model in MERGED, on the inputs of BASE's
`expected.safetensors`.
"""

import sys
from pathlib import Path

import peft
import torch
import transformers as hf
from safetensors.torch import load_file

KINDS = dict(
    ForCausalLM="AutoModelForCausalLM", ForSequenceClassification="AutoModelForSequenceClassification",
    ForConditionalGeneration="AutoModelForSeq2SeqLM",
)


def logits(directory, inputs, adapter=None):
    architecture = hf.AutoConfig.from_pretrained(directory).architectures[0]
    auto = next((auto for end, auto in KINDS.items() if architecture.endswith(end)), "AutoModelForCausalLM")
    options = dict(dtype=torch.float32, attn_implementation="eager")
    model = getattr(hf, auto).from_pretrained(directory, **options).eval()
    if adapter:
        model = peft.PeftModel.from_pretrained(model, adapter).eval()
        found = [name for name, module in model.named_modules() if hasattr(module, "lora_B")]
        assert found, "PEFT has put no adapter into the model"
    with torch.no_grad():
        return model(**inputs).logits


def main():
    words = sys.argv[1:]
    for base, adapter, merged in zip(words[::3], words[1::3], words[2::3]):
        recorded = load_file(Path(base) / "expected.safetensors")
        names = dict(input_ids="input_ids", mask="attention_mask", segments="token_type_ids")
        inputs = {theirs: recorded[ours] for ours, theirs in names.items() if ours in recorded}
        if hf.AutoConfig.from_pretrained(base).is_encoder_decoder:
            inputs |= dict(labels=recorded["targets"], use_cache=False)
        plain = logits(base, inputs)
        expected, found = logits(merged, inputs), logits(base, inputs, adapter)
        changed = (expected - plain).abs().max().item()
        difference = (expected - found).abs().max().item()
        print(f"{Path(base).name}: changed by {changed:.4f}, difference {difference:.2e}")
        assert changed > 1e-3, "the adapter changes nothing"
        assert difference <= 2e-5 * max(1.0, expected.abs().max().item()), "PEFT computes something else"


if __name__ == "__main__":
    main()
