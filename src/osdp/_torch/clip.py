"""Lets torch's own clipping work on gradients that lie on several meshes.

[Note: Clipping]
`torch.nn.utils.clip_grad_norm_` stacks the norms of all gradients, which DTensors of different meshes refuse. Trainers
call it, and users do. It computes with two functions of its module, which are public under other names. Each is a
wrapper that has the function proper in its one closure cell, and there ours takes its place: whoever has imported a
wrapper by name calls ours too. Ours serves gradients on several meshes of a plan, and leaves all others to torch's.

After a forward that no backward follows, a model's parameters are gathered copies, which have no gradients: torch's
clipping would leave these units out. It is given their shards.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

Norm = Callable[[Sequence[Tensor], float], Tensor]
Scale = Callable[[Sequence[Tensor], float, Tensor], None]
ShardsOf = Callable[[Iterable[Tensor]], list[Tensor]]

_ours: weakref.WeakValueDictionary[int, DeviceMesh] = weakref.WeakValueDictionary()  # by id: meshes of a kind are equal
_is_patched = False


def clip_over_meshes(meshes: Iterable[DeviceMesh], *, norm: Norm, scale: Scale, shards_of: ShardsOf) -> None:
    """Has torch's clipping take `norm` and `scale` for gradients on several of these meshes; see [Note: Clipping].

    `shards_of` gives parameters with shards in the place of gathered copies.
    """
    global _is_patched
    _ours.update({id(mesh): mesh for mesh in meshes})
    if _is_patched:
        return
    _is_patched = True
    norm_cell, clip_cell = _cell(clip_grad._get_total_norm), _cell(clip_grad._clip_grads_with_norm_)
    stock_norm, stock_clip = norm_cell.cell_contents, clip_cell.cell_contents

    def get_total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        found = _listed(tensors)
        if not _on_several(found):
            return stock_norm(found, norm_type, error_if_nonfinite, foreach)
        total = norm(found, float(norm_type))
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(
                f"the norm of the gradients is {total.item()}, which is not finite, so it is not clipped"
            )
        return total

    def clip_grads_with_norm_(
        parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor, foreach: bool | None = None
    ) -> None:
        found = _listed(parameters)
        gradients = [parameter.grad for parameter in found if parameter.grad is not None]
        if _on_several(gradients):
            scale(gradients, float(max_norm), total_norm)
        else:
            stock_clip(found, max_norm, total_norm, foreach)

    norm_cell.cell_contents, clip_cell.cell_contents = get_total_norm, clip_grads_with_norm_
    for whole in (clip_grad.clip_grad_norm_, clip_grad.clip_grad_value_):
        cell = _cell(whole)
        cell.cell_contents = _of_shards(cell.cell_contents, shards_of)


def _of_shards(stock: Callable[..., Any], shards_of: ShardsOf) -> Callable[..., Any]:
    @functools.wraps(stock)
    def clip(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        return stock(shards_of(_listed(parameters)), *args, **kwargs)

    return clip


def _cell(wrapper: Any) -> Any:
    """Where a wrapper of torch's `_no_grad` has the function proper."""
    (cell,) = wrapper.__closure__
    return cell


def _listed(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _on_several(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors lie on several meshes, or on one and on none, or on the host, and one mesh is a plan's."""
    meshes = [tensor.device_mesh if isinstance(tensor, DTensor) else None for tensor in tensors]
    ours = any(mesh is not None and _ours.get(id(mesh)) is mesh for mesh in meshes)
    away = any(m is not None and m.device_type != t.device.type for m, t in zip(meshes, tensors, strict=True))
    return ours and (away or len({id(mesh) for mesh in meshes}) > 1)
