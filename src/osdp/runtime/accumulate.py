"""Gradient accumulation: several micro-batches make one step, and units are reduced as often as the plan says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from torch import nn

from osdp._torch.fsdp import FSDPModule
from osdp.runtime.apply import applied_to

T = TypeVar("T")


def accumulate(model: nn.Module, micro_batches: Sequence[T]) -> Iterator[T]:
    """Goes through the micro-batches of one step; run backward on each, then step the optimizer.

        for inputs, targets in osdp.accumulate(model, micro_batches):
            (loss(model(inputs), targets) / len(micro_batches)).backward()

    Units that the plan reduces once keep their gradients until the last micro-batch; the others are reduced each time.
    Where the loop is left early, they are reduced then; see [Note: Steps that end early]. All ranks leave it alike.
    """
    applied = applied_to(model)
    late = [piece.modules[0] for piece in applied.pieces if piece.unit.reduce_once]
    try:
        for index, batch in enumerate(micro_batches):
            _reduce(late, index == len(micro_batches) - 1)
            yield batch
    finally:
        _reduce(late, True)
        applied.recovery.leave()


def _reduce(modules: Sequence[nn.Module], now: bool) -> None:
    for module in modules:
        assert isinstance(module, FSDPModule)
        module.set_requires_gradient_sync(now, recurse=False)
