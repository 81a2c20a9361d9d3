"""Training steps of the peer on one GPU: PyTorch alone, and FSDP2 at world size 1, in bf16 with parameters
and AdamW's state in f32, eager or compiled. Prints one JSON object.

  train_gpu_peer.py --strategy single --steps 20 --warmup 5 [--compile] [--batch 4]

The batches are those of `fulgurite bench train`, token for token. `--device cpu` is there to try it.
"""
import argparse
import contextlib
import os
import statistics
import sys
import time

import peer_common as pc

POOL = 4  # batches, used in turn


def parse():
    a = argparse.ArgumentParser()
    a.add_argument("--strategy", choices=["single", "fsdp2"], default="single")
    a.add_argument("--compile", action="store_true")
    a.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    a.add_argument("--steps", type=int, default=20)
    a.add_argument("--warmup", type=int, default=5)
    a.add_argument("--timeout", type=float, default=1800)
    for size in (*pc.SIZE_FLAGS, "batch"):
        a.add_argument(f"--{size.replace('_', '-')}", type=int, default=0, help="0: that of llama1b")
    return a.parse_args()


def worker(a):
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    on_gpu, sharded = a.device == "cuda", a.strategy == "fsdp2"
    if on_gpu and not torch.cuda.is_available():
        sys.exit("PyTorch finds no GPU")
    cfg = pc.sizes("llama1b", a)
    if on_gpu:
        torch.cuda.set_device(0)

    # --- model: parameters and gradients in f32, everything between in bf16 (except what autocast does in f32)
    with torch.device("meta"):
        model = pc.build_model(cfg, stream_dtype=torch.bfloat16)
    layers = model.model.layers

    def loss_of_logits(logits, targets):
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    if sharded:
        dist.init_process_group("nccl" if on_gpu else "gloo")
        mesh = init_device_mesh(a.device, (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if a.compile:  # unit by unit, each inside a wrapper module, so that FSDP2's hooks are not compiled
            for i, layer in enumerate(layers):
                layers[i] = torch.compile(layer)
            loss_of_logits = torch.compile(loss_of_logits)
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=a.device)
    model.model.rope.to(a.device, torch.bfloat16)
    pc.init_weights(model, device=a.device)
    params = list(model.parameters())
    opt = torch.optim.AdamW(params, fused=True, **pc.ADAMW)

    def loss_of(ids, targets):
        return loss_of_logits(model(ids), targets)

    if a.compile and not sharded:
        loss_of = torch.compile(loss_of)
    precision = contextlib.nullcontext if sharded else lambda: torch.autocast(a.device, torch.bfloat16)

    # --- data, on the device beforehand as for Fulgurite
    pool = []
    for seed in range(POOL):
        rows = torch.tensor(pc.decoder_tokens(cfg, seed)).to(a.device)
        pool.append((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))

    def step(i):
        with precision():
            loss = loss_of(*pool[i % POOL])
        loss.backward()
        pc.clip_grads(params, pc.CLIP)
        opt.step()
        opt.zero_grad(set_to_none=True)
        return loss.detach().item()  # waits for the device: all of the step has been computed

    # --- run
    losses, times = [], []
    for i in range(a.warmup + a.steps):
        t = time.perf_counter()
        losses.append(step(i))
        if on_gpu:
            torch.cuda.synchronize()
        dt = time.perf_counter() - t
        if i == 0:
            startup = pc.since_launch()
        if i >= a.warmup:
            times.append(dt)
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else None
    reserved = torch.cuda.max_memory_reserved() / 2**20 if on_gpu else None
    kernels = count_kernels(lambda: step(a.warmup + a.steps)) if on_gpu else None
    name = torch.cuda.get_device_name(0) if on_gpu else "cpu"
    pc.hand_in(dict(times=times, startup=startup, losses=losses, n_params=sum(p.numel() for p in params), size=cfg,
                    peak=peak, reserved=reserved, kernels=kernels, device_name=name, torch=torch.__version__))
    if dist.is_initialized():
        dist.destroy_process_group()


def count_kernels(step):
    """The kernels that a step runs, copies left out; None if the profiler sees none (it may not be allowed to)."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    is_kernel = lambda e: (e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)
                           and not e.name.startswith(("Memcpy", "Memset")))
    return sum(map(is_kernel, seen.events())) or None


def main():
    a = parse()
    if pc.is_worker():
        return worker(a)
    cell = dict(bench="train", strategy=a.strategy, impl="compiled" if a.compile else "torch", accelerator=a.device,
                precision="bf16-mixed", ranks=1)
    note = pc.machine_note()
    try:
        r = pc.launch(1, len(os.sched_getaffinity(0)), a.timeout, hide_gpus=a.device == "cpu")[0]
    except RuntimeError as e:
        pc.emit(dict(cell, error=str(e), **note))
        sys.exit(1)
    med, tokens = statistics.median(r["times"]), r["size"]["batch"] * r["size"]["seq"]
    pc.emit(dict(cell, **r["size"], parameters=r["n_params"], device_name=r["device_name"], torch=r["torch"],
                 steps=len(r["times"]), warmup=a.warmup, step_s=round(med, 6), step_s_min=round(min(r["times"]), 6),
                 step_s_max=round(max(r["times"]), 6), tokens_per_step=tokens, tokens_per_s=round(tokens / med, 1),
                 peak_device_mib=[r["peak"]], reserved_device_mib=[r["reserved"]], kernels_per_step=r["kernels"],
                 startup_s=round(r["startup"], 3), loss_first=r["losses"][0],
                 loss_last=r["losses"][a.warmup + len(r["times"]) - 1], **note))


if __name__ == "__main__":
    main()
