"""A plan over the data-parallel dimension of a mesh that has others: tensor parallel, pipeline stages.

[Note: Larger layout]
A model may be tensor-parallel before a plan is applied: its parameters are DTensors over a dimension of a device mesh,
as `parallelize_module` or a Hugging Face `tp_plan` make them. It may be one stage of a pipeline. Then the ranks of one
data-parallel group run one plan, over what each of them holds: gathers, reductions and questions go to that group
alone. Copies of a gradient are told from its parts by the mesh: a model's ranks are those of the data-parallel and the
tensor dimension together, and other stages have other gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from osdp.errors import UsageError
from osdp.planfile import Plan
from osdp.sharding import FREE_TO_NODE

_model_ranks: weakref.WeakValueDictionary[int, DeviceMesh] = weakref.WeakValueDictionary()  # meshes that are known
_sizes: dict[int, int] = {}  # by id of a known mesh: how many ranks run the model whose parameters lie on it


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


def model_ranks(model: nn.Module, mesh: DeviceMesh | None) -> tuple[int, ...]:
    """All ranks that hold parts or copies of a model; a collective over `mesh`, its data-parallel dimension."""
    if mesh is None:
        return tuple(range(dist.get_world_size()))
    outer = tensor_mesh(model)
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
