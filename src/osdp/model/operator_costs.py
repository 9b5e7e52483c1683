"""What each operator costs, read off the traces: FLOPs, bytes moved, saved, put out and used for a while."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from osdp.model.graph import ZERO, Affine, IntArray
from osdp.model.stages import GrowingTrace
from osdp.model.trace import RawTrace


@dataclass(frozen=True)
class OperatorCosts:
    calls: int
    forward_flops: Affine
    backward_flops: Affine
    moved_bytes: Affine
    saved_bytes: Affine
    output_bytes: Affine
    temporary_bytes: Affine


class _Sums(dict[str, IntArray]):
    def add(self, name: str, row: IntArray) -> None:
        self[name] = self.get(name, np.zeros(2, dtype=np.int64)) + row

    def affine(self, name: str) -> Affine:
        row = self.get(name)
        return ZERO if row is None else Affine(int(row[0]), int(row[1]))


def measure_operators(
    raw: Mapping[int, RawTrace], trace: GrowingTrace, operators: set[str]
) -> dict[str, OperatorCosts]:
    """Sums every kernel into the operator that runs it: the one entered last and not yet left."""
    forward, backward, moved, temporary = _Sums(), _Sums(), _Sums(), _Sums()
    calls: dict[str, int] = {}
    inside: list[str] = []
    for index, mark in enumerate(trace.marks):
        if mark.name in operators and mark.kind == "enter":
            inside.append(mark.name)
            if index < trace.backward_mark:
                calls[mark.name] = calls.get(mark.name, 0) + 1
        elif mark.kind == "leave" and mark.name in inside:
            inside.remove(mark.name)
        if not inside:
            continue
        start = trace.mark_kernel[index]
        stop = trace.mark_kernel[index + 1] if index + 1 < len(trace.marks) else len(trace.live)
        if start == stop:
            continue
        owner = inside[-1]
        (forward if index < trace.backward_mark else backward).add(owner, trace.flops[start:stop].sum(axis=0))
        moved.add(owner, trace.moved[start:stop].sum(axis=0))
        if index < trace.backward_mark:
            _temporary(temporary, owner, trace, index, start, stop)
    saved, outputs = _booked(raw, "saved"), _booked(raw, "outputs")
    return {
        name: OperatorCosts(
            calls.get(name, 0),
            forward.affine(name),
            backward.affine(name),
            moved.affine(name),
            saved.get(name, ZERO),
            outputs.get(name, ZERO),
            temporary.affine(name),
        )
        for name in operators
    }


def _temporary(into: _Sums, owner: str, trace: GrowingTrace, index: int, start: int, stop: int) -> None:
    """Bytes above both the level before and the level after: alive only while the operator runs."""
    levels = trace.live[start:stop]
    highest = levels[np.argmax(levels.sum(axis=1))]
    before, after = trace.mark_live[index], trace.mark_live[index + 1]
    rest = before if before.sum() > after.sum() else after
    into.add(owner, np.maximum(highest - rest, 0))


def _booked(raw: Mapping[int, RawTrace], what: str) -> dict[str, Affine]:
    low, *others = sorted(raw)
    if not others:
        return {name: Affine(nbytes, 0) for name, nbytes in getattr(raw[low], what).items()}
    high = others[0]
    first, second = getattr(raw[low], what), getattr(raw[high], what)
    lines = {}
    for name in {*first, *second}:
        slope = (second.get(name, 0) - first.get(name, 0)) // (high - low)
        lines[name] = Affine(first.get(name, 0) - slope * low, slope)
    return lines
