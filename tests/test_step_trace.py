"""Claims: the trace of a step ends when the plan says that it does, and neither stream does two things at once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from planned import plan_by_hand
from small_models import captured

from osdp.cost.graph import COMMUNICATION, COMPUTE, StepGraph, step_graph_of
from osdp.cost.step_trace import STALL, StepTrace, step_trace
from osdp.cost.units import OPERATORS, WHOLE
from osdp.sharding import FREE, FREE_IN_NODE, FREE_TO_NODE, KEEP, KEEP_IN_NODE, REPLICATE

CASES = {
    "free": {"modes": (FREE,)},
    "recomputed": {"modes": (FREE, KEEP), "recompute": (True, False)},
    "operators": {"modes": (KEEP, FREE, REPLICATE), "granularity": OPERATORS, "recompute": (False, True)},
    "split": {"modes": (FREE, KEEP), "granularity": OPERATORS, "splits": ((4, 3), (1, 1), (2, 2))},
    "nodes": {"world": "2x2", "modes": (FREE_IN_NODE, KEEP_IN_NODE, FREE_TO_NODE, FREE), "granularity": OPERATORS},
    "accumulated": {"modes": (FREE, KEEP), "accumulation": 3, "reduce_once": (True, False)},
    "processors": {"modes": (FREE, KEEP), "recompute": (True, False), "device": "CPU"},
    "replicas": {"modes": (REPLICATE,)},
}


def traced(model: str, case: str) -> tuple[StepGraph, StepTrace]:
    how = {"world": "4", "granularity": WHOLE, "device": "RTX-3090", "precision": "bf16", **CASES[case]}
    plan = plan_by_hand(model, how.pop("world"), **how)
    graph = step_graph_of(plan, captured(model, "bf16"))
    return graph, step_trace(graph)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", ["gpt", pytest.param("t5", marks=pytest.mark.slow)])
def test_the_last_clock_is_the_stated_step(model: str, case: str) -> None:
    graph, trace = traced(model, case)
    assert trace.slowdown == pytest.approx(1.0, rel=1e-9)  # streams overlap fully: nothing is stretched
    assert trace.step_seconds == graph.seconds
    if graph.training.accumulation == 1:
        assert trace.seconds == pytest.approx(graph.seconds, rel=1e-9)
    for stream in (COMPUTE, COMMUNICATION):
        spans = [span for span in trace.spans if span.stream == stream]
        assert all(a.end <= b.start + 1e-12 for a, b in pairwise(spans))
        assert all(span.seconds > 0 for span in spans)


@pytest.mark.parametrize("case", ["free", "operators", "nodes"])
def test_stalls_are_the_exposed_communication(case: str) -> None:
    graph, trace = traced("gpt", case)
    assert sum(trace.stall_seconds.values()) == pytest.approx(graph.time().exposed_communication, rel=1e-6, abs=1e-9)
    sent = sum(span.seconds for span in trace.spans if span.stream == COMMUNICATION)
    hidden = graph.time().hidden_communication
    assert sent == pytest.approx(hidden + sum(trace.stall_seconds.values()), rel=1e-6)
    assert any(span.kind == STALL for span in trace.spans)


@pytest.mark.parametrize("case", CASES)
def test_what_slices_send_while_they_compute_is_said(case: str) -> None:
    graph, trace = traced("gpt", case)
    sent = sum(span.seconds for span in trace.spans if span.stream == COMMUNICATION)
    wires = sum(node.seconds for node in graph.nodes if node.stream == COMMUNICATION)
    assert sent + trace.sliced_seconds == pytest.approx(wires, rel=1e-6)
    assert (trace.sliced_seconds > 1e-3 * sent) == (case == "split")


def test_collectives_have_the_bytes_of_the_graph() -> None:
    graph, trace = traced("gpt", "nodes")
    planned = sum(node.nbytes for node in graph.nodes if node.stream == COMMUNICATION and node.seconds)
    assert sum(span.nbytes for span in trace.spans if span.stream == COMMUNICATION) == planned


def test_segments_follow_each_other() -> None:
    _, trace = traced("gpt", "recomputed")
    times = [time for stage_pass in trace.segments for segment in stage_pass for time in segment]
    assert times == sorted(times)
    assert times[-1] <= trace.optimizer[0] < trace.optimizer[1] == trace.seconds


def test_partial_overlap_is_stretched_to_the_stated_step() -> None:
    from dataclasses import replace

    plan = plan_by_hand("gpt", "4", modes=(FREE,), device="RTX-3090", precision="bf16")
    graph = step_graph_of(replace(plan, cluster=replace(plan.cluster, overlap=0.5)), captured("gpt", "bf16"))
    trace = step_trace(graph)
    assert trace.slowdown > 1.05
    assert trace.seconds == pytest.approx(graph.seconds, rel=1e-9)
