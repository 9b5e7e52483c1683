"""What ranks must agree on before anything is sharded: one plan for all, and a model that it was made for."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from osdp.errors import OsdpError, UsageError
from osdp.planfile import Plan


def planned_by_rank_0(make: Callable[[], Plan]) -> Plan:
    """One plan for all ranks: where ranks run, rank 0 makes it and sends it, or the error that it met."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_backend() == "fake":
        return make()
    answer: list[Plan | OsdpError | None] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [make()]
        except OsdpError as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], OsdpError):
        raise answer[0]
    assert answer[0] is not None
    return answer[0]


def check_ranks(plan: Plan) -> None:
    """All ranks must run one plan, on as many ranks as it was made for."""
    ranks, planned = dist.get_world_size(), plan.cluster.world_size
    if ranks != planned:
        raise UsageError(
            f"the plan is for {planned} ranks ({plan.cluster.label}) but {ranks} run; plan again for {ranks}"
            f" ranks, or start {planned}"
        )
    if dist.get_backend() == "fake":
        return
    digests: list[str] = [""] * ranks
    dist.all_gather_object(digests, plan.digest)
    if len(set(digests)) > 1:
        others = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
        raise UsageError(
            f"rank {', '.join(others)} has another plan than rank 0; give every rank the same plan file, or call"
            " osdp.plan on all ranks, where rank 0 plans for all"
        )


def check_weights(model: nn.Module) -> None:
    """Ranks that begin with different weights would train different models; those on the meta device have none yet."""
    if dist.get_backend() == "fake" or any(parameter.is_meta for parameter in model.parameters()):
        return
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    own = {name: _checksum(tensor) for name, tensor in tensors.items() if tensor.numel()}
    everyone: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own)
    for rank, theirs in enumerate(everyone):
        differs = next((name for name in everyone[0] if theirs.get(name) != everyone[0][name]), None)
        if differs is not None:
            raise UsageError(
                f"rank {rank} has other weights than rank 0: {differs} differs; call torch.manual_seed alike on every"
                " rank before the model is built, or build it under torch.device('meta') and call osdp.initialize"
            )


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def check_model(model: nn.Module, plan: Plan) -> None:
    """The model must have the plan's modules, with as many parameters as were planned, in the planned dtype."""
    master = torch.bfloat16 if plan.precision == "pure-bf16" else torch.float32
    for name, parameter in model.named_parameters():
        if parameter.dtype != master:
            raise UsageError(
                f"{name} is {parameter.dtype} but {plan.precision} was planned with {master}; call model.to({master})"
                " before osdp.parallelize, or plan another precision"
            )
    modules = dict(model.named_modules())
    taken: set[nn.Parameter] = set()
    for unit in sorted(plan.units, key=lambda unit: -unit.depth):
        missing = next((name for name in unit.modules if name not in modules), None)
        if missing is not None:
            raise UsageError(f"the plan has a unit for {missing!r}, which the model lacks; plan this model again")
        own = {p for name in unit.modules for p in modules[name].parameters()} - taken
        taken |= own
        parameters = sum(parameter.numel() for parameter in own)
        if parameters != unit.parameters:
            raise UsageError(
                f"{unit.name or 'the model itself'} has {parameters:,} parameters but was planned with"
                f" {unit.parameters:,}; plan this model again"
            )
