"""Gradient accumulation: several micro-batches make one step, and units are reduced as often as the plan says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

from torch import nn

from osdp._torch.fsdp import FSDPModule
from osdp.runtime.apply import Applied, applied_to

T = TypeVar("T")


def accumulate(model: nn.Module, micro_batches: Sequence[T]) -> Iterator[T]:
    """Goes through the micro-batches of one step; run backward on each, then step the optimizer.

        for inputs, targets in osdp.accumulate(model, micro_batches):
            (loss(model(inputs), targets) / len(micro_batches)).backward()

    Units that the plan reduces once keep their gradients until the last micro-batch, those that it all-reduces once are
    reduced in the node each time and across nodes then; the others are reduced each time. Units that it gathers once
    are gathered by the first micro-batch and freed by the last. Where the loop is left early, they are reduced and
    freed then; see [Note: Steps that end early]. All ranks leave it alike.
    """
    applied = applied_to(model)
    try:
        for index, batch in enumerate(micro_batches):
            _complete(applied, index == len(micro_batches) - 1)
            applied.recovery.place.micro_batch = index
            yield batch
    finally:
        _complete(applied, True)
        applied.recovery.leave()
        applied.recovery.place.micro_batch = 0


@contextlib.contextmanager
def reduced_later(model: nn.Module) -> Iterator[None]:
    """Within it, reductions wait that the plan makes once a step, and what it gathers once stays gathered.

    This is not the last micro-batch.
    """
    applied = applied_to(model)
    _complete(applied, False)
    try:
        yield
    finally:
        _complete(applied, True)


def _complete(applied: Applied, now: bool) -> None:
    """Whether the next backward makes the reductions that are made once a step, and frees what is gathered once."""
    cluster = applied.plan.cluster
    crosses = cluster.nodes > 1 and cluster.devices_per_node > 1  # else a reduction in the node is all there is
    for piece in applied.pieces:
        module = piece.modules[0]
        assert isinstance(module, FSDPModule)
        if piece.unit.gather_once:
            FSDPModule.set_reshard_after_backward(module, now, recurse=False)  # of this unit: see `reduce_in_pipeline`
        if piece.unit.reduce_once:
            module.set_requires_gradient_sync(now, recurse=False)
        elif crosses and piece.unit.all_reduce_once and piece.mode.is_reduced_across:
            module.set_requires_all_reduce(now, recurse=False)
