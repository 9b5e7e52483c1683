"""Lets a gradient scaler of torch find the same overflow on every rank.

[Note: Overflow]
`torch.amp.GradScaler` asks one operator whether the optimizer's gradients are finite, and skips the step where they are
not. Sharded gradients differ by rank, so ranks must agree. For DTensors torch does that over the mesh of the first
gradient alone: where a plan holds that one on every rank and shards others, a rank whose own shards are finite would
step while another skips. Here the answer is the largest over all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

_CHECK = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
_ours: weakref.WeakValueDictionary[int, DeviceMesh] = weakref.WeakValueDictionary()  # by id: meshes of a kind are equal
_stock: Callable[..., Any] | None = None


def agree_on_overflow(meshes: Iterable[DeviceMesh]) -> None:
    """Has all ranks agree on whether gradients on these meshes are finite; see [Note: Overflow]."""
    global _stock
    _ours.update({id(mesh): mesh for mesh in meshes})
    if _stock is None:
        handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers  # type: ignore[assignment]
        _stock = handlers[_CHECK]
        handlers[_CHECK] = _check


def _check(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert _stock is not None
    gradients, found_inf, inverse_scale = args
    if not any(isinstance(g, DTensor) and _ours.get(id(g.device_mesh)) is g.device_mesh for g in gradients):
        _stock(operator, args, kwargs)
        return
    operator([_local(gradient) for gradient in gradients], found_inf, inverse_scale, **kwargs)
    dist.all_reduce(found_inf, dist.ReduceOp.MAX)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
