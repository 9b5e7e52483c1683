"""Claims about what `osdp train` writes for others' programs, of one run with all of it:

- `--trace` writes the measured trace beside the predicted one.
- TensorBoard's own reader finds in what `--tensorboard` wrote the values that the run printed, MFU included.
- W&B's own reader finds the same values in what `--wandb` wrote offline, and the run's settings.
- `--config` is read: the run was as long as the file says.
- A step has its MFU, and names that dashboards group by.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from osdp.planfile import Plan
from osdp.training.curves import curves
from osdp.training.drift import Timing
from osdp.training.logging import measured_mfu, step_document, step_line
from osdp.training.loop import Step

CONFIG = 'model = "gpt-tiny"\nsteps = 3\nseq-len = 16\nglobal-batch = 2\nvalidation = 0.1\nquiet = true\njson = true\n'


@dataclass(frozen=True)
class Run:
    folder: Path
    events: list[dict[str, Any]]

    @property
    def steps(self) -> dict[int, dict[str, float]]:
        return {event["number"]: curves(event) for event in self.events if event["event"] == "step"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    (folder / "run.toml").write_text(CONFIG)
    outputs = ("--trace", "traces", "--tensorboard", "board", "--wandb", "osdp")
    command = [sys.executable, "-m", "osdp", "train", "--config", "run.toml", *outputs]
    offline = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = subprocess.run(command, cwd=folder, env=offline, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Run(folder, [json.loads(line) for line in done.stdout.splitlines()])


def test_the_run_is_as_its_file_says(run: Run) -> None:
    assert [event["event"] for event in run.events] == ["start", "step", "step", "step", "end"]
    assert run.steps[3]["validation/loss"] > 0


def test_the_measured_trace_is_beside_the_predicted_one(run: Run) -> None:
    assert sorted(path.name for path in (run.folder / "traces").iterdir()) == [
        "measured.trace.json",
        "predicted.memory.pickle",
        "predicted.trace.json",
    ]
    measured = json.loads((run.folder / "traces/measured.trace.json").read_text())
    assert any("aten::" in event.get("name", "") for event in measured["traceEvents"])


def test_tensorboard_reads_what_was_written(run: Run) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tensorboard's own imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        read = EventAccumulator(str(run.folder / "board")).Reload()
        found = {name: {each.step: each.value for each in read.Scalars(name)} for name in read.Tags()["scalars"]}
    assert "throughput/mfu" in found
    names = {name for values in run.steps.values() for name in values}
    assert found.keys() == names
    for name, values in found.items():
        printed = {number: step[name] for number, step in run.steps.items() if name in step}
        assert values == pytest.approx(printed, rel=1e-6)  # it stores 32 bits


def test_wandb_reads_what_was_written(run: Run) -> None:
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    (file,) = (run.folder / "wandb").glob("offline-run-*/run-*.wandb")
    store, records = DataStore(), []
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        records.append(Record.FromString(data))
    store._fp.close()
    found, settings = {}, {}
    for record in records:
        if record.HasField("history"):
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            number = int(items["_step"])
            found[number] = {name: json.loads(value) for name, value in items.items() if not name.startswith("_")}
        for update in (*record.config.update, *record.run.config.update):
            settings["/".join(update.nested_key) or update.key] = update.value_json
    assert found.keys() == run.steps.keys()
    for number, values in run.steps.items():
        assert found[number] == pytest.approx(values)
    plan = run.events[0]["plan"]
    assert json.loads(settings["global_batch"]) == 2
    assert json.loads(settings["predicted_peak_bytes"]) == plan["predicted"]["peak_bytes"]


def test_a_step_has_its_mfu_and_names_that_dashboards_group_by(plan: Plan) -> None:
    step = Step(3, 2.5, 0.7, 1e-3, 4000.0, Timing(3.0, 0.1, None, 1 << 30))
    assert measured_mfu(step, plan) == pytest.approx(0.2)  # twice the predicted seconds, half of the predicted 0.4
    document = step_document(step, plan)
    assert document["mfu"] == pytest.approx(0.2) and document["samples_per_second"] == plan.global_batch / 3.0
    assert "MFU 20.0 %" in step_line(step, 10, 1.5, document["mfu"])
    found = curves(document)
    assert found["train/loss"] == 2.5 and found["throughput/mfu"] == pytest.approx(0.2)
    assert "step/waited_seconds" not in found and "validation/loss" not in found  # there is no value
    assert measured_mfu(step, replace(plan, predicted=replace(plan.predicted, mfu=0.0))) is None
