"""Lets torch's optimizers step what a rank holds of each parameter, instead of distributed tensors.

[Note: Steps on shards]
Every operation on a list of DTensors looks for a sharding of each of them, in Python: a fused AdamW of 200 parameters
spends four fifths of its step so on a CPU. What these optimizers do to one element needs no other element, so a
step of the shards is the same step. States stay DTensors like their parameters, so checkpoints do not change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Elementwise = TypeVar("Elementwise", bound=torch.optim.Optimizer)


def on_shards(optimizer: Elementwise) -> Elementwise:
    """Has an elementwise optimizer of torch step each rank's shards; changes and returns it."""
    gather = optimizer._init_group  # type: ignore[attr-defined]
    optimizer._init_group = functools.partial(_local_group, gather)  # type: ignore[attr-defined]
    return optimizer


def _local_group(gather: Callable[..., Any], group: dict[str, Any], *lists: list[Tensor]) -> Any:
    """Fills the lists of parameters, gradients and states as torch does, then puts their local parts in place."""
    found = gather(group, *lists)
    for each in lists:
        each[:] = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in each]
    return found
