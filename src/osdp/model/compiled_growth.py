"""Bytes of compiled blocks at any batch size, from traces at two.

[Note: Uneven segments]
What is saved grows in straight lines. Between two marks torch.compile may fuse otherwise at another batch size, or take
a freed tensor's memory for one of equal size. There the highest levels of both batch sizes give two lines, of which the
higher one counts: the line through both, and one from the larger batch size on which all that is above the mark's level
grows with the batch. The order in which a block's gradients are made may differ too: then they count as activations
until the block is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from osdp.model.graph import IntArray, Mark
from osdp.model.kernels import KernelKind
from osdp.model.stages import GrowingTrace, UnevenGrowth
from osdp.model.trace import RawTrace

Pair = tuple[int, int]
"""A constant, and what each sample adds."""


def fit_levels(traces: Mapping[int, RawTrace], gradient_bytes: Mapping[str, int]) -> GrowingTrace:
    """The bytes of one or two traces at every batch size, without what kernels cost; see [Note: Uneven segments].

    [Constraint] equal marks, and levels at marks on a line, but for those of gradients.
    """
    (low, first), (high, second) = min(traces.items()), max(traces.items())
    if first.marks != second.marks:
        first, second = (_gradients_last(trace, gradient_bytes) for trace in (first, second))
    if first.marks != second.marks:
        raise UnevenGrowth(f"compiled blocks are entered and left in another order at batch {high} than at {low}")
    line = _Line(low, high)
    levels = [
        line.above(one, other) if mark.kind == "gradient" else line.exact(one, other)
        for mark, one, other in zip(first.marks, first.mark_live, second.mark_live, strict=True)
    ]
    rows: list[_Row] = []
    places: list[int] = []
    for index, level in enumerate(levels):
        places.append(len(rows))
        rows += _rows(line, level, _kernels(first, index), _kernels(second, index))
    nothing = np.zeros((len(rows), 2), dtype=np.int64)
    return GrowingTrace(
        marks=tuple(first.marks),
        mark_kernel=tuple(places),
        backward_mark=first.backward_mark,
        flops=nothing,
        moved=nothing,
        live=_array([row.live for row in rows]),
        mark_live=_array(levels),
        cast_live=_array(levels),
        end_live=_array([line.exact(first.end_live, second.end_live)])[0],
        kinds=np.array([row.kind for row in rows], dtype=np.int64),
        workspaces=_array([row.workspace for row in rows]),
        depths=_array([row.depth for row in rows]),
    )


def _gradients_last(trace: RawTrace, nbytes: Mapping[str, int]) -> RawTrace:
    """The same with every gradient complete where the next module is entered or left, and an activation before."""
    live = list(trace.live)
    marks: list[Mark] = []
    places: list[int] = []
    levels: list[int] = []
    waiting: list[Mark] = []
    ends = [*zip(trace.marks, trace.mark_kernel, trace.mark_live, strict=True), (None, len(live), trace.end_live)]
    started: list[int] = []
    for mark, kernel, level in ends:
        if mark is not None and mark.kind == "gradient":
            waiting.append(mark)
            started.append(kernel)
            continue
        for gradient, start in zip(waiting, started, strict=True):
            for place in range(start, kernel):
                live[place] += nbytes[gradient.name]
        for each in sorted(waiting, key=lambda gradient: gradient.name):
            marks.append(each)
            places.append(kernel)
            levels.append(level)
        waiting, started = [], []
        if mark is not None:
            marks.append(mark)
            places.append(kernel)
            levels.append(level)
    return replace(trace, live=live, marks=marks, mark_kernel=places, mark_live=levels)


def _array(pairs: Sequence[Pair]) -> IntArray:
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


class _Row(NamedTuple):
    """A kernel of a segment, or the highest level of all."""

    live: Pair
    kind: int
    workspace: Pair
    depth: Pair


class _Kernel(NamedTuple):
    live: int
    kind: int
    workspace: int
    depth: int


@dataclass(frozen=True)
class _Line:
    """Lines through counts at two batch sizes; of one size, constants."""

    low: int
    high: int

    def exact(self, first: int, second: int) -> Pair:
        slope, rest = divmod(second - first, max(1, self.high - self.low))
        if rest:
            raise UnevenGrowth(f"what compiled blocks save grows unevenly from batch {self.low} to {self.high}")
        return first - slope * self.low, slope

    def above(self, first: int, second: int) -> Pair:
        """Through both, or a little above."""
        slope = -(-(second - first) // max(1, self.high - self.low))
        return max(first - slope * self.low, second - slope * self.high), slope

    def growing(self, level: Pair, second: int) -> Pair:
        """Through the second, from a level on, above which all grows with the batch."""
        return level[0], -(-(second - level[0]) // self.high)


def _kernels(trace: RawTrace, index: int) -> list[_Kernel]:
    """The kernels behind a mark."""
    start = trace.mark_kernel[index]
    stop = trace.mark_kernel[index + 1] if index + 1 < len(trace.marks) else len(trace.live)
    columns = trace.live, trace.kinds, trace.workspaces, trace.depths
    return [_Kernel(*each) for each in zip(*(column[start:stop] for column in columns), strict=True)]


def _rows(line: _Line, level: Pair, first: Sequence[_Kernel], second: Sequence[_Kernel]) -> list[_Row]:
    """A row for each kernel of a segment that has the same ones at both batch sizes; else for its highest levels."""
    if [each.kind for each in first] == [each.kind for each in second]:
        try:
            return [
                _Row(
                    line.exact(one.live, other.live),
                    one.kind,
                    line.exact(one.workspace, other.workspace),
                    line.exact(one.depth, other.depth),
                )
                for one, other in zip(first, second, strict=True)
            ]
        except UnevenGrowth:
            pass
    at_marks = [level[0] + level[1] * batch for batch in (line.low, line.high)]
    peaks = [_highest(kernels, at_mark) for kernels, at_mark in zip((first, second), at_marks, strict=True)]
    depth = line.above(*(max((each.depth for each in kernels), default=0) for kernels in (first, second)))
    rows: list[_Row] = []
    for kind in (KernelKind.MEMORY, KernelKind.MATMUL, KernelKind.ATTENTION):
        one, other = (found[kind] for found in peaks)
        for peak in (line.above(one, other), line.growing(level, other)):
            over = peak[0] - level[0], peak[1] - level[1]
            if kind is KernelKind.MEMORY:
                rows.append(_Row(peak, kind, (0, 0), depth))
            elif over != (0, 0):
                rows.append(_Row(level, kind, over, depth))
    return rows


def _highest(kernels: Sequence[_Kernel], level: int) -> dict[KernelKind, int]:
    """The highest level, and those of products and of attention with their working space."""
    found = dict.fromkeys((KernelKind.MEMORY, KernelKind.MATMUL, KernelKind.ATTENTION), level)
    for each in kernels:
        found[KernelKind.MEMORY] = max(found[KernelKind.MEMORY], each.live)
        if each.workspace:
            kind = KernelKind.MATMUL if each.kind == KernelKind.MATMUL else KernelKind.ATTENTION
            found[kind] = max(found[kind], each.live + each.workspace)
    return found
