#!/usr/bin/env python3
"""Trains the tiny models of `plugins/models/tests/fixtures` on a GPU and on the CPU, and compares their losses.

    benches/gpu_models.py [--fulgurite PROGRAM] [--accelerator cuda] [--workers 8]

Every decoder: in f32, in bf16-mixed, with LoRA, and under fsdp with activation checkpointing; an encoder for each module.
Five steps each, in processes side by side. Needs a program that is built with `--features cuda`, and Python alone.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "plugins/models/tests/fixtures"
# The largest difference of a loss, relative to it. In bf16 the sides round at different places.
TOLERANCE, BF16_TOLERANCE = 1e-4, 3e-2
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "cat", "run", "good", "bad", "film", "is", "not"]
BERT = ["model.type=bert", "model.hidden_size=16", "model.num_hidden_layers=2", "model.num_attention_heads=2",
        "model.intermediate_size=24", "model.attention_probs_dropout_prob=0", "data.tokenizer=tokenizer.json",
        "data.seq_len=12"]
LINES = ["data.type=lines", "data.path=lines.txt", "data.tokenizer=tokenizer.json", "data.seq_len=8",
         "data.validation_fraction=0.2", "model.mlm_probability=0.3"]


def pretrained(name):
    return f"model.from_pretrained={FIXTURES / name}"


TASKS = {
    "classification": ["module.type=sequence_classification", *BERT, "data.path=texts.jsonl", "data.pad_to_multiple_of=12"],
    "tags": ["module.type=token_classification", *BERT, "data.type=words", "data.path=tags.jsonl",
             "model.hidden_dropout_prob=0"],
    "embedding": ["module.type=embedding", *BERT, "data.type=pairs", "data.path=pairs.jsonl", "model.temperature=0.5",
                  "data.pad_to_multiple_of=12"],
    "masked roberta": ["module.type=masked_lm", pretrained("roberta_masked"), *LINES],
    "masked modernbert": ["module.type=masked_lm", pretrained("modernbert_masked"), *LINES],
    "vit": ["module.type=image_classification", pretrained("vit"), "model.num_labels=2",
            'checkpoint.load.exclude=["classifier"]', "data.path=pictures", "data.height=12", "data.width=12",
            "data.validation_fraction=0.2"],
}


def words(i):
    return [WORDS[(i * 3 + k * k) % len(WORDS)] for k in range(2 + i % 6)]


def write_data(folder):
    added = [{"id": i, "content": content, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False} for i, content in enumerate(SPECIALS)]
    vocab = {name: i for i, name in enumerate(SPECIALS + WORDS)}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "added_tokens": added,
        "pre_tokenizer": {"type": "Whitespace"}, "decoder": None,
        "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}}))

    def rows(name, row):
        (folder / name).write_text("".join(json.dumps(row(i)) + "\n" for i in range(40)))

    rows("texts.jsonl", lambda i: {"text": " ".join(words(i)), "label": ["negative", "neutral", "positive"][i % 3]})
    rows("tags.jsonl", lambda i: {"tokens": words(i), "tags": [len(word) % 3 for word in words(i)]})
    rows("pairs.jsonl", lambda i: {"anchor": " ".join(words(i)), "positive": " ".join(words(i + 1))})
    (folder / "lines.txt").write_text("".join(" ".join(words(i)) + "\n" for i in range(60)))
    (folder / "tokens.bin").write_bytes(b"".join((3 + i * 7 % 40).to_bytes(2, "little") for i in range(400)))
    for label, name in enumerate(["cat", "dog"]):
        (folder / "pictures" / name).mkdir(parents=True)
        for i in range(20):
            pixels = bytes(k * (i + 2) * (label + 1) % 251 for k in range(12 * 12 * 3))
            (folder / "pictures" / name / f"{i:02}.ppm").write_bytes(b"P6\n12 12\n255\n" + pixels)


def decoders():
    for folder in sorted(FIXTURES.iterdir()):
        config = folder / "config.json"
        if config.exists() and json.loads(config.read_text())["architectures"][0].endswith(("ForCausalLM", "LMHeadModel")):
            yield folder.name


def runs():
    """Each run's name, keys and tolerance."""
    for name in decoders():
        keys = ["module.type=causal_lm", pretrained(name), "data.type=tokens", "data.path=tokens.bin", "data.seq_len=8",
                "data.batch_size=4"]
        yield name, keys, TOLERANCE
        yield f"{name}, bf16", [*keys, "trainer.precision=bf16-mixed"], BF16_TOLERANCE
        yield f"{name}, LoRA", [*keys, "trainer.adapters={ targets = ['*_proj'], rank = 4 }"], TOLERANCE
        yield f"{name}, fsdp", [*keys, "trainer.strategy=fsdp", "trainer.activation_checkpointing=full"], TOLERANCE
    for name, keys in TASKS.items():
        keys = [*keys, "data.batch_size=8"]
        yield name, keys, TOLERANCE
        yield f"{name}, bf16", [*keys, "trainer.precision=bf16-mixed"], BF16_TOLERANCE


def losses(a, folder, keys, accelerator):
    """The losses of five steps; an error's text instead."""
    root = tempfile.mkdtemp(dir=folder)
    keys = [*keys, f"trainer.accelerator={accelerator}", "trainer.devices=1", "trainer.max_steps=5", "trainer.loggers=[]",
            "trainer.log_every_n_steps=1", "trainer.limit_val_batches=2", "optimizer.lr=0.01",
            f"trainer.default_root_dir={root}"]
    command = [a.fulgurite, "fit", "--output", "json"]
    for key in keys:
        command += ["--set", key]
    try:
        done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=a.timeout,
                              env={**os.environ, "RAYON_NUM_THREADS": "1"})
    except subprocess.TimeoutExpired:
        return f"took more than {a.timeout} s on {accelerator}"
    if done.returncode:
        return f"on {accelerator}: {done.stderr[-700:]}"
    events = map(json.loads, (line for line in done.stdout.splitlines() if line.startswith("{")))
    return [event["train_loss"] for event in events if event.get("event") == "step"]


def compare(a, folder, run):
    """A run's name, the largest difference of its losses, and what is wrong."""
    name, keys, tolerance = run
    sides = [losses(a, folder, keys, accelerator) for accelerator in ("cpu", a.accelerator)]
    failed = next((side for side in sides if isinstance(side, str)), None)
    if failed or not sides[0] or len(sides[0]) != len(sides[1]):
        return name, None, failed or f"losses of {len(sides[0])} and {len(sides[1])} steps"
    most = max(abs(x - y) / abs(x) for x, y in zip(*sides))
    return name, most, None if most <= tolerance else f"{sides[1]} instead of {sides[0]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fulgurite", default=str(ROOT / "target/release/fulgurite"))
    parser.add_argument("--accelerator", default="cuda", help="the side that is compared with the CPU")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--timeout", type=float, default=120, help="seconds for a run")
    a = parser.parse_args()
    a.fulgurite = os.path.abspath(a.fulgurite)
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(a.workers) as workers:
        folder = pathlib.Path(folder)
        write_data(folder)
        wrong = 0
        for name, most, problem in workers.map(lambda run: compare(a, folder, run), list(runs())):
            wrong += problem is not None
            print(f"{name:32} {'-' if most is None else format(most, '.1e')}  {problem or ''}", flush=True)
    sys.exit(f"{wrong} runs are wrong" if wrong else 0)


if __name__ == "__main__":
    main()
