"""Claims about `osdp trace`:

- The Chrome trace has every operation of the step at its time, and the memory as counters that reach the plan's peak.
- Perfetto itself opens it: it drops nothing, and finds every operation, its time and the peak.
- The snapshot's allocations add up to the timeline at every slot, and torch's own memory_viz reads it.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import perfetto
import pytest
from browser import chromium
from planned import plan_by_hand
from small_models import captured

from osdp.cli.main import main
from osdp.cost.graph import COMMUNICATION, StepGraph, step_graph_of
from osdp.cost.step_trace import step_trace
from osdp.cost.units import OPERATORS
from osdp.planfile import Plan
from osdp.report.traces import MEMORY_LIMIT, MEMORY_TOTAL, allocations, chrome_trace, memory_snapshot
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
    memory = [sum(event["args"].values()) for event in events if event["name"] == "memory"]
    assert memory == step.timeline().total.tolist()
    assert memory == [event["args"]["bytes"] for event in events if event["name"] == MEMORY_TOTAL]
    json.dumps(found, allow_nan=False)


def test_perfetto_opens_the_chrome_trace_and_loses_nothing(step: StepGraph, tmp_path: Path) -> None:
    file, trace = tmp_path / "step.trace.json", step_trace(step)
    file.write_text(json.dumps(chrome_trace(step)))
    with chromium() as browser, perfetto.opened(browser, file) as viewer:
        assert viewer.query("select name, value from stats where severity = 'error' and value > 0") == []
        ((spans, begin, end),) = viewer.query("select count(*), min(ts), max(ts + dur) from slice")
        assert spans == len(trace.spans) and end - begin == pytest.approx(step.seconds * 1e9, abs=2)
        lanes = viewer.query(
            "select thread.name, count(*) from slice join thread_track on track_id = thread_track.id"
            " join thread using (utid) group by thread.name order by thread.name"
        )
        collectives = sum(span.stream == COMMUNICATION for span in trace.spans)
        assert lanes == [["collectives", collectives], ["compute", spans - collectives]]
        highest = "select max(value) from counter join counter_track on track_id = counter_track.id where name = '{}'"
        assert viewer.query(highest.format(f"{MEMORY_TOTAL} bytes")) == [[step.timeline().peak_bytes]]
        assert viewer.query(highest.format(f"{MEMORY_LIMIT} bytes")) == [[step.cluster.limit_bytes]]


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
    assert max(sum(e["args"].values()) for e in trace["traceEvents"] if e["name"] == "memory") == peak
    snapshot = tmp_path / "plan.memory.pickle"
    # torch's own viewer; the page that it makes loads its drawing code from a network, which tests do not have
    from torch.cuda import _memory_viz

    data = pickle.loads(snapshot.read_bytes())
    lines = _memory_viz.memory(data, format_flamegraph=lambda text: text).splitlines()
    left = {block["address"]: block["size"] for segment in data["segments"] for block in segment["blocks"]}
    assert sum(int(line.rsplit(" ", 1)[1]) for line in lines) == sum(left.values())
    allocated = sum(event["action"] == "alloc" for event in data["device_traces"][0])
    assert _memory_viz.trace(data).count(" = cudaMalloc(") == allocated
    assert f"segments: {len(left)}" in _memory_viz.segsum(data)
    for page in (_memory_viz.trace_plot(data), _memory_viz.segment_plot(data)):
        assert "add_local_files" in page
