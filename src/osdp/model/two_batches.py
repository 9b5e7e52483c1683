"""One trace for two batch sizes.

[Note: Two batches]
A run with blocks recomputed has the kernels of the plain run, some of them twice. Plain runs at two batch sizes say
what a kernel costs at the second that is known at the first, by its operator and the shapes of its tensors. So a
recomputed run is traced at the first alone. Every count of that trace carries the second's in its high bits: counts are
added and subtracted only, and none is below 0. Where a kernel is not among the plain run's, or stands for two that
differ at the second batch size, that one is traced too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from osdp.model.measured_space import Kernel
from osdp.model.trace import RawTrace

_BITS = 80  # of a count: bytes and FLOPs are below 2^63
_LOW = (1 << _BITS) - 1
_COUNTS = ("flops", "moved", "workspaces", "depths", "live", "mark_live", "cast_live")

Signature = tuple[Hashable, ...]


def _signature(func: Any, tensors: Iterable[Tensor], counts: Sequence[int]) -> Signature:
    return (func, *((tensor.shape, tensor.dtype) for tensor in tensors), *counts)


class Kernels:
    """Lists the kernels of a plain run."""

    def __init__(self) -> None:
        self.rows: list[tuple[Signature, tuple[int, ...]]] = []
        self.measured: list[Kernel] = []  # see [Note: Measured space] in measured_space.py

    def seen(self, func: Any, tensors: Iterable[Tensor], counts: tuple[int, ...]) -> tuple[int, ...]:
        self.rows.append((_signature(func, tensors, counts), counts))
        return counts


class KernelPairs:
    """Gives every count of a kernel of one batch size that of another one; see [Note: Two batches]."""

    def __init__(self, one: Kernels, other: Kernels) -> None:
        self._others: dict[Signature, tuple[int, ...] | None] = {}
        self._measured: dict[Kernel, Kernel | None] = {}
        self.is_complete = len(one.rows) == len(other.rows) and len(one.measured) == len(other.measured)
        for (signature, _), (_, counts) in zip(one.rows, other.rows, strict=False):
            if self._others.setdefault(signature, counts) != counts:
                self._others[signature] = None
        for kernel, again in zip(one.measured, other.measured, strict=False):
            if self._measured.setdefault(kernel, again) != again:
                self._measured[kernel] = None

    def seen(self, func: Any, tensors: Iterable[Tensor], counts: tuple[int, ...]) -> tuple[int, ...]:
        others = self._others.get(_signature(func, tensors, counts))
        if others is None or len(others) != len(counts):
            self.is_complete = False
            return counts
        return tuple(count + (other << _BITS) for count, other in zip(counts, others, strict=True))

    def divided(self, trace: RawTrace) -> tuple[RawTrace, RawTrace]:
        """The trace of the first batch size and that of the other one."""
        one: dict[str, Any] = {what: [count & _LOW for count in getattr(trace, what)] for what in _COUNTS}
        other: dict[str, Any] = {what: [count >> _BITS for count in getattr(trace, what)] for what in _COUNTS}
        other["to_measure"] = {place: self._measured.get(kernel) for place, kernel in trace.to_measure.items()}
        self.is_complete &= None not in other["to_measure"].values()
        one["end_live"], other["end_live"] = trace.end_live & _LOW, trace.end_live >> _BITS
        return replace(trace, **one), replace(trace, **other)
