"""The bytes alive at every slot of a training step, in the parts a person knows: plain sums of whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from osdp.cluster import Cluster
from osdp.cost.layout import Layout, levels
from osdp.cost.lifetimes import (
    CONSTANTS,
    PARTS,
    SAVED,
    TEMPORARIES,
    Allocation,
    Position,
    slice_growths,
    stepping_bytes,
    unit_allocations,
)
from osdp.cost.training import Training
from osdp.cost.units import Option
from osdp.model.graph import IntArray


@dataclass(frozen=True)
class Moment:
    """One slot of the timeline: where it is, and what is alive there."""

    stage: str
    phase: str
    at: str
    parts: dict[str, int]

    @property
    def nbytes(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        if not self.at and self.stage in ("start", "end"):
            return f"the {self.stage} of the model in {self.phase}"
        return f"{self.at or self.stage} in {self.phase}"


@dataclass(frozen=True)
class Timeline:
    """Bytes by part (rows, in the order of PARTS) and slot (columns); `starts` has each visit's first column."""

    layout: Layout
    parts: IntArray
    starts: tuple[int, ...]

    @property
    def total(self) -> IntArray:
        return self.parts.sum(axis=0)

    @property
    def peak_bytes(self) -> int:
        return int(self.total.max())

    def moment(self, column: int) -> Moment:
        visit = int(np.searchsorted(self.starts, column, side="right")) - 1
        stages = len(self.layout.shaped)
        parts = {name: int(self.parts[row, column]) for row, name in enumerate(PARTS)}
        if visit == 2 * stages:
            return Moment("the update", "the optimizer step", "", parts)
        backward = visit >= stages
        shaped = self.layout.shaped[2 * stages - 1 - visit if backward else visit]
        segments = shaped.trace.backward if backward else shaped.trace.forward
        name = segments[(column - self.starts[visit]) // 3].mark.name
        return Moment(shaped.stage.name, "backward" if backward else "forward", name, parts)

    @property
    def peak(self) -> Moment:
        return self.moment(int(self.total.argmax()))


def build_timeline(
    layout: Layout, options: Sequence[Option], batch: int, training: Training, cluster: Cluster
) -> Timeline:
    """The timeline of a step: what the activations need, and every unit's holds; `options` follow `layout.units`."""
    graph = layout.graph
    passes = [shaped.trace.forward for shaped in layout.shaped]
    passes += [shaped.trace.backward for shaped in reversed(layout.shaped)]
    lengths = [3 * len(segments) for segments in passes]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    columns = int(starts[-1]) + 1
    change = np.zeros((len(PARTS), columns + 1), dtype=np.int64)
    row = {name: index for index, name in enumerate(PARTS)}
    for unit, option, places in zip(layout.units, options, layout.places, strict=True):
        for hold in unit_allocations(unit, option, places, training, cluster):
            begin, end = _columns(hold, starts, columns)
            change[row[hold.part], begin] += hold.nbytes
            change[row[hold.part], end] -= hold.nbytes
        for growth in slice_growths(unit, option, places, graph.operators):
            begin, end = column_of(growth.start, starts, columns), column_of(growth.end, starts, columns)
            change[row[TEMPORARIES], begin] += growth.nbytes.at(batch)
            change[row[TEMPORARIES], end] -= growth.nbytes.at(batch)
    parts = change.cumsum(axis=1)[:, :columns]
    level, workspaces = 0, cluster.device.is_cpu
    for visit, segments in enumerate(passes):
        if not segments:
            continue
        slots = level + levels(segments, batch, workspaces=workspaces)
        span = slice(int(starts[visit]), int(starts[visit + 1]))
        at_marks = np.repeat(slots[0::3], 3)
        parts[row[SAVED], span] = np.minimum(at_marks, slots)
        parts[row[TEMPORARIES], span] += slots - parts[row[SAVED], span]
        level += segments[-1].end.at(batch)
    parts[row[CONSTANTS]] += graph.constant_bytes(batch, on_cpu=cluster.device.is_cpu)
    parts[row[SAVED], -1] = level
    for unit, option, places in zip(layout.units, options, layout.places, strict=True):
        parts[row[TEMPORARIES], -1] += stepping_bytes(unit, option, places, training, cluster)
    return Timeline(layout, parts, tuple(int(start) for start in starts))


def _columns(hold: Allocation, starts: IntArray, columns: int) -> tuple[int, int]:
    return column_of(hold.start, starts, columns), column_of(hold.end, starts, columns)


def column_of(position: Position, starts: Sequence[int] | IntArray, columns: int) -> int:
    """The column of a position, 0 before the step and behind the last after it."""
    if position.visit < 0:
        return 0
    if position.visit >= len(starts):
        return columns
    return min(int(starts[position.visit]) + position.slot, columns)
