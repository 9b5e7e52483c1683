"""Working space of kernels that no formula bounds, as this CPU takes it.

[Note: Measured space]
oneDNN's convolutions work on copies in an order of their own, and which they make depends on shapes and on the
processor: a bound by formula was up to 9.7 times what was seen. But a plan for CPUs is made on one. So the kernel is
run on zeros of its shapes and strides, on one thread, under the allocator's account; alike ones once in a process.
What it takes jumps where it begins to compute otherwise, so it is run at several batch sizes, its shapes drawn on from
those of two. For other batch sizes than these two lines are above all that was seen: one through the largest two, and
a constant for the others. What takes more than LARGEST_FLOPS, or all together MOST_FLOPS, is not run, and left out if
it never is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from osdp._torch import tree_leaves, tree_map_only, without_modes
from osdp.cpu_memory import peak_above_start
from osdp.model.graph import ZERO, Affine, MeasuredSpace

TRIED = (1, 2, 3, 4, 8, 16, 64)  # batch sizes
LARGEST_FLOPS, MOST_FLOPS = 2_000_000_000, 40_000_000_000  # a tenth of a second, and two, of one thread
_MEASURED = ("aten::convolution", "aten::convolution_backward")
_known: dict[object, int] = {}


class Given(NamedTuple):
    """A tensor that a kernel is given."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Kernel(NamedTuple):
    """A call: `args` has `Given` in place of tensors."""

    func: Any
    args: tuple[Any, ...]
    flops: int


def kernel_of(func: Any, args: Sequence[Any], flops: int) -> Kernel | None:
    """The call of a kernel whose working space is measured; None for others."""
    if func._schema.name not in _MEASURED:
        return None
    return Kernel(
        func, _frozen(tree_map_only(Tensor, lambda t: Given(tuple(t.shape), t.stride(), t.dtype), args)), flops
    )


def _frozen(tree: Any) -> Any:
    if isinstance(tree, Given) or not isinstance(tree, (list, tuple)):
        return tree
    return tuple(_frozen(each) for each in tree)


def space_of(kernel: Kernel) -> int | None:
    """Bytes that a kernel takes beside what it puts out; None where it is too large to be tried."""
    key = kernel.func, kernel.args
    if key not in _known:
        if kernel.flops > LARGEST_FLOPS:
            return None
        with without_modes(), torch.no_grad(), _one_thread():
            real = [_zeros(each) if isinstance(each, Given) else each for each in kernel.args]
            out = kernel.func(*real)  # the first of a shape also makes its kernel
            given = sum(t.numel() * t.element_size() for t in tree_leaves(out) if isinstance(t, Tensor))
            del out
            _known[key] = max(0, peak_above_start(lambda: kernel.func(*real)) - given)
    return _known[key]


def measured_spaces(
    low: Mapping[int, Kernel], high: Mapping[int, Kernel], batches: tuple[int, int]
) -> tuple[dict[int, MeasuredSpace], int]:
    """What each kernel works in at any batch size, and how many kernels are left out."""
    found: dict[int, MeasuredSpace] = {}
    left_out, budget = 0, MOST_FLOPS
    for place, first in low.items():
        second = high[place]
        sizes = sorted({*batches, *TRIED}, key=lambda size: (size not in batches, size))
        points: dict[int, int] = {}
        for size in sizes if first != second else sizes[:1]:
            kernel = _drawn_on(first, second, batches, size)
            if kernel is None or kernel.flops > budget:
                break
            budget -= 0 if (kernel.func, kernel.args) in _known else 2 * kernel.flops
            if (space := space_of(kernel)) is not None:
                points[size] = space
        left_out += not points
        if any(points.values()):
            found[place] = MeasuredSpace(ZERO, tuple(points.items()), _above(points, grows=first != second))
    return found, left_out


def _above(points: Mapping[int, int], *, grows: bool) -> tuple[Affine, ...]:
    """See [Note: Measured space]. Of a single batch size what is taken grows with the batch."""
    if not grows:
        return (Affine(max(points.values()), 0),)
    steps = [(0, 0), *sorted(points.items())]
    (size, space), (larger, most) = [*pairwise(steps)][-1]
    slope = max(0, math.ceil((most - space) / (larger - size)))
    line = Affine(most - slope * larger, slope)
    over = [space for size, space in points.items() if space > line.at(size)]
    return (line, Affine(max(over), 0)) if over else (line,)


def _drawn_on(first: Kernel, second: Kernel, batches: tuple[int, int], size: int) -> Kernel | None:
    """The kernel at another batch size, on a line through two; None where there is no line."""
    low, high = batches

    def line(one: Any, other: Any) -> Any:
        if isinstance(one, Given):
            return Given(line(one.shape, other.shape), line(one.stride, other.stride), one.dtype)
        if isinstance(one, tuple):
            return tuple(line(mine, theirs) for mine, theirs in zip(one, other, strict=True))
        if one == other or size == low:
            return one
        slope, rest = divmod(other - one, high - low)
        if rest:
            raise ValueError
        return one + slope * (size - low)

    try:
        return Kernel(first.func, line(first.args, second.args), line(first.flops, second.flops))
    except ValueError:
        return None


def _zeros(given: Given) -> Tensor:
    return torch.empty_strided(given.shape, given.stride, dtype=given.dtype).zero_()


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
