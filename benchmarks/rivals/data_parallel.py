"""The data-parallel ways as torch ships them: DDP, ZeRO-1, ZeRO-2, FSDP2, HSDP; and one process alone."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from .job import BETAS, LR, Job, NotHere, Replica, adamw, fill, on_meta, whole
from .models import Model


def alone(job: Job) -> Replica:
    """No communication at all: what the ranks compute in the same time. It trains nothing useful."""
    model = whole(job)
    return Replica(model, adamw(model.parameters()), dist.get_rank(), dist.get_world_size(), job.batch)


def ddp(job: Job) -> Replica:
    model = whole(job)
    wrapped = _replicated(model, job.switches)
    return Replica(wrapped, adamw(model.parameters()), dist.get_rank(), dist.get_world_size(), job.batch)


def _replicated(model: torch.nn.Module, switches: Mapping[str, Any]) -> DistributedDataParallel:
    """Weights are equal on all ranks already, so none are sent; gradients are views of the buckets."""
    return DistributedDataParallel(
        model,
        bucket_cap_mb=switches.get("bucket_mb", 25),
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        init_sync=False,
    )


def zero1(job: Job) -> Replica:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns of torch's own deprecations

    model = whole(job)
    wrapped = _replicated(model, job.switches)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = ZeroRedundancyOptimizer(
        trained, optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, lr=LR, betas=BETAS, fused=True
    )
    return Replica(wrapped, optimizer, dist.get_rank(), dist.get_world_size(), job.batch)


def zero2(job: Job) -> Replica:
    return _sharded(job, None, reshard=False)


def fsdp2(job: Job) -> Replica:
    return _sharded(job, None, reshard=True)


def hsdp(job: Job) -> Replica:
    if 1 in (job.hosts, job.ranks_per_host):
        raise NotHere("needs several hosts of several ranks")
    return _sharded(job, _two_levels(job.hosts, job.ranks_per_host), reshard=job.switches.get("reshard", True))


@functools.cache
def _two_levels(hosts: int, ranks_per_host: int) -> DeviceMesh:
    return init_device_mesh("cpu", (hosts, ranks_per_host), mesh_dim_names=("across", "node"))


def _sharded(job: Job, mesh: DeviceMesh | None, *, reshard: bool) -> Replica:
    model = on_meta(job)
    shard(model, mesh, reshard=reshard, prefetch=job.switches.get("prefetch", False))
    model.to_empty(device="cpu")
    fill(model)
    return Replica(model, adamw(model.parameters()), dist.get_rank(), dist.get_world_size(), job.batch)


def shard(model: Model, mesh: DeviceMesh | None, *, reshard: bool, prefetch: bool = False) -> None:
    """Every block is a unit, as the documentation advises, and so are embedding and head."""
    blocks = [block for block in (model.embed, *model.blocks, model.head) if block is not None]
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    if prefetch:
        for before, after in itertools.pairwise(block for block in blocks if isinstance(block, FSDPModule)):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
