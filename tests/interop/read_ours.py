"""Reads a distributed checkpoint of Fulgurite with torch.distributed.checkpoint.

read_ours.py FOLDER EXPECTED.safetensors

FOLDER is `model` or `optimizer` of a checkpoint; EXPECTED has the whole tensors. Reads it in one
process, then in two, each of which holds a part.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ports import free_port

folder, expected_path = sys.argv[1:]


def check(name, found, expected):
    assert found.dtype == expected.dtype, f"{name}: {found.dtype} instead of {expected.dtype}"
    assert torch.equal(found, expected), f"{name}: other values"


def in_two(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    expected = load_file(expected_path)
    state = {
        name: distribute_tensor(torch.zeros_like(value), mesh, [Shard(0)]) if value.dim() else torch.zeros_like(value)
        for name, value in expected.items()
    }
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))
    for name, value in expected.items():
        found = state[name].full_tensor() if value.dim() else state[name]
        check(name, found, value)
    dist.destroy_process_group()


if __name__ == "__main__":
    expected = load_file(expected_path)
    state = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder), no_dist=True)
    for name, value in expected.items():
        check(name, state[name], value)
    mp.spawn(in_two, (free_port(),), nprocs=2)
    print(f"{len(expected)} tensors are equal, torch {torch.__version__}")
