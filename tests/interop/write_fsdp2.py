"""Trains a step under FSDP2 on two processes and saves with HuggingFaceStorageWriter.

write_fsdp2.py DIRECTORY

Writes DIRECTORY/model and DIRECTORY/optimizer, and the whole tensors beside each, as
DIRECTORY/model.safetensors and DIRECTORY/optimizer.safetensors.
"""

import pathlib
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ports import free_port

directory = pathlib.Path(sys.argv[1])


def tensors(state):
    return {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim() > 0}


def train(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(1)
    # Dimensions that are not divisible by two.
    model = torch.nn.Sequential(
        torch.nn.Embedding(7, 6),
        torch.nn.Linear(6, 5),
        torch.nn.LayerNorm(5),
        torch.nn.Linear(5, 3, bias=False),
    )
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(7)).square().mean().backward()
    optimizer.step()
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    for name, state in [
        ("model", get_model_state_dict(model)),
        ("optimizer", get_optimizer_state_dict(model, optimizer, options=flat)),
    ]:
        state = tensors(state)
        writer = HuggingFaceStorageWriter(str(directory / name), save_distributed=True)
        dcp.save(state, storage_writer=writer)
        whole = {key: value.full_tensor().contiguous() for key, value in state.items()}
        if rank == 0:
            save_file(whole, directory / f"{name}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, (free_port(),), nprocs=2)
