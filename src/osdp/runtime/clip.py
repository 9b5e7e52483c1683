"""Gradient clipping over units that are held in different ways."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from osdp.runtime.local import local_tensor


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clips the norm of all gradients together, as `torch.nn.utils.clip_grad_norm_` does in a single process.

    Gradients may be sharded over the world, over a node, or not at all. One all-reduce of a single number adds up
    every rank's part; what R ranks hold alike counts 1/R on each. Returns the norm before clipping, equal on all ranks.
    """
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [tensor.grad for tensor in tensors if tensor.grad is not None]
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    local = [local_tensor(grad) for grad in grads]
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=torch.float64) for g in local if g.numel()]  # none if empty
    if math.isinf(norm_type):
        total, reduce = torch.stack(norms).max() if norms else torch.zeros((), dtype=torch.float64), dist.ReduceOp.MAX
    else:
        shares = [_shards(grad) / ranks for grad, own in zip(grads, local, strict=True) if own.numel()]
        parts = [norm**norm_type * share for norm, share in zip(norms, shares, strict=True)]
        total, reduce = torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64), dist.ReduceOp.SUM
    if ranks > 1:
        dist.all_reduce(total, reduce)
    norm = total if math.isinf(norm_type) else total ** (1.0 / norm_type)
    if local:
        torch._foreach_mul_(local, torch.clamp(max_norm / (norm + 1e-6), max=1.0).to(local[0].dtype))
    return norm.to(local[0].dtype if local else torch.float32)


def _shards(grad: Tensor) -> int:
    """How many ranks share one copy of a gradient."""
    if not isinstance(grad, DTensor):
        return 1
    sizes = (
        size for size, placement in zip(grad.device_mesh.shape, grad.placements, strict=True) if placement.is_shard()
    )
    return math.prod(sizes)
