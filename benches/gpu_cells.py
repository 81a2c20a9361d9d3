"""The cells of `benches/compare` for one GPU: PyTorch, eager and compiled, and Fulgurite in turns."""
import json
import os
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# name: (the peer's strategy, ours), each with one rank
CELLS = {
    "llama1b single": ("single", "single_device"),
    "llama1b fsdp 1": ("fsdp2", "fsdp"),
}
SIDES = {"torch": "PyTorch", "compiled": "PyTorch, compiled", "fulgurite": "Fulgurite"}
# Dense TFLOPS in bf16 by the makers' data sheets, at full clock; the first entry whose words a name
# contains.
PEAK_TFLOPS = (
    ("B200", 2250), ("H200 NVL", 835), ("H200", 989), ("H100 NVL", 835), ("H100 PCIe", 756), ("H100", 989),
    ("A100", 312), ("L40S", 362), ("A10", 125), ("L4", 121), ("RTX 4090", 165),
)


def gpu(python):
    """The name of the GPU that PyTorch would take, or None."""
    find = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    found = subprocess.run([python, "-c", find], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    return found or None


def peak_tflops(name):
    """The card's peak, or None if unknown, as for partitions of cards and laptop GPUs."""
    words = f" {name.replace('-', ' ')} "  # an A100 is called "A100-SXM4-80GB"
    if " MIG " in words or " Laptop " in words:
        return None
    return next((peak for model, peak in PEAK_TFLOPS if f" {model} " in words), None)


def flops(row):
    """Floating-point operations of a step's products, without recomputation: 6 per token and multiplied weight (all
    except the embedding, which is looked up), plus causal attention, which covers half of the pairs."""
    products = 6 * (row["parameters"] - row["vocab"] * row["dim"])
    return row["tokens_per_step"] * (products + 6 * row["layers"] * row["seq"] * row["dim"])


def commands(a, name, device):
    """The command of each side."""
    peer, ours = CELLS[name]
    common = ["--steps", str(a.steps or 20), "--warmup", "5", *a.sizes.split()]
    torch = [a.python, f"{HERE}/peer/train_gpu_peer.py", "--strategy", peer, "--device", device, *common]
    bench = [a.fulgurite, "bench", "train", "--json", "--no-floor", "--workload", "llama1b", "--ranks", "1"]
    bench += ["--accelerator", device, "--precision", "bf16-mixed", "--strategy", ours, *common]
    return {"torch": torch, "compiled": [*torch, "--compile"], "fulgurite": bench}


def run(command):
    """The row that a command prints; None on failure."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not rows:
        print(f"failed with status {done.returncode}: {' '.join(command)}\n{done.stdout}", file=sys.stderr)
        return None
    return rows[-1]


def report(rows, peak):
    """The lines of a cell's table from each side's rows, and the reasons why the sides are incomparable."""
    median = lambda side, key: statistics.median(row[key] for row in rows[side])
    ours = rows.get("fulgurite")
    lines, wrong = [], []
    for side, seen in rows.items():
        first = seen[0]
        ratio = ""
        if ours and side != "fulgurite":
            each = [us["tokens_per_s"] / peer["tokens_per_s"] for us, peer in zip(ours, seen)]
            whole = median("fulgurite", "tokens_per_s") / median(side, "tokens_per_s")
            ratio = f"{whole:.2f} ({min(each):.2f}–{max(each):.2f})"
            if ours[0]["parameters"] != first["parameters"]:
                wrong.append(f"{SIDES[side]} has {first['parameters']} parameters, Fulgurite {ours[0]['parameters']}")
        mfu = f"{flops(first) / median(side, 'step_s') / peak / 1e12:.1%}" if peak else "unknown"
        device_mib = [row["peak_device_mib"][0] for row in seen]
        on_device = "-" if None in device_mib else f"{max(device_mib):.0f}"
        kernels = first.get("kernels_per_step") or "-"
        lines.append(f"| {SIDES[side]} | {median(side, 'step_s'):.4g} | {median(side, 'tokens_per_s'):.0f} | {ratio} | {mfu} "
                     f"| {on_device} | {kernels} | {first['startup_s']:.1f}, {median(side, 'startup_s'):.1f} "
                     f"| {first['loss_first']:.4f}, {first['loss_last']:.4f} |")
    return lines, wrong


def train(a, record, cells, device, name):
    """Runs the cells and prints their tables. Returns the failures, one line each."""
    peak = a.peak_tflops or peak_tflops(name)
    known = f"{peak:g} TFLOPS in bf16" if peak else "its peak in bf16 is unknown: --peak-tflops gives it, for the MFU"
    print(f"\non {name} ({known})")
    wrong = []
    for cell in cells:
        rounds = []
        for _ in range(a.rounds):
            rounds.append({side: run(command) for side, command in commands(a, cell, device).items()})
            for side, row in rounds[-1].items():
                if row:
                    record(dict(row, cell=cell, side=side))
        failed = [side for side in SIDES if any(row[side] is None for row in rounds)]
        wrong += [f"{cell}: {SIDES[side]} failed" for side in failed]
        lines, apart = report({side: [row[side] for row in rounds] for side in SIDES if side not in failed}, peak)
        wrong += [f"{cell}: {line}" for line in apart]
        print(f"\n| {cell} | step s | tokens/s | ours to it (rounds) | MFU | peak device MiB | kernels a step "
              "| first step s: first, median | loss: first, last |\n|" + "---|" * 9)
        print("\n".join(lines), flush=True)
    return wrong
