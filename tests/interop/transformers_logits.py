"""Loads full checkpoints with transformers and compares their logits.

transformers_logits.py DIRECTORY EXPECTED.safetensors [DIRECTORY EXPECTED.safetensors ...]

EXPECTED has `logits`, and `input_ids` with `mask` and `segments`, or `pictures`, as
`tests/fixtures/*/expected.safetensors` do. For a decoder that attends to an encoder it has `targets`, too.
"""

import json
import sys

import torch
import transformers
from safetensors.torch import load_file


def compare(directory, expected_path):
    expected = load_file(expected_path)
    # Other implementations of attention lack the soft limit of scores.
    with open(f"{directory}/config.json") as config:
        architecture = json.load(config)["architectures"][0]
    model, report = getattr(transformers, architecture).from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    for kind in ["missing_keys", "unexpected_keys", "mismatched_keys"]:
        assert not report[kind], f"{directory}: {kind}: {report[kind]}"
    names = {
        "input_ids": "input_ids",
        "mask": "attention_mask",
        "segments": "token_type_ids",
        "pictures": "pixel_values",
    }
    inputs = {key: expected[name] for name, key in names.items() if name in expected}
    inputs = {key: value if value.is_floating_point() else value.long() for key, value in inputs.items()}
    if model.config.is_encoder_decoder:
        inputs |= dict(labels=expected["targets"], use_cache=False)
    model.eval()
    with torch.no_grad():
        logits = model(**inputs).logits
    assert logits.shape == expected["logits"].shape, f"{directory}: shape {tuple(logits.shape)}"
    difference = (logits - expected["logits"]).abs().max().item()
    assert difference <= 1e-5 * expected["logits"].abs().max().item(), f"{directory}: logits differ by {difference}"
    print(f"{directory}: {type(model).__name__}, logits are equal up to {difference}")


paths = sys.argv[1:]
assert paths and len(paths) % 2 == 0, "expected pairs of a directory and a file"
for directory, expected_path in zip(paths[::2], paths[1::2]):
    compare(directory, expected_path)
