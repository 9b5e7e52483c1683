"""Tensors that an optimizer keeps for a parameter, on the same ranks as the parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, zeros


def state_zeros(parameter: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros of a shape with as many dimensions as the parameter's, sharded along the same ones.

    Where the state has size 1 along such a dimension, as a mean over it has, every rank has the whole of it.
    """
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=dtype, device=parameter.device)
    if tuple(shape) == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=dtype)
    placements = [
        placement if placement.is_replicate() or shape[placement.dim] > 1 else Replicate()  # type: ignore[attr-defined]
        for placement in parameter.placements
    ]
    return zeros(*shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=placements)
