"""Asks an MLflow server for what was logged, with its own client."""

import math
import sys

from mlflow.tracking import MlflowClient

client = MlflowClient(sys.argv[1])
experiment = client.get_experiment_by_name("llama ü")
runs = client.search_runs([experiment.experiment_id])
assert sorted(run.info.status for run in runs) == ["FAILED", "FINISHED"], runs
for run in runs:
    assert run.info.run_name == "version_4", run.info
    assert run.data.params == {"seed": "7", "optimizer.lr": "0.5", "optimizer.name": "sgd"}, run.data.params
    assert run.data.tags["who"] == "me" and run.data.tags["fulgurite.checkpoint"] == "step 9: logs/step-9"
    history = sorted(client.get_metric_history(run.info.run_id, "train_loss"), key=lambda m: m.step)
    assert [m.step for m in history] == list(range(1, 1501)), len(history)
    assert all(math.isclose(m.value, 1 / m.step) for m in history)
    assert math.isnan(run.data.metrics["nan"])
    assert run.data.metrics["inf"] > 1e300
print("read", len(runs), "runs")
