"""The bytes alive at every slot of a training step, in the parts a person knows: plain sums of whole numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from osdp.cluster import Cluster
from osdp.cost.buckets import places_of
from osdp.cost.issue_peaks import counted_twice
from osdp.cost.layout import Layout, levels
from osdp.cost.lifetimes import chunk_bytes, stepping_bytes, unit_allocations
from osdp.cost.positions import CONSTANTS, PARTS, POOLS, SAVED, TEMPORARIES, Allocation, Position
from osdp.cost.slice_lifetimes import slice_growths
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
        return f"{self.at or stage_label(self.stage)} in {self.phase}"


def stage_label(stage: str) -> str:
    """A stage as people are told of it: a block by its name, what runs before or after all blocks in words."""
    return f"the {stage} of the model" if stage in ("start", "end") else stage


@dataclass(frozen=True)
class Timeline:
    """Bytes by part (rows, in the order of PARTS) and slot (columns); `starts` has each pass's first column.

    `pools` has those of them that are not in the compute stream's pool, in the order of POOLS.
    """

    layout: Layout
    parts: IntArray
    starts: tuple[int, ...]
    pools: IntArray

    @property
    def total(self) -> IntArray:
        return self.parts.sum(axis=0)

    @property
    def peak_bytes(self) -> int:
        return int(self.total.max())

    @property
    def idle_pool_bytes(self) -> int:
        """What the streams' pools hold, beyond the peak, for times of their own; see [Note: Pools]."""
        computing = int((self.total - self.pools.sum(axis=0)).max())
        return computing + int(self.pools.max(axis=1).sum()) - self.peak_bytes

    def moment(self, column: int) -> Moment:
        stage_pass = int(np.searchsorted(self.starts, column, side="right")) - 1
        stages = len(self.layout.staged)
        parts = {name: int(self.parts[row, column]) for row, name in enumerate(PARTS)}
        if stage_pass == 2 * stages:
            return Moment("the update", "the optimizer step", "", parts)
        backward = stage_pass >= stages
        staged = self.layout.staged[2 * stages - 1 - stage_pass if backward else stage_pass]
        segments = staged.trace.backward if backward else staged.trace.forward
        name = segments[(column - self.starts[stage_pass]) // 3].mark.name
        return Moment(staged.stage.name, "backward" if backward else "forward", name, parts)

    @property
    def peak(self) -> Moment:
        return self.moment(int(self.total.argmax()))


def build_timeline(
    layout: Layout, options: Sequence[Option], batch: int, training: Training, cluster: Cluster
) -> Timeline:
    """The timeline of a step: what the activations need, and every unit's holds; `options` follow `layout.units`."""
    graph = layout.graph
    passes = [staged.trace.forward for staged in layout.staged]
    passes += [staged.trace.backward for staged in reversed(layout.staged)]
    lengths = [3 * len(segments) for segments in passes]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    columns = int(starts[-1]) + 1
    change = np.zeros((len(PARTS), columns + 1), dtype=np.int64)
    pooled = np.zeros((len(POOLS), columns + 1), dtype=np.int64)
    row = {name: index for index, name in enumerate(PARTS)}
    for hold in _allocations(layout, options, training, cluster):
        begin, end = _columns(hold, starts, columns)
        change[row[hold.part], begin] += hold.nbytes
        change[row[hold.part], end] -= hold.nbytes
        if hold.pool in POOLS:
            pooled[POOLS.index(hold.pool), begin] += hold.nbytes
            pooled[POOLS.index(hold.pool), end] -= hold.nbytes
    for unit, option, places in zip(layout.units, options, layout.places, strict=True):
        for growth in slice_growths(unit, option, places, graph.operators):
            begin, end = column_of(growth.start, starts, columns), column_of(growth.end, starts, columns)
            change[row[TEMPORARIES], begin] += growth.nbytes.at(batch)
            change[row[TEMPORARIES], end] -= growth.nbytes.at(batch)
    parts = change.cumsum(axis=1)[:, :columns]
    level, workspaces = 0, cluster.device.is_cpu
    for stage_pass, segments in enumerate(passes):
        if not segments:
            continue
        slots = level + levels(segments, batch, workspaces=workspaces)
        span = slice(int(starts[stage_pass]), int(starts[stage_pass + 1]))
        at_marks = np.repeat(slots[0::3], 3)
        parts[row[SAVED], span] = np.minimum(at_marks, slots)
        parts[row[TEMPORARIES], span] += slots - parts[row[SAVED], span]
        level += segments[-1].end.at(batch)
    parts[row[CONSTANTS]] += graph.constant_bytes(batch, on_cpu=cluster.device.is_cpu)
    parts[row[SAVED], -1] = level
    for unit, option, places in zip(layout.units, options, layout.places, strict=True):
        parts[row[TEMPORARIES], -1] += stepping_bytes(unit, option, places, training, cluster)
    parts[row[TEMPORARIES], -1] += chunk_bytes(graph, training)
    return Timeline(layout, parts, tuple(int(start) for start in starts), pooled.cumsum(axis=1)[:, :columns])


def _allocations(
    layout: Layout, options: Sequence[Option], training: Training, cluster: Cluster
) -> Iterator[Allocation]:
    """Those of all units, less what blocks that prefetch two units count twice."""
    all_places = places_of(layout, options)
    for unit, option, places in zip(layout.units, options, all_places, strict=True):
        yield from unit_allocations(unit, option, places, training, cluster)
    first = 0
    for staged in layout.staged:
        own = slice(first, first + len(staged.units))
        if staged.variant.prefetch > 1:
            yield from counted_twice(staged.units, options[own], all_places[own], training, cluster)
        first = own.stop


def _columns(hold: Allocation, starts: IntArray, columns: int) -> tuple[int, int]:
    return column_of(hold.start, starts, columns), column_of(hold.end, starts, columns)


def column_of(position: Position, starts: Sequence[int] | IntArray, columns: int) -> int:
    """The column of a position, 0 before the step and behind the last after it."""
    if position.stage_pass < 0:
        return 0
    if position.stage_pass >= len(starts):
        return columns
    return min(int(starts[position.stage_pass]) + position.slot, columns)
