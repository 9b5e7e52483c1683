"""Gradient clipping over units that are held in different ways.

[Note: Pieces]
On CPUs torch computes a norm in another precision from a copy of the whole tensor: in double precision twice the
largest gradient, which no plan has. In single precision it makes no copy, but the sum of 20 million squares is off by
0.1 %. So norms are taken of pieces in their own precision, or, for 16 bits, in single precision by a small copy, and
put together in double precision. Accelerators cast as they read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from osdp.runtime.larger_layout import ranks_of
from osdp.runtime.local import local_tensor
from osdp.runtime.recovery import shards_of

PIECE = 4096  # elements


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clips the norm of all gradients together, as `torch.nn.utils.clip_grad_norm_` does in a single process.

    Gradients may be sharded over the world, over a node, or not at all; they may be of tensor-parallel operators, and
    of one stage of a pipeline, where all ranks of all stages call it. One all-reduce of a single number adds up every
    rank's part; what R ranks hold alike counts 1/R on each. Returns the norm before clipping, equal on all ranks.
    """
    tensors = shards_of([parameters] if isinstance(parameters, Tensor) else parameters)
    grads = [tensor.grad for tensor in tensors if tensor.grad is not None]
    norm = total_norm(grads, norm_type)
    scale_to(grads, max_norm, norm)
    return norm.to(grads[0].dtype if grads else torch.float32)


@torch.no_grad()
def total_norm(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of all gradients together, in double precision, equal on all ranks: a collective."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    local = [local_tensor(grad) for grad in grads]
    device = _device_of(grads)
    by_copies: dict[tuple[float, torch.device], list[Tensor]] = {}  # units may be on the host
    for grad, own in zip(grads, local, strict=True):
        if own.numel():  # of an empty part there is no norm
            by_copies.setdefault((ranks_of(grad) / _shards(grad), own.device), []).append(own)
    norms = {alike: _norms(parts, norm_type).to(device) for alike, parts in by_copies.items()}
    total = torch.zeros((), dtype=torch.float64, device=device)
    if math.isinf(norm_type):
        for each in norms.values():
            total = torch.maximum(total, each.max())
    else:
        for (copies, _), each in norms.items():
            total += each.pow_(norm_type).sum() / copies
    if ranks > 1:
        dist.all_reduce(total, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM)
    return total if math.isinf(norm_type) else total ** (1.0 / norm_type)


@torch.no_grad()
def scale_to(grads: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Multiplies gradients so that their norm, which is `norm`, is at most `max_norm`."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for own in map(local_tensor, grads):
        by_device.setdefault(own.device, []).append(own)
    for device, local in by_device.items():
        torch._foreach_mul_(local, factor.to(device, local[0].dtype))


def _device_of(grads: Sequence[Tensor]) -> torch.device | None:
    """Where ranks exchange what they know of these: on their meshes' device, though all may be on the host."""
    kind = next((grad.device_mesh.device_type for grad in grads if isinstance(grad, DTensor)), None)
    placed = next((grad.device for grad in grads if kind is None or grad.device.type == kind), None)
    return torch.device(kind) if placed is None and kind is not None else placed


def torch_norm(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm as torch's own clipping gives it: in the gradients' precision."""
    return total_norm(grads, norm_type).to(grads[0].dtype)


def _norms(parts: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norms of tensors, or of pieces of them, in double precision; see [Note: Pieces]."""
    if parts[0].device.type != "cpu":
        return torch.stack([torch.linalg.vector_norm(part, norm_type, dtype=torch.float64) for part in parts])
    pieces = [piece for part in parts for piece in part.reshape(-1).split(PIECE)]
    dtype = torch.float32 if any(part.dtype.itemsize < 4 for part in parts) else None
    return torch.stack(torch._foreach_norm(pieces, norm_type, dtype=dtype)).double()


def _shards(grad: Tensor) -> int:
    """How many ranks share one copy of a gradient. Strided shards, of two dimensions on one, are no `is_shard()`."""
    if not isinstance(grad, DTensor):
        return 1
    placed = zip(grad.device_mesh.shape, grad.placements, strict=True)
    return math.prod(size for size, placement in placed if not placement.is_replicate())
