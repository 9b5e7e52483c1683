"""Turns a plan into a running model, in place, on FSDP2: the only caller of `fully_shard`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from osdp.errors import UsageError
from osdp.planfile import FREE, FREE_IN_NODE, FREE_TO_NODE, KEEP_IN_NODE, REPLICATE, Plan, PlanUnit, backward_order

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Meshes:
    """The device meshes of a plan, each built once and shared by all units."""

    def __init__(self, device_type: str, nodes: int, devices_per_node: int) -> None:
        self.device_type, self.nodes, self.devices_per_node = device_type, nodes, devices_per_node

    @functools.cached_property
    def world(self) -> DeviceMesh:
        return init_device_mesh(self.device_type, (self.nodes * self.devices_per_node,))

    @functools.cached_property
    def node(self) -> DeviceMesh:
        shape = (self.nodes, self.devices_per_node)
        return init_device_mesh(self.device_type, shape, mesh_dim_names=("across", "node"))

    @functools.cached_property
    def replicas(self) -> DeviceMesh:
        shape = (self.nodes * self.devices_per_node, 1)
        return init_device_mesh(self.device_type, shape, mesh_dim_names=("replicas", "alone"))

    def of(self, mode: str) -> DeviceMesh:
        if mode == REPLICATE:
            return self.replicas
        return self.node if mode in (KEEP_IN_NODE, FREE_IN_NODE) else self.world

    def after_forward(self, mode: str) -> bool | int:
        """FSDP2's `reshard_after_forward`. A replica's compute copy is freed: making it again costs no traffic."""
        if mode == FREE_TO_NODE:
            return self.devices_per_node
        return mode in (FREE, FREE_IN_NODE, REPLICATE)


def parallelize(model: nn.Module, plan: Plan, *, device_type: str = "cpu") -> nn.Module:
    """Applies a plan to the model it was made for, in place. Call it on every rank, before the optimizer is made."""
    modules = dict(model.named_modules())
    split = next((unit.name for unit in plan.units if unit.splits > 1), None)
    if split is not None:
        raise UsageError(f"{split} is split, which this version plans but does not run yet; plan with --no-split")
    for name in (name for unit in plan.units for name in unit.modules):
        if name not in modules:
            raise UsageError(f"the plan has a unit for {name!r}, which the model lacks; plan this model again")
    for block in sorted({unit.block for unit in plan.units if unit.recompute and unit.block}):
        module = modules[block]
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)  # type: ignore[method-assign]
    meshes = Meshes(device_type, plan.cluster.nodes, plan.cluster.devices_per_node)
    policy = precision_policy(plan)
    tied = _tied_names(model)
    for unit in sorted(plan.units, key=lambda unit: -max(map(_depth, unit.modules))):  # deeper units first
        _shard(unit, [modules[name] for name in unit.modules], meshes, policy)
    sharded = _tie_again(model, tied)
    if not isinstance(model, FSDPModule):
        fully_shard(model, mesh=meshes.world, reshard_after_forward=False, mp_policy=policy, ignored_params=sharded)
    _prefetch(plan, modules)
    return model


def _tied_names(model: nn.Module) -> list[list[str]]:
    """The names of every parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _tie_again(model: nn.Module, tied: Sequence[Sequence[str]]) -> set[nn.Parameter]:
    """Gives names in modules that are never called the sharded parameter too; returns all sharded parameters."""
    for names in tied:
        owners = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
        sharded = next((m._parameters[key] for m, key in owners if isinstance(m._parameters[key], DTensor)), None)
        for module, key in owners:
            if sharded is not None and not isinstance(module._parameters[key], DTensor):
                module._parameters[key] = sharded
    return {parameter for parameter in model.parameters() if isinstance(parameter, DTensor)}


def precision_policy(plan: Plan) -> MixedPrecisionPolicy:
    if plan.precision == "bf16":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=_DTYPES[plan.reduce_dtype])
    return MixedPrecisionPolicy(reduce_dtype=_DTYPES[plan.reduce_dtype])


def _depth(name: str) -> int:
    return len(name.split(".")) if name else 0


def _shard(unit: PlanUnit, modules: Sequence[nn.Module], meshes: Meshes, policy: MixedPrecisionPolicy) -> None:
    fully_shard(
        modules[0] if len(modules) == 1 else list(modules),
        mesh=meshes.of(unit.mode),
        reshard_after_forward=meshes.after_forward(unit.mode),
        mp_policy=policy,
    )


def _prefetch(plan: Plan, modules: Mapping[str, nn.Module]) -> None:
    """Every unit gathers the next one while it computes, in both directions."""
    forward = [_sharded(modules[unit.name]) for unit in plan.units]
    backward = [_sharded(modules[unit.name]) for unit in backward_order(plan.units)]
    for module in forward:
        module._set_unshard_async_op(True)
    for now, following in itertools.pairwise(forward):
        now.set_modules_to_forward_prefetch([following])
    for now, following in itertools.pairwise(backward):
        now.set_modules_to_backward_prefetch([following])


def _sharded(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module
