"""Saves a model with torch.save, as programs do.

write_torch.py DIRECTORY

Writes plain.pth, lightning.ckpt (under the names of DistributedDataParallel and torch.compile) and
the same values in expected.safetensors.
"""

import pathlib
import sys

import torch
from safetensors.torch import save_file

directory = pathlib.Path(sys.argv[1])
torch.manual_seed(1)
model = torch.nn.TransformerEncoderLayer(16, 2, 24, batch_first=True).to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(2, 3, 16, dtype=torch.bfloat16)).float().mean().backward()
optimizer.step()
state = model.state_dict()
torch.save(state, directory / "plain.pth")
torch.save(
    {
        "state_dict": {f"module._orig_mod.{k}": v for k, v in state.items()},
        "optimizer_states": [optimizer.state_dict()],
        "rng": torch.get_rng_state(),
        "seed": torch.seed(),
        "epoch": 1,
    },
    directory / "lightning.ckpt",
)
save_file(state, directory / "expected.safetensors")
