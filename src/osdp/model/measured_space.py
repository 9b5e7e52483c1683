"""Working space of kernels that no formula bounds, as this CPU takes it.

[Note: Measured space]
oneDNN's convolutions work on copies in an order of their own, and which they make depends on shapes and on the
processor: a bound by formula was up to 9.7 times what was seen. But a plan for CPUs is made on one. So the kernel is
run once, on zeros of its shapes and strides, on one thread, under the allocator's account, as ranks will run it; alike
ones once in a process. What is larger than LARGEST_FLOPS or LARGEST_BYTES is not run, and the capture says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from osdp._torch import tree_leaves, tree_map_only, without_modes
from osdp.profiling.trial import peak_above_start

LARGEST_FLOPS = 20_000_000_000  # about a second of one thread
LARGEST_BYTES = 1 << 30  # of what it reads and puts out
NOT_MEASURED = "what these take while they run is not in a plan for CPUs, they are too large to be tried"
_MEASURED = ("aten::convolution", "aten::convolution_backward")
_known: dict[object, int] = {}


def is_measured(func: Any) -> bool:
    return func._schema.name in _MEASURED


def measured_space(func: Any, args: Sequence[Any], flops: int) -> int | None:
    """Bytes that a kernel takes beside what it puts out; None where it is too large to be tried."""
    key = func, tuple(_described(each) for each in args)
    if key not in _known:
        nbytes = sum(_nbytes(each) for each in tree_leaves(list(args)) if isinstance(each, Tensor))
        if flops > LARGEST_FLOPS or nbytes > LARGEST_BYTES:
            return None
        with without_modes(), torch.no_grad(), _one_thread():
            real = tree_map_only(Tensor, _zeros_like, list(args))
            out = func(*real)  # the first of a shape also makes its kernel
            given = sum(_nbytes(each) for each in tree_leaves(out) if isinstance(each, Tensor))
            del out
            _known[key] = max(0, peak_above_start(lambda: func(*real)) - given)
    return _known[key]


def _zeros_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype).zero_()


def _described(given: Any) -> object:
    if isinstance(given, Tensor):
        return tuple(given.shape), given.stride(), given.dtype
    return tuple(given) if isinstance(given, (list, tuple)) else given


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
