"""Reads event files as TensorBoard does, and asks a TensorBoard that serves them."""

import json
import math
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

root = sys.argv[1]
accumulator = EventAccumulator(f"{root}/resumed")
accumulator.Reload()
scalars = accumulator.Scalars("train_loss")
assert [s.step for s in scalars] == list(range(1, 21)), [s.step for s in scalars]
expected = [1 / n if n <= 10 else 100 + 1 / n for n in range(1, 21)]
for scalar, value in zip(scalars, expected):
    assert math.isclose(scalar.value, value, rel_tol=1e-6), (scalar, value)
assert [s.step for s in accumulator.Scalars("val_loss")] == [3]
assert math.isnan(accumulator.Scalars("nan")[0].value)
[picture] = accumulator.Images("val_confusion")
assert (picture.step, picture.width, picture.height) == (20, 96, 48), picture
assert picture.encoded_image_string.startswith(b"\x89PNG")
print("scalars:", accumulator.Tags())


def check_server(*options):
    """The server, with its plugins."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", "--logdir", root, "--port", "0", *options],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        base = None
        for line in server.stderr:
            if found := re.search(r"http://[^/ ]+:\d+/", line):
                base = found.group(0)
                break
        assert base, "the server tells its address"

        def get(path, body=None, **query):
            url = base + "data/plugin/" + path + ("?" + urllib.parse.urlencode(query) if query else "")
            data = json.dumps(body).encode() if body is not None else None
            headers = {"Content-Type": "application/json"} if data else {}
            with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
                text = answer.read()
            return json.loads(text)

        deadline = time.time() + 60
        points, text = [], []
        while [p[1] for p in points] != list(range(1, 21)) or not text:
            assert time.time() < deadline, (points, text)
            time.sleep(0.2)
            if get("text/tags").get("resumed"):
                points = get("scalars/scalars", run="resumed", tag="train_loss")
                text = get("text/text", run="resumed", tag="sample")
        assert math.isclose(points[10][2], 100 + 1 / 11, rel_tol=1e-6), points
        assert text[0]["step"] == 20 and "<em>Once</em> upon ü" in text[0]["text"], text
        histogram = get("histograms/histograms", run="resumed", tag="weights")
        buckets = histogram[0][2]
        assert math.isclose(sum(b[2] for b in buckets), 1000, rel_tol=1e-6), buckets
        assert buckets[0][0] == -5.0 and math.isclose(buckets[-1][1], 4.99, rel_tol=1e-6), buckets
        experiment = get("hparams/experiment", {"experimentName": ""})
        names = {info["name"]: info["type"] for info in experiment["hparamInfos"]}
        print("hparams:", names)
        metrics = [info["name"]["tag"] for info in experiment["metricInfos"]]
        assert "train_loss" in metrics, metrics
        groups = get(
            "hparams/session_groups",
            {
                "startIndex": 0,
                "sliceSize": 10,
                "allowedStatuses": ["STATUS_SUCCESS", "STATUS_UNKNOWN", "STATUS_FAILURE", "STATUS_RUNNING"],
                "colParams": [{"metric": {"tag": "train_loss", "group": ""}}],
            },
        )
        [group] = groups["sessionGroups"]
        assert group["hparams"]["optimizer.lr"] == 0.5, group
        assert group["hparams"]["optimizer.name"] == "sgd", group
        assert group["sessions"][0]["status"] == "STATUS_SUCCESS", group
        print("served by", base, *options)
    finally:
        server.kill()


check_server("--load_fast=false")  # the loader in Python
check_server("--load_fast=true")  # the one in Rust
