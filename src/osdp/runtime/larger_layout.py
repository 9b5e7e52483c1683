"""A plan over the data-parallel dimension of a mesh that has others: tensor parallel, pipeline stages, experts.

[Note: Larger layout]
A model may be tensor-parallel before a plan is applied: its parameters are DTensors over a dimension of a device mesh,
as `parallelize_module` or a Hugging Face `tp_plan` make them. It may be one stage of a pipeline. Then the ranks of one
data-parallel group run one plan, over what each of them holds: gathers, reductions and questions go to that group
alone. Copies of a gradient are told from its parts by the mesh: a model's ranks are those of the data-parallel and the
tensor dimension together, and other stages have other gradients.
Experts may lie over a dimension of the data-parallel mesh itself; see [Note: Experts] in osdp.experts. All its ranks
have samples of their own, so all other units are held over all of them. A unit of experts is held over the ranks that
have the same ones, and its gradients are divided by the number of all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from osdp._torch.mesh import flattened
from osdp.errors import UsageError
from osdp.experts import DividedExperts
from osdp.planfile import Plan
from osdp.sharding import FREE_TO_NODE

_model_ranks: weakref.WeakValueDictionary[int, DeviceMesh] = weakref.WeakValueDictionary()  # meshes that are known
_sizes: dict[int, int] = {}  # by id of a known mesh: how many ranks run the model whose parameters lie on it


class Within(NamedTuple):
    """Where a plan is applied: its ranks as a mesh of one dimension, and those of them that hold the same experts.

    None for all ranks, and for a model whose experts lie on no dimension of their own.
    """

    ranks: DeviceMesh | None
    experts: DeviceMesh | None = None


def find_mesh(model: nn.Module, plan: Plan, mesh: DeviceMesh | None) -> Within:
    """The ranks of a plan, checked against the model's layout; where experts have a dimension, a collective."""
    if plan.layout.interleave > 1:
        raise UsageError(
            f"the plan is for {plan.layout.interleave} chunks of blocks on each stage, and osdp.parallelize applies a"
            " plan to one module; plan without --interleave, for a schedule with one stage a rank"
        )
    if plan.layout.expert == 1:
        divided = next((name for name, module in model.named_modules() if isinstance(module, DividedExperts)), None)
        if divided is not None:
            raise UsageError(
                f"{divided} is divided over a dimension of experts, where every rank has samples of its own, and the"
                " plan has it whole; plan again with expert= as many ranks"
            )
        check_mesh(model, plan, mesh)
        return Within(mesh)
    alike = _check_experts(model, plan, mesh)
    assert mesh is not None
    return Within(flattened(mesh), mesh[alike])


def _check_experts(model: nn.Module, plan: Plan, mesh: DeviceMesh | None) -> str:
    """The name of the dimension whose ranks hold the same experts; refuses what does not go with the plan."""
    experts = plan.layout.expert
    if plan.layout.tensor > 1:
        raise UsageError("the plan has tensor-parallel ranks and a dimension of experts, which do not go together")
    if mesh is None or mesh.ndim != 2 or mesh.mesh_dim_names is None:
        found = "no mesh was given" if mesh is None else f"the mesh has {mesh.ndim} dimensions, {_names(mesh)}"
        raise UsageError(
            f"the plan has experts over {experts} ranks, and {found}; give osdp.parallelize the data-parallel dimension"
            " and that of the experts, as mesh=mesh['dp', 'ep']"
        )
    divided = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    if not divided:
        raise UsageError(
            f"the plan has experts over {experts} ranks, but every parameter is whole; call"
            " osdp.experts.divide_experts(model, mesh['ep']) before osdp.parallelize"
        )
    own = mesh.mesh_dim_names[1]
    for name, parameter in divided.items():
        there = parameter.device_mesh
        if there.mesh_dim_names != (own,) or there != mesh[own] or tuple(parameter.placements) != (Shard(0),):
            raise UsageError(
                f"{name} lies on {_names(there)} as {parameter.placements}, but experts are Shard(0) on the second"
                f" dimension of the mesh, {own}"
            )
        if parameter.is_meta:
            raise UsageError(
                "the model's experts are divided and on the meta device, where osdp.initialize would draw the same"
                " numbers for every rank's; give it its weights before osdp.parallelize"
            )
    if mesh[own].size() != experts:
        raise UsageError(f"the plan has experts over {experts} ranks, but {own} has {mesh[own].size()}; plan again")
    wrong = next(_misplaced(plan, divided), None)
    if wrong is not None:
        raise UsageError(f"{wrong}; plan this model again")
    return mesh.mesh_dim_names[0]


def _misplaced(plan: Plan, divided: Iterable[str]) -> Iterator[str]:
    """Units of experts, and divided parameters, that are not each other's."""
    owner = {module: unit for unit in plan.units for module in unit.modules}
    found: set[str] = set()
    for name in divided:
        unit = owner.get(name.rpartition(".")[0])
        if unit is None or not unit.experts:
            yield f"{name} is divided over the dimension of experts, but in no unit of experts of the plan"
        else:
            found.add(unit.name)
    for unit in plan.units:
        if unit.experts and unit.name not in found:
            yield f"{unit.name} is planned as experts over a dimension of their own, but the model has it whole"
        if unit.experts and unit.sharding.is_sharded_anew:
            yield f"{unit.name} is planned {FREE_TO_NODE}, which FSDP2 does not do with parameters on two dimensions"


def check_mesh(model: nn.Module, plan: Plan, mesh: DeviceMesh | None) -> None:
    """Refuses a mesh that is not the data-parallel dimension of the model's layout, and a plan of another layout."""
    outer = tensor_mesh(model)
    degree = 1 if outer is None else outer.size()
    if plan.layout.tensor not in (1, degree):
        raise UsageError(
            f"the plan is for {plan.layout.tensor} tensor-parallel ranks, but the model's parameters lie on {degree};"
            " make it tensor-parallel before osdp.parallelize, or plan again"
        )
    if plan.layout.is_larger and mesh is None:
        raise UsageError(
            f"the plan is for one data-parallel dimension of {plan.layout}; give osdp.parallelize that dimension, as"
            " mesh=mesh['dp']"
        )
    if outer is not None and any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError(
            "the model is tensor-parallel and on the meta device, where osdp.initialize would draw the same numbers for"
            " every rank's part; give it its weights before osdp.parallelize"
        )
    anew = next((unit.name for unit in plan.units if unit.sharding.is_sharded_anew), None)
    if outer is not None and anew is not None:
        raise UsageError(
            f"{anew} is planned {FREE_TO_NODE}, which FSDP2 does not do with tensor-parallel parameters; plan again"
            " with other modes"
        )
    if mesh is None:
        if outer is not None:
            raise UsageError(
                f"the model is tensor-parallel over {_names(outer)}; give osdp.parallelize the data-parallel dimension"
                " of the same device mesh, as mesh=mesh['dp']"
            )
        return
    if mesh.ndim != 1 or mesh.mesh_dim_names is None:
        raise UsageError(
            f"the mesh has {mesh.ndim} dimensions, {_names(mesh)}; give its data-parallel one by name, as"
            " mesh=mesh['dp'], or several flattened into one"
        )
    if outer is not None and outer.ndim > 1:
        raise UsageError(
            f"the model's parameters lie on {outer.ndim} dimensions, {_names(outer)}; a plan goes with one"
            " tensor-parallel dimension"
        )
    if outer is not None and set(mesh.mesh.tolist()) & set(outer.mesh.tolist()) != {dist.get_rank()}:
        raise UsageError(
            f"the mesh's ranks {mesh.mesh.tolist()} are not data-parallel copies of the tensor-parallel ranks"
            f" {outer.mesh.tolist()}; take both dimensions of one init_device_mesh"
        )


def tensor_mesh(model: nn.Module) -> DeviceMesh | None:
    """The mesh over which a model is tensor-parallel; None where its parameters are plain."""
    return next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)


def model_ranks(model: nn.Module, within: Within) -> tuple[int, ...]:
    """All ranks that hold parts or copies of a model; a collective over its data-parallel ranks."""
    mesh = within.ranks
    if mesh is None:
        return tuple(range(dist.get_world_size()))
    outer = tensor_mesh(model) if within.experts is None else None
    own = [dist.get_rank()] if outer is None else outer.mesh.tolist()
    everyone = [own] * mesh.size()
    if dist.get_backend() != "fake":
        dist.all_gather_object(everyone, own, mesh.get_group())
    return tuple(sorted(rank for ranks in everyone for rank in ranks))


def remember_ranks(meshes: Iterable[DeviceMesh], ranks: int) -> None:
    """Notes how many ranks run the model whose parameters lie on these meshes, for `ranks_of`."""
    for mesh in meshes:
        if id(mesh) not in _model_ranks:
            weakref.finalize(mesh, _sizes.pop, id(mesh), None)
        _model_ranks[id(mesh)] = mesh
        _sizes[id(mesh)] = ranks


def ranks_of(tensor: Tensor) -> int:
    """How many ranks run the model that a parameter or gradient belongs to: parts and copies of it together."""
    known = isinstance(tensor, DTensor) and _model_ranks.get(id(tensor.device_mesh)) is tensor.device_mesh
    if known:
        assert isinstance(tensor, DTensor)
        return _sizes[id(tensor.device_mesh)]
    return dist.get_world_size() if dist.is_initialized() else 1


def _names(mesh: DeviceMesh) -> str:
    return " × ".join(mesh.mesh_dim_names or ("without names",))
