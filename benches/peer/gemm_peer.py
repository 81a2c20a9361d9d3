"""PyTorch's matrix products on one core, those of `fulgurite bench gemm`. Prints a JSON object a product.

  gemm_peer.py [--dtype f32|bf16] [--repeat 7]
"""
import argparse
import statistics
import time

import peer_common as pc

SIZES = [
    (1024, 512, 512), (1024, 512, 1408), (1024, 1408, 512), (1024, 512, 4096), (256, 128, 128), (256, 128, 384),
    (256, 128, 512), (1024, 1024, 1024), (2048, 2048, 2048),
]
MEASURED_SECS = 0.02


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    a.add_argument("--repeat", type=int, default=7)
    a = a.parse_args()
    import torch
    torch.set_num_threads(1)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[a.dtype]
    for tokens, inputs, outputs in SIZES:
        x, y, weight = (torch.full(size, 0.01, dtype=dtype) for size in ((tokens, inputs), (tokens, outputs), (outputs, inputs)))
        products = {"forward": (x, weight.t()), "input_grad": (y, weight), "weight_grad": (y.t(), x)}
        for product, (left, right) in products.items():
            out = left @ right
            times = []
            for _ in range(a.repeat):
                start, count = time.perf_counter(), 0
                while count == 0 or time.perf_counter() - start < MEASURED_SECS:
                    torch.matmul(left, right, out=out)
                    count += 1
                times.append((time.perf_counter() - start) / count)
            seconds = statistics.median(times)
            pc.emit(dict(bench="gemm", dtype=a.dtype, instructions=torch.backends.cpu.get_cpu_capability(), threads=1, tokens=tokens,
                         inputs=inputs, outputs=outputs, product=product, seconds=seconds,
                         gflops_per_core=2 * tokens * inputs * outputs / seconds / 1e9))


main()
