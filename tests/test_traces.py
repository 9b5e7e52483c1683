"""Claims about `osdp trace` and `osdp train --trace`:

- The Chrome trace has every operation of the step at its time, and the memory as counters that reach the plan's peak.
- The snapshot's allocations add up to the timeline at every slot, and torch's own memory_viz reads it.
- `osdp train --trace` writes the measured trace beside the predicted one.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from planned import plan_by_hand
from small_models import captured

from osdp.cli.main import main
from osdp.cost.graph import StepGraph, step_graph_of
from osdp.cost.step_trace import step_trace
from osdp.cost.units import OPERATORS
from osdp.planfile import Plan
from osdp.report.traces import allocations, chrome_trace, memory_snapshot
from osdp.sharding import FREE, KEEP, REPLICATE


@pytest.fixture(scope="module")
def step() -> StepGraph:
    how = {"granularity": OPERATORS, "recompute": (True, False), "device": "RTX-3090", "precision": "bf16"}
    plan = plan_by_hand("gpt", "4", modes=(FREE, KEEP, REPLICATE), splits=((2, 1), (1, 1)), **how)
    return step_graph_of(plan, captured("gpt"))


def test_the_chrome_trace_is_the_step(step: StepGraph) -> None:
    found, trace = chrome_trace(step), step_trace(step)
    events = found["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(trace.spans)
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(step.seconds * 1e6)
    memory = [sum(event["args"].values()) for event in events if event["ph"] == "C"]
    assert memory == step.timeline().total.tolist()
    json.dumps(found, allow_nan=False)


def test_allocations_add_up_to_the_timeline(step: StepGraph) -> None:
    timeline = step.timeline()
    total = np.zeros(len(timeline.total) + 1, dtype=np.int64)
    for each in allocations(step, timeline):
        assert each.nbytes > 0 and each.begin < each.end
        total[each.begin] += each.nbytes
        total[each.end] -= each.nbytes
    assert np.array_equal(total.cumsum()[:-1], timeline.total)


def test_the_snapshot_replays_to_the_peak(step: StepGraph) -> None:
    snapshot = memory_snapshot(step)
    alive: dict[int, int] = {}
    highest = 0
    for event in snapshot["device_traces"][0]:
        if event["action"] == "alloc":
            assert event["addr"] not in alive
            alive[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            assert alive.pop(event["addr"]) == event["size"]
        highest = max(highest, sum(alive.values()))
    assert highest == step.timeline().peak_bytes
    assert {seg["address"]: seg["total_size"] for seg in snapshot["segments"]} == alive


def test_the_command_writes_what_torch_reads(
    tiny_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(tiny_plan.read_bytes())
    assert main(["trace", str(path), "--quiet"]) == 0
    assert "plan.trace.json" in capsys.readouterr().out
    peak = Plan.load(path).predicted.peak_bytes
    trace = json.loads((tmp_path / "plan.trace.json").read_text())
    assert max(sum(e["args"].values()) for e in trace["traceEvents"] if e["ph"] == "C") == peak
    snapshot = tmp_path / "plan.memory.pickle"
    assert set(pickle.loads(snapshot.read_bytes())) >= {"segments", "device_traces"}
    viewer = [sys.executable, "-m", "torch.cuda._memory_viz"]
    plot = tmp_path / "memory.html"
    run = subprocess.run([*viewer, "trace_plot", str(snapshot), "-o", str(plot)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "add_local_files" in plot.read_text()


def test_training_writes_the_measured_trace_beside_the_predicted_one(tmp_path: Path) -> None:
    folder, config = tmp_path / "traces", tmp_path / "run.toml"
    config.write_text('model = "gpt-tiny"\nsteps = 2\nseq-len = 16\nglobal-batch = 2\nquiet = true\njson = true\n')
    command = [sys.executable, "-m", "osdp", "train", "--config", str(config), "--trace", str(folder)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    end = json.loads(run.stdout.splitlines()[-1])
    assert (end["event"], end["steps"]) == ("end", 2)  # as the file says
    assert sorted(path.name for path in folder.iterdir()) == [
        "measured.trace.json",
        "predicted.memory.pickle",
        "predicted.trace.json",
    ]
    measured = json.loads((folder / "measured.trace.json").read_text())
    assert any("aten::" in event.get("name", "") for event in measured["traceEvents"])
