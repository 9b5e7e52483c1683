"""Gives a model that was parallelized on the meta device its memory and its first weights.

[Note: Initialized in parts]
No rank ever holds the whole model. A template of it stays on the meta device; one block, or one operator outside of
blocks, gets memory there, is initialised, and every rank takes over its own part. The random numbers depend on the
part's name and the seed alone, so the weights are the same on every rank, under every plan, and in a single process.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from osdp._torch.fsdp import on_host
from osdp.accelerator import CPU, own_device
from osdp.errors import UsageError
from osdp.model.structure import own_blocks
from osdp.runtime.apply import template_of
from osdp.runtime.split import SplitOperator, parts_of

Initialize = Callable[[nn.Module], None]


@torch.no_grad()
def initialize(
    model: nn.Module, *, seed: int = 0, device: str | torch.device | None = None, init: Initialize | None = None
) -> nn.Module:
    """Materialises a model whose parameters are on the meta device, with weights as its modules initialise them.

    `init` is called for every module, children first; by default it is the model's `_init_weights`, as Hugging Face
    names it, or else every module's `reset_parameters`. Load a checkpoint afterwards to replace the weights. They are
    placed where the model was parallelized to be trained, or else on this process's accelerator, or the CPU.
    """
    template = template_of(model)
    if not any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError("the model has weights already; build it under torch.device('meta') to initialise it here")
    device = torch.device(device) if device is not None else _planned_device(model)
    _materialise(model, device)
    init = init or getattr(template, "_init_weights", None) or _reset
    filled: set[Tensor] = set()
    for name, part, recurse in _parts(template):
        owned = dict(part.named_parameters(recurse=recurse, remove_duplicate=False))
        part.to_empty(device=device, recurse=recurse)
        with _own_draws(device):
            torch.manual_seed(seed ^ zlib.crc32(name.encode()))
            for module in reversed(list(part.modules()) if recurse else [part]):
                init(module)
        _take_over(model, name, part, recurse, {key for key, p in owned.items() if p in filled})
        filled.update(owned.values())  # a tied parameter is what its first name gave it
        part.to_empty(device="meta", recurse=recurse)
    return model


def _planned_device(model: nn.Module) -> torch.device:
    """The device of the mesh that the model is sharded on, or of this process alone."""
    meshes = (parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor))
    kind = next((mesh.device_type for mesh in meshes), None)
    own = own_device()
    return own if kind is None or kind == own.type else torch.device(kind)


def _own_draws(device: torch.device) -> AbstractContextManager[None]:
    """Random numbers drawn within it leave those of the CPU and of the device as they were."""
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device.index or 0], device_type=device.type)


def _copy(owner: nn.Module, key: str, value: Tensor) -> None:
    """Copies a whole tensor into what this rank holds of a parameter, or into a buffer."""
    if key in owner._buffers:
        owner.get_buffer(key).copy_(value)
        return
    held, dim = _held(owner, key)
    for tensor, piece in zip(held, parts_of(value.detach(), held, dim), strict=True):
        tensor.copy_(piece)


def _materialise(model: nn.Module, device: torch.device) -> None:
    """Gives parameters and buffers memory, without values; `to_empty` would untie tied ones."""
    made: dict[Tensor, Any] = {}
    offloaded = on_host(model.modules())
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if tensor not in made:
                    empty = torch.empty_like(tensor, device=CPU if tensor in offloaded else device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[tensor] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                tensors[key] = made[tensor]


def _parts(template: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Blocks with all that is in them, and the modules outside of blocks without what is in them."""
    blocks = set(own_blocks(template))
    inside = {id(module) for block in blocks for module in template.get_submodule(block).modules()}
    for name, module in template.named_modules():
        if name in blocks:
            yield name, module, True
        elif id(module) not in inside and (module._parameters or module._buffers):
            yield name, module, False


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
    elif any(parameter is not None for parameter in module._parameters.values()) or module._buffers:
        raise UsageError(
            f"{type(module).__name__} has no reset_parameters that would initialise it; give osdp.initialize an init"
        )


def _take_over(model: nn.Module, name: str, part: nn.Module, recurse: bool, known: set[str]) -> None:
    """Copies a part's values into the model, to every rank what it holds."""
    target = model.get_submodule(name)
    for key, value in part.named_parameters(recurse=recurse, remove_duplicate=False):
        if key in known:
            continue
        owner, _, own = key.rpartition(".")
        _copy(target.get_submodule(owner), own, value)
    for key, value in part.named_buffers(recurse=recurse):
        target.get_buffer(key).copy_(value)


def _held(owner: nn.Module, key: str) -> tuple[list[Tensor], int]:
    """The tensors that hold a parameter, one for each slice, and the dimension along which it is sliced."""
    if isinstance(owner, SplitOperator):
        tensors: list[Tensor] = [piece.get_parameter(key) for piece in owner.slices]
        return tensors, owner.weight_dim if tensors[0].ndim > 1 else 0
    return [owner.get_parameter(key)], 0
