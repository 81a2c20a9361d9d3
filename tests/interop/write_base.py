"""Makes a small Llama whose layers bitsandbytes can quantise.

write_base.py DIRECTORY

Writes the model, and expected.safetensors with `input_ids`, `targets` and `logits`.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

directory = Path(sys.argv[1])
torch.manual_seed(5)
config = LlamaConfig(
    vocab_size=97,
    hidden_size=128,
    intermediate_size=320,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    initializer_range=0.08,
)
model = LlamaForCausalLM(config).eval()
model.save_pretrained(directory)
ids = torch.randint(0, config.vocab_size, (2, 24))
with torch.no_grad():
    logits = model(ids).logits
targets = ids.roll(-1, dims=1)
save_file({"input_ids": ids, "targets": targets, "logits": logits}, directory / "expected.safetensors")
