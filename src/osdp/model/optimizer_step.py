"""What an optimizer's step holds and moves, found by running it on fake tensors.

[Note: Measured steps]
Two steps over parameters of several sizes: the first makes the states, the second is recorded. States are what is held
between steps, temporaries what lives during a step only, both in copies of the parameters; counters are the scalars
that are kept for every parameter. A step's time follows what its kernels read and write, in passes over one copy:
a tensor that a kernel gets twice is read once, and what it changes in place is written once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from osdp._torch import FakeTensorMode, tree_leaves
from osdp.model.trace import Recorder
from osdp.model.values import Values

SIZES = ((64, 96), (128, 256), (512,))  # multiples of each other would hide that a copy is of one tensor only

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class _StepRecorder(Recorder):
    """Counts bytes as [Note: Measured steps] has it; scalars count nothing."""

    def __init__(self) -> None:
        super().__init__(set())
        self.moved_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        read = _storages((args, kwargs))
        changed = [
            given
            for argument, given in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if not changed and all(key in read for key in _storages(out)):
            return out  # a view
        written = _storages(changed or out)
        self.moved_bytes += sum(read.values()) + sum(written.values())
        return out


def _storages(tree: Any) -> dict[int, int]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dim()]
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}


@dataclass(frozen=True)
class MeasuredStep:
    """Bytes of a step over parameters of `shapes`, in fp32; see [Note: Measured steps]."""

    shapes: tuple[tuple[int, ...], ...]
    state_bytes: int  # with counters
    counters: int  # bytes for each parameter
    temporary_bytes: int
    moved_bytes: int

    @property
    def held_bytes(self) -> int:
        return sum(4 * math.prod(shape) for shape in self.shapes)


def measured_step(make: MakeOptimizer) -> MeasuredStep:
    """What an optimizer's step holds and moves; see [Note: Measured steps]."""
    with FakeTensorMode(allow_non_fake_inputs=True), Values(1):
        parameters = [nn.Parameter(torch.empty(size)) for size in SIZES]
        optimizer = make(parameters)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        states = [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]
        recorder = _StepRecorder()
        recorder.hold([*parameters, *(p.grad for p in parameters if p.grad is not None), *states])
        before = recorder.live
        with recorder:
            optimizer.step()
    return MeasuredStep(
        SIZES,
        state_bytes=sum(state.nbytes for state in states),
        counters=sum(state.nbytes for state in states if not state.dim()) // len(parameters),
        temporary_bytes=max([before, *recorder.trace.live]) - before,
        moved_bytes=recorder.moved_bytes,
    )
