"""What ranks must agree on before anything is sharded: one plan for all, and a model that it was made for."""

from __future__ import annotations

import functools
import warnings
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from osdp.engine import Engine
from osdp.errors import OsdpError, UsageError
from osdp.model.structure import split_dim
from osdp.plan_check import Held, misfit
from osdp.planfile import Plan
from osdp.runtime.local import local_tensor

T = TypeVar("T")


def by_rank_0(make: Callable[[], T]) -> T:
    """One plan, or whatever else, for all ranks: where ranks run, rank 0 makes it and sends it, or the error it met."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_backend() == "fake":
        return make()
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [make()]
        except OsdpError as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], OsdpError):
        raise answer[0]
    return answer[0]


def check_ranks(plan: Plan, group: dist.ProcessGroup | None) -> None:
    """All ranks must run one plan, on as many ranks as it was made for; `group` are those of a larger layout's plan."""
    ranks, planned = dist.get_world_size(group), plan.cluster.world_size
    digests = _of_all(plan.digest, group)
    if ranks != planned:
        run = f"{ranks} run" if group is None else f"the mesh has {ranks}"
        raise UsageError(
            f"the plan is for {planned} ranks ({plan.cluster.label}) but {run}; plan again for {ranks}"
            f" ranks, or start {planned}"
        )
    if len(set(digests)) > 1:
        others = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
        raise UsageError(
            f"rank {', '.join(others)} has another plan than rank 0; give every rank the same plan file, or call"
            " osdp.plan on all ranks, where rank 0 plans for all"
        )


def say_other_engine(plan: Plan, running: Engine) -> None:
    """Warns, on rank 0, that the plan's memory and seconds are those of another engine than the one that runs it."""
    planned = plan.cluster.engine
    if planned != running and dist.get_rank() == 0:
        warnings.warn(
            f"the plan was made for the engine {planned.name} and runs on {running.name}: its predictions do not hold;"
            f' plan for a cluster with engine = "{running.name}"',
            stacklevel=3,
        )


def check_model(model: nn.Module, plan: Plan, group: dist.ProcessGroup | None) -> None:
    """Every rank's model must have the plan's modules, with as many parameters as were planned, in the planned dtype.

    Ranks tell each other what they find: where one raised alone, the others would wait for it.
    """
    found = _of_all(_misfit(model, plan), group)
    if None not in found and len(set(found)) == 1:
        raise UsageError(str(found[0]))
    for rank, reason in enumerate(found):
        if reason is not None:
            raise UsageError(f"on rank {rank} {reason}; every rank must build the same model")


def check_weights(
    model: nn.Module, group: dist.ProcessGroup | None, same_experts: dist.ProcessGroup | None = None
) -> None:
    """Ranks that begin with different weights would train different models; those on the meta device have none yet.

    Where experts lie over a dimension of their own, those of `same_experts` have the same ones, and only they.
    """
    if dist.get_backend() == "fake":
        return
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if same_experts is not None:
        _check_alike(model, {name: t for name, t in tensors.items() if isinstance(t, DTensor)}, same_experts)
        tensors = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
    _check_alike(model, tensors, group)


def _check_alike(model: nn.Module, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    own = None if on_meta else {name: _checksum(tensor) for name, tensor in tensors.items() if tensor.numel()}
    everyone = _of_all(own, group)
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        if first is None or theirs is None:
            differs = None if first is theirs else "one is on the meta device, the other is not"
        else:
            names = [name for name in {**first, **theirs} if theirs.get(name) != first.get(name)]
            differs = f"{names[0]} differs" if names else None
        if differs is not None:
            raise UsageError(
                f"rank {rank} has other weights than rank 0: {differs}; call torch.manual_seed alike on every"
                " rank before the model is built, or build it under torch.device('meta') and call osdp.initialize"
            )


def _of_all(own: T, group: dist.ProcessGroup | None) -> list[T]:
    """What every rank gives, in the order of ranks: a collective. In a world that is not real all ranks are alike."""
    everyone = [own] * dist.get_world_size(group)
    if dist.get_backend() != "fake":
        dist.all_gather_object(everyone, own, group)
    return everyone


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(local_tensor(tensor.detach()).cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def _misfit(model: nn.Module, plan: Plan) -> str | None:
    """Why this rank's model is not the one that was planned; None if it is."""
    master = torch.bfloat16 if plan.precision == "pure-bf16" else torch.float32
    for name, parameter in model.named_parameters():
        if parameter.dtype != master:
            return (
                f"{name} is {parameter.dtype} but {plan.precision} was planned with {master}; call model.to({master})"
                " before osdp.parallelize, or plan another precision"
            )
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    held = [Held(tuple(found), tuple(local_tensor(parameter).shape)) for parameter, found in names.items()]
    return misfit(plan, held, functools.partial(_can_split, model))


def _can_split(model: nn.Module, name: str) -> bool:
    operator = model.get_submodule(name)
    return split_dim(operator) >= 0 and not any(isinstance(p, DTensor) for p in operator.parameters())
