"""Converts small models with `fulgurite checkpoint convert --to gguf` and runs them in llama.cpp beside transformers.

    python gguf_llama_cpp.py FULGURITE DIR [NAME ...]

For each model: tokens of texts are equal, logits differ by at most the error of the type, and greedy text is equal in
f32 and f16. The package gguf quantises to the same bytes, and transformers reads the files that it can. Then adapters,
applied by peft and by llama.cpp. Needs torch, transformers, peft, sentencepiece, gguf and llama-cpp-python.
"""

import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import peft
import torch
from transformers import AutoModelForCausalLM

import gguf_models

# The largest difference of logits, relative to the largest logit. With q8_0 and q4_k, llama.cpp rounds activations, too.
TOLERANCES = dict(f32=2e-5, f16=5e-3, bf16=2e-2, q8_0=6e-2, q4_k=0.4)
# llama.cpp looks GELU up in a table of f16.
GELU = 2e-3
# transformers reads neither the other architectures nor all of their metadata.
READ_BY_TRANSFORMERS = ["llama_spm", "mistral", "qwen2", "phi3"]
PROMPT = "Hello, world! 42"
TOKENS = 24

fulgurite, out = sys.argv[1], Path(sys.argv[2])
names = sys.argv[3:] or list(gguf_models.MODELS)
quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
llama_cpp.llama_log_set(quiet, None)


def convert(*words):
    ran = subprocess.run([fulgurite, "checkpoint", "convert", *map(str, words), "--to", "gguf", "--overwrite", "--quiet"], capture_output=True, text=True)
    assert ran.returncode == 0, f"{words}: {ran.stderr}"
    return ran.stderr


def load(path, **keys):
    return llama_cpp.Llama(
        str(path), n_ctx=96, n_batch=96, logits_all=True, verbose=False, type_k=0, type_v=0, flash_attn=False, n_threads=2, **keys
    )


def logits(model, ids):
    model.reset()
    model.eval(ids)
    return np.array(model.scores[: len(ids)])


def greedy(model, ids):
    ids = list(ids)
    model.reset()
    model.eval(ids)
    for _ in range(TOKENS):
        ids.append(int(np.argmax(model.scores[model.n_tokens - 1])))
        model.eval(ids[-1:])
    return ids


def theirs(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()


def their_greedy(model, ids):
    ids = list(ids)
    for _ in range(TOKENS):
        ids.append(int(np.argmax(theirs(model, ids)[-1])))
    return ids


def check_greedy(what, reader, text, expected):
    """The next token of each beginning of a greedy text is the largest logit, wherever rounding allows it."""
    found, sure = logits(reader, text[:-1])[-TOKENS:], 0
    for step, (ours, wanted) in enumerate(zip(found, expected[-TOKENS:], strict=True)):
        top = np.sort(wanted)
        if top[-1] - top[-2] > 2 * np.abs(ours - wanted).max():
            assert np.argmax(ours) == np.argmax(wanted), f"{what}: token {step} of the greedy text"
            sure += 1
    assert sure >= TOKENS / 2, f"{what}: only {sure} tokens are decided"
    return f" ({sure} of {TOKENS} tokens)"


def check(what, found, expected, tolerance):
    difference = np.abs(found - expected).max() / np.abs(expected).max()
    assert difference <= tolerance, f"{what}: logits differ by {difference:.2e} of the largest"
    return difference


def check_tokens(name, model, tokenizer):
    for text in gguf_models.TEXTS + [PROMPT]:
        expected = tokenizer(text)["input_ids"]
        found = model.tokenize(text.encode(), add_bos=True, special=True)
        assert found == expected, f"{name}: {text!r}: {found} instead of {expected}"


def check_bytes(name, exact, path):
    """The package gguf, which quantises to all types but q4_k and q6_k, makes the same bytes of the f32 file."""
    exact = {tensor.name: tensor.data for tensor in gguf.GGUFReader(exact).tensors}
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.tensor_type.name not in ("Q4_K", "Q6_K"):
            expected = gguf.quants.quantize(exact[tensor.name], tensor.tensor_type)
            assert expected.tobytes() == tensor.data.tobytes(), f"{name}: {tensor.name}: {tensor.tensor_type.name}"


def check_transformers(name, directory, path, ids, expected):
    shutil.copy(path, directory / "model.gguf")
    model = AutoModelForCausalLM.from_pretrained(directory, gguf_file="model.gguf", dtype=torch.float32, attn_implementation="eager")
    check(f"{name}: transformers", theirs(model.eval(), ids), expected, 1e-6)
    (directory / "model.gguf").unlink()


def compare(name):
    directory = out / name
    model, tokenizer = gguf_models.make(name, directory)
    ids = tokenizer(gguf_models.TEXTS[0] + PROMPT)["input_ids"][:48]
    prompt = tokenizer(PROMPT)["input_ids"]
    if name == "phi3_long":
        # llama.cpp takes the long factors for its whole context, transformers from the original length on.
        prompt = ids[:40]
    expected = theirs(model, ids)
    text = their_greedy(model, prompt)
    text_logits = theirs(model, text[:-1])
    differences = {}
    for dtype, tolerance in TOLERANCES.items():
        path = out / f"{name}.{dtype}.gguf"
        convert(directory, path, "--dtype", dtype)
        reader = load(path)
        if dtype == "f32":
            exact = path.rename(out / f"{name}.exact.gguf")
            shutil.copy(exact, path)
            if name in READ_BY_TRANSFORMERS:
                check_transformers(name, directory, path, ids, expected)
            check_tokens(name, reader, tokenizer)
            template = tokenizer.chat_template
            assert reader.metadata.get("tokenizer.chat_template") == template, f"{name}: chat template"
        if name.startswith(("gpt", "gemma")):
            tolerance = max(tolerance, GELU)
        check_bytes(name, exact, path)
        differences[dtype] = check(f"{name}: {dtype}", logits(reader, ids), expected, tolerance)
        if dtype == "f32":
            found = greedy(reader, prompt)
            assert found == text, f"{name}: greedy {found} instead of {text}"
        if dtype == "f16":
            sure = check_greedy(f"{name}: f16", reader, text, text_logits)
            differences[dtype] = f"{differences[dtype]:.1e}{sure}"
        reader.close()
        path.unlink()
    exact.unlink()
    show = lambda x: x if isinstance(x, str) else f"{x:.1e}"
    print(f"{name}: " + ", ".join(f"{dtype} {show(x)}" for dtype, x in differences.items()), flush=True)


def compare_adapter(name, targets, rslora=False):
    directory, adapter = out / name, out / f"{name}-adapter"
    model, tokenizer = gguf_models.make(name, directory)
    shutil.rmtree(adapter, ignore_errors=True)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, use_rslora=rslora, init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(adapter)
    ids = tokenizer(gguf_models.TEXTS[0])["input_ids"][:32]
    with torch.no_grad():
        expected = adapted(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    base, lora = out / "base.gguf", out / "lora.gguf"
    convert(directory, base, "--dtype", "f32")
    convert(adapter, lora, "--base", directory)
    reader = load(base, lora_path=str(lora))
    tolerance = GELU if name.startswith(("gpt", "gemma")) else TOLERANCES["f32"]
    with_adapter = check(f"{name}: adapter", logits(reader, ids), expected, tolerance)
    reader.close()
    plain = load(base)
    without = logits(plain, ids)
    plain.close()
    assert np.abs(without - expected).max() > 0.05 * np.abs(expected).max(), f"{name}: the adapter changes nothing"
    print(f"{name} with an adapter of {', '.join(targets)}: {with_adapter:.1e}", flush=True)


for name in names:
    compare(name)
if len(sys.argv) == 3:
    every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    compare_adapter("llama", every)
    compare_adapter("llama_linear", ["q_proj", "lm_head"], rslora=True)
    compare_adapter("qwen3", every)
    compare_adapter("gemma2", ["q_proj", "v_proj"])
    compare_adapter("phi3", ["qkv_proj", "gate_up_proj", "down_proj"])
    compare_adapter("gpt_neox", ["query_key_value", "dense_h_to_4h"])
