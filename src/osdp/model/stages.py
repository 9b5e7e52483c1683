"""Turns raw traces of several batch sizes into stages; see [Note: Stage] and [Note: Growth] in graph.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from osdp.model.graph import Affine, IntArray, Mark, MeasuredSpace, Segment, Trace
from osdp.model.inputs import CaptureError
from osdp.model.kernels import KernelKind
from osdp.model.measured_space import measured_spaces
from osdp.model.trace import RawTrace

_ROOT_LEFT = Mark("leave", "")


class UnevenGrowth(CaptureError):
    """No line through two batch sizes predicts a third; see [Note: Batches] in runs.py."""


@dataclass(frozen=True)
class GrowingTrace:
    """A raw trace whose numbers are (constant, per_sample) rows."""

    marks: tuple[Mark, ...]
    mark_kernel: tuple[int, ...]
    backward_mark: int
    flops: IntArray
    moved: IntArray
    live: IntArray
    mark_live: IntArray
    cast_live: IntArray
    end_live: IntArray
    kinds: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    workspaces: IntArray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))
    depths: IntArray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))
    measured: Mapping[int, MeasuredSpace] = field(default_factory=dict)  # by kernel
    left_out: int = 0  # kernels that should have been measured

    @property
    def notes(self) -> list[str]:
        """What a plan for CPUs does not count."""
        line = f"{self.left_out} convolutions are too large to be tried: what they work in is not in a plan for CPUs"
        return [line] if self.left_out else []

    def at(self, batch: int) -> IntArray:
        return self.live @ np.array([1, batch])

    def content(self, cut: Cut) -> tuple[object, ...]:
        """The marks and kernels of a stage, without its block's name: equal for stages that run the same."""
        ends = (*self.mark_kernel, len(self.flops))
        found: list[object] = []
        for first, last in (cut.forward, cut.backward):
            kernels = slice(ends[first], ends[last])
            marks = ((m.kind, m.name.removeprefix(cut.block or ""), m.recomputed) for m in self.marks[first:last])
            found += [tuple(marks), self.flops[kernels].tobytes(), self.moved[kernels].tobytes()]
        return tuple(found)


def fit_growth(traces: Mapping[int, RawTrace]) -> GrowingTrace:
    """Two batch sizes give every line, all others check them; one gives constants, true at that size only.

    [Constraint] equal kernels and marks at every batch size, and every count on its line.
    """
    batches = sorted(traces)
    first, second = traces[batches[0]], traces[batches[min(1, len(batches) - 1)]]
    for batch in batches[1:]:
        if traces[batch].marks != first.marks or traces[batch].mark_kernel != first.mark_kernel:
            raise UnevenGrowth(
                f"the model runs different kernels at batch {batches[0]} and {batch}; pass inputs whose shapes "
                "do not steer its control flow"
            )
    b0, b1 = (*batches, batches[0] + 1)[:2]

    def lines(what: str) -> IntArray:
        low = np.array(getattr(first, what), dtype=np.int64)
        high = np.array(getattr(second, what), dtype=np.int64)
        slope, rest = np.divmod(high - low, b1 - b0)
        if rest.any():
            raise UnevenGrowth(f"{what} does not grow evenly with the batch size from {b0} to {b1}")
        grown = np.stack([low - slope * b0, slope], axis=-1)
        for batch in batches[2:]:
            seen = np.array(getattr(traces[batch], what), dtype=np.int64)
            off = np.flatnonzero(np.atleast_1d(grown @ np.array([1, batch]) != seen))
            if len(off):
                raise UnevenGrowth(
                    f"{what} of kernel {off[0]} grows unevenly: batches {b0} and {b1} do not predict batch {batch}"
                )
        return grown

    return GrowingTrace(
        tuple(first.marks),
        tuple(first.mark_kernel),
        first.backward_mark,
        lines("flops"),
        lines("moved"),
        lines("live"),
        lines("mark_live"),
        lines("cast_live"),
        lines("end_live"),
        np.array(first.kinds, dtype=np.int64),
        lines("workspaces"),
        lines("depths"),
        *measured_spaces(first.to_measure, second.to_measure, (b0, b1)),
    )


def upper_lines(points: IntArray) -> tuple[Affine, ...]:
    """The lines among `points` that are highest at some batch size of 1 or more."""
    unique = np.unique(points, axis=0)
    kept: list[tuple[int, int]] = []
    for constant, slope in unique[np.lexsort((-unique[:, 0], -unique[:, 1]))].tolist():
        # steepest first: a flatter line is worth keeping only if it is above all steeper ones at batch 1
        if all(constant + slope > c + s for c, s in kept):
            kept.append((constant, slope))
    return tuple(Affine(constant, slope) for constant, slope in kept)


@dataclass(frozen=True)
class Cut:
    """A stage as ranges of marks: forward [0] to [1], backward [2] to [3]."""

    block: str | None
    forward: tuple[int, int]
    backward: tuple[int, int]


def cut_stages(trace: GrowingTrace, blocks: Sequence[str], operators: set[str]) -> list[Cut] | None:
    """Divides both passes into stages; None where the blocks are not run once each, in mirrored order."""
    turn, end = trace.backward_mark, len(trace.marks)
    windows = _forward_windows(trace.marks[:turn], set(blocks))
    if windows is None:
        return None
    forward: list[tuple[str | None, int, int]] = []
    at = 0
    for block, start, stop in windows:
        between = trace.marks[at:start]
        if at == 0 or any(mark.kind == "enter" and mark.name in operators for mark in between):
            forward.append((None, at, start))
        else:  # nothing with parameters in between: it belongs to the block before
            name, begin, _ = forward.pop()
            forward.append((name, begin, start))
        forward.append((block, start, stop))
        at = stop
    forward.append((None, at, turn))
    forward = _without_empty_ends(trace.marks, forward, operators)
    return _mirror(trace.marks, forward, turn, end)


def _without_empty_ends(
    marks: Sequence[Mark], forward: list[tuple[str | None, int, int]], operators: set[str]
) -> list[tuple[str | None, int, int]]:
    """A stage outside blocks needs an operator: without one it joins the block beside it.

    The last one has the model itself, where that is an operator: it is left there, and reached there in backward.
    """

    def idle(stage: tuple[str | None, int, int]) -> bool:
        return stage[0] is None and not any(
            m.kind == "enter" and m.name in operators for m in marks[stage[1] : stage[2]]
        )

    if len(forward) > 1 and idle(forward[-1]) and "" not in operators:
        _, _, stop = forward.pop()
        name, start, _ = forward.pop()
        forward.append((name, start, stop))
    if len(forward) > 1 and idle(forward[0]):
        _, start, _ = forward.pop(0)
        name, _, stop = forward.pop(0)
        forward.insert(0, (name, start, stop))
    return forward


def _forward_windows(marks: Sequence[Mark], blocks: set[str]) -> list[tuple[str, int, int]] | None:
    windows: list[tuple[str, int, int]] = []
    opened: tuple[str, int] | None = None
    for index, mark in enumerate(marks):
        if mark.name not in blocks or mark.recomputed:
            continue
        if mark.kind == "enter" and opened is None:
            opened = (mark.name, index)
        elif mark.kind == "leave" and opened is not None and opened[0] == mark.name:
            windows.append((mark.name, opened[1], index + 1))
            opened = None
        else:
            return None  # blocks within blocks
    names = [name for name, _, _ in windows]
    return None if len(set(names)) != len(names) or opened else windows


def _mirror(marks: Sequence[Mark], forward: list[tuple[str | None, int, int]], turn: int, end: int) -> list[Cut] | None:
    """Finds every stage's backward range: blocks by their own marks, what is outside by what is left between."""
    starts: dict[str, int] = {}
    leaves: dict[str, int] = {}
    for index in range(turn, end):
        mark = marks[index]
        if mark.kind == "enter" and not mark.recomputed:
            # a block whose output is its child's is reached through the child: its backward begins there
            for name in (mark.name, *_ancestors(mark.name)):
                starts.setdefault(name, index)
        elif mark.kind == "leave" and not mark.recomputed:
            leaves.setdefault(mark.name, index)
    cuts: list[Cut] = []
    at = turn
    for position in range(len(forward) - 1, -1, -1):
        block, start, stop = forward[position]
        before = next((name for name, _, _ in reversed(forward[:position]) if name is not None), None)
        if position == 0:
            close = end
        elif block is None:
            close = starts.get(before or "", -1)
        elif forward[position - 1][0] is None:
            close = _left(marks, leaves.get(block, -2) + 1, block)
        else:
            close = starts.get(before or "", -1)
        if close < at:
            return None  # a block without gradients, or run backward in another order
        if block is not None and any(mark == _ROOT_LEFT for mark in marks[at:close]):
            return (
                None  # FSDP2 reduces the model's own parameters before those of a block whose inputs need no gradient
            )
        cuts.append(Cut(block, (start, stop), (at, close)))
        at = close
    return cuts[::-1]


def _left(marks: Sequence[Mark], close: int, block: str) -> int:
    """Behind the leaving of a block's own modules: those without a gradient for their inputs are left after it."""
    while close < len(marks) and marks[close].kind == "leave" and marks[close].name.startswith(block + "."):
        close += 1
    return close


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1)]


def build_trace(trace: GrowingTrace, cut: Cut) -> Trace:
    """A stage's own trace, relative to the bytes alive at its start."""
    return Trace(_stretches(trace, cut.forward), _stretches(trace, cut.backward))


def _stretches(trace: GrowingTrace, span: tuple[int, int]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    start, stop = span
    if start >= stop:
        return ()
    base = trace.mark_live[start]
    for index in range(start, stop):
        last = index + 1 == len(trace.marks)
        first_kernel = trace.mark_kernel[index]
        last_kernel = len(trace.live) if last else trace.mark_kernel[index + 1]
        end = trace.end_live if last else trace.mark_live[index + 1]
        points = np.concatenate([trace.mark_live[index][None], trace.live[first_kernel:last_kernel], end[None]]) - base
        segments.append(
            Segment(
                mark=trace.marks[index],
                peak=upper_lines(points),
                end=Affine(int(end[0] - base[0]), int(end[1] - base[1])),
                begin=_cast(trace, index, base),
                flops=trace.flops[first_kernel:last_kernel],
                moved=trace.moved[first_kernel:last_kernel],
                kinds=trace.kinds[first_kernel:last_kernel],
                products=_worked(trace, first_kernel, last_kernel, base, attention=False, by=0),
                worked=_worked(trace, first_kernel, last_kernel, base, attention=False),
                attended=_worked(trace, first_kernel, last_kernel, base, attention=True),
                measured=_measured(trace, first_kernel, last_kernel, base),
                depths=upper_lines(trace.depths[first_kernel:last_kernel]),
            )
        )
    return tuple(segments)


def _worked(
    trace: GrowingTrace, first: int, last: int, base: IntArray, *, attention: bool, by: int = 1
) -> tuple[Affine, ...]:
    """The levels of products, or of attention, with `by` times their working space; see [Note: Workspaces]."""
    workspaces = trace.workspaces[first:last]
    taken = workspaces.any(axis=1) & ((trace.kinds[first:last] != KernelKind.MATMUL) == attention)
    return upper_lines(trace.live[first:last][taken] + by * workspaces[taken] - base) if taken.any() else ()


def _cast(trace: GrowingTrace, mark: int, base: IntArray) -> tuple[Affine, ...]:
    """The level once a unit has cast what it is given; none where it casts nothing."""
    level = trace.cast_live[mark]
    return () if (level == trace.mark_live[mark]).all() else upper_lines(level[None] - base)


def _measured(trace: GrowingTrace, first: int, last: int, base: IntArray) -> tuple[MeasuredSpace, ...]:
    """The levels of kernels whose working space was measured, with it."""
    places = [place for place in range(first, last) if place in trace.measured]
    return tuple(trace.measured[place] + Affine(*(trace.live[place] - base).tolist()) for place in places)


def shape_of(trace: Trace, block: str) -> tuple[object, ...]:
    """A trace without its block's name: equal for stages that are alike."""
    return tuple(
        (
            s.mark.kind,
            s.mark.name.removeprefix(block),
            s.mark.recomputed,
            s.peak,
            s.end,
            s.begin,
            s.flops.tobytes(),
            s.moved.tobytes(),
        )
        for s in (*trace.forward, *trace.backward)
    )


def renamed(trace: Trace, rename: tuple[str, str]) -> Trace:
    """The same trace of another stage: a name's prefix is replaced, all numbers are shared."""
    old, new = rename

    def other(segment: Segment) -> Segment:
        mark = segment.mark
        if not (mark.name == old or mark.name.startswith(old + ".")):
            return segment
        return replace(segment, mark=replace(mark, name=new + mark.name[len(old) :]))

    if old == new:
        return trace
    return replace(trace, forward=tuple(map(other, trace.forward)), backward=tuple(map(other, trace.backward)))
