"""One step of a run as torch.profiler sees it, and the predicted one beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from osdp.cost.graph import step_graph_of
from osdp.cost.training import PRECISIONS
from osdp.model.source import ModelSource
from osdp.planfile import Plan
from osdp.report.traces import write_predicted
from osdp.training.loop import Step

PROFILED = 3  # the first steps load libraries and make buffers
MEASURED_FILE, PREDICTED_FILE, MEMORY_FILE = "measured.trace.json", "predicted.trace.json", "predicted.memory.pickle"


def profiled(trained: Iterator[Step], folder: Path, *, steps: int, device: torch.device) -> Iterator[Step]:
    """The same steps; the third, or the last of fewer, is profiled and written to the folder."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    for _ in range(min(PROFILED, steps) - 1):
        step = next(trained, None)
        if step is None:
            return
        yield step
    with profile(activities=activities) as profiler:
        step = next(trained, None)
    if step is not None:
        profiler.export_chrome_trace(str(folder / MEASURED_FILE))
        yield step
    yield from trained


def write_prediction(plan: Plan, source: ModelSource, folder: Path) -> None:
    precision = PRECISIONS[plan.precision]
    graph = source.capture(
        precision.compute_dtype,
        held_dtype=precision.held_dtype,
        name=plan.model.name,
        compiled=plan.compiled,
        on_host=plan.has_inputs_on_host,
    )
    write_predicted(step_graph_of(plan, graph), folder / PREDICTED_FILE, folder / MEMORY_FILE)
