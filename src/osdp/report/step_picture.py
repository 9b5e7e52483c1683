"""A step as a picture shows it: the memory over time by part, and the two streams as lanes. Values, no drawing."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from osdp.cost.graph import StepGraph
from osdp.cost.positions import BUFFERS, CONSTANTS, GATHERED, GRADIENTS, PARAMETERS, PARTS, SAVED, STATES, TEMPORARIES
from osdp.cost.step_trace import Span, StepTrace, step_trace
from osdp.cost.timeline import Timeline

SAMPLES = 400  # of a memory curve at most: as many as a screen can show
STACKED = (CONSTANTS, PARAMETERS, STATES, GRADIENTS, SAVED, GATHERED, BUFFERS, TEMPORARIES)  # what changes least first


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes by part over time: sample i holds from `seconds[i]` to `seconds[i + 1]`.

    `part_bytes` has a row for each part, in the order of STACKED. Slots within a SAMPLES-th of the step are one sample,
    that with most bytes, so that no peak is lost.
    """

    seconds: tuple[float, ...]
    part_bytes: tuple[tuple[int, ...], ...]
    places: tuple[str, ...]

    @property
    def totals(self) -> tuple[int, ...]:
        return tuple(sum(column) for column in zip(*self.part_bytes, strict=True))

    @property
    def peak(self) -> int:
        """The sample with most bytes."""
        totals = self.totals
        return totals.index(max(totals))


@dataclass(frozen=True)
class StepPicture:
    """One way to train: its figures, and its last micro-batch with the optimizer."""

    name: str
    batch_size: int
    accumulation: int
    fits: bool
    samples_per_second: float
    step_seconds: float
    peak_bytes: int
    forward_end: float
    backward_end: float
    end: float
    slowdown: float
    sliced_seconds: float  # of collectives within a split operator's computation, which have no span
    memory: MemoryCurve
    spans: tuple[Span, ...]

    @property
    def stall_seconds(self) -> float:
        return sum(span.seconds for span in self.spans if span.kind == "stall")


def step_picture(name: str, graph: StepGraph) -> StepPicture:
    trace, timeline = step_trace(graph), graph.timeline()
    samples = graph.batch * graph.training.accumulation * graph.cluster.world_size
    forward = trace.segments[: len(graph.layout.staged)]
    return StepPicture(
        name=name,
        batch_size=graph.batch,
        accumulation=graph.training.accumulation,
        fits=timeline.peak_bytes <= graph.cluster.limit_bytes,
        samples_per_second=samples / trace.step_seconds,
        step_seconds=trace.step_seconds,
        peak_bytes=timeline.peak_bytes,
        forward_end=max((segment[1] for stage_pass in forward for segment in stage_pass), default=0.0),
        backward_end=trace.optimizer[0],
        end=trace.optimizer[1],
        slowdown=trace.slowdown,
        sliced_seconds=trace.sliced_seconds,
        memory=memory_curve(timeline, trace),
        spans=trace.spans,
    )


def memory_curve(timeline: Timeline, trace: StepTrace, samples: int = SAMPLES) -> MemoryCurve:
    starts = column_seconds(timeline, trace)
    total = timeline.total
    edges = _edges(np.append(starts, trace.seconds), samples)
    kept = [int(low + total[low:high].argmax()) for low, high in pairwise(edges)]
    rows = [PARTS.index(part) for part in STACKED]
    return MemoryCurve(
        seconds=(*(float(starts[low]) for low in edges[:-1]), trace.seconds),
        part_bytes=tuple(tuple(int(value) for value in timeline.parts[row, kept]) for row in rows),
        places=tuple(str(timeline.moment(column)) for column in kept),
    )


def _edges(times: np.ndarray, samples: int) -> list[int]:
    """The first slot of every sample, and behind the last: short slots that follow each other share one."""
    width = times[-1] / samples
    bins = (times[:-1] / width).astype(np.int64)
    long = np.diff(times) > width
    alone = long[1:] | long[:-1] | (bins[1:] != bins[:-1])
    return [0, *(int(column) + 1 for column in np.flatnonzero(alone)), len(bins)]


def column_seconds(timeline: Timeline, trace: StepTrace) -> np.ndarray:
    """When each slot of a timeline begins. What comes before a segment's kernels shares the time up to them."""
    found = np.zeros(len(timeline.total))
    column, before = 0, 0.0
    for stage_pass in trace.segments:
        for start, end in stage_pass:
            found[column : column + 3] = before, (before + start) / 2, start
            column, before = column + 3, end
    found[column] = trace.optimizer[0]
    return np.maximum.accumulate(found)  # sums of the same seconds differ in their last digits
