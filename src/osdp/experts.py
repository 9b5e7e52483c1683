"""Experts over a mesh dimension of their own: each of its ranks has some, and tokens go where their experts are.

[Note: Experts]
A module of experts has a `num_experts`, and the first dimension of its parameters is that of the experts: so are those
of Hugging Face's models and of torchtitan. Over E ranks each holds num_experts / E of them. Every rank has samples of
its own. A token is sent to the ranks of the k experts that its router chose and comes back from them: one all-to-all
before the experts and one after them, and the same in backward. So rank r's experts see the tokens of all E ranks, and
their gradients are sums over all samples of these. `osdp.parallelize` therefore shards experts over the ranks that hold
the same ones and divides their gradients by the number of all ranks, as those of every other parameter.

`divide_experts` does this to a model. One that is divided otherwise goes with osdp too, if its experts' parameters are
DTensors, `Shard(0)` over the dimension of experts. The planner traces a divided model on one rank (`local_experts`):
the same code, where what would be sent is copied.

[Note: No tokens]
A rank to which no token was sent gives its experts one of zeros, whose output goes nowhere. So its experts have a
gradient, of zeros, and all ranks make the same collectives in the same order.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from osdp.errors import UsageError

_CALL = ("hidden_states", "top_k_index", "top_k_weights")  # what Hugging Face's experts are called with, in this order


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of experts of a model, by name; see [Note: Experts]."""
    return {name: module for name, module in model.named_modules() if _num_experts(module)}


def _num_experts(module: nn.Module) -> int:
    """How many experts a module has; 0 for any other module."""
    number = getattr(module, "num_experts", None)
    own = list(module.parameters(recurse=False))
    if not isinstance(number, int) or not own or any(p.ndim < 2 or p.shape[0] != number for p in own):
        return 0
    return number if any(p.ndim > 2 for p in own) else 0  # a router has one row, no matrix, for each expert


def divide_experts(model: nn.Module, mesh: DeviceMesh, *, alone: bool = False) -> nn.Module:
    """Leaves each rank of `mesh`, the dimension of experts, its part of every module of experts, in place.

    Call it on every rank, on a model that has its weights, before `osdp.parallelize`. See [Note: Experts]. Where a rank
    runs `alone`, in a dry run, what would be sent is copied.
    """
    if mesh.ndim != 1:
        raise UsageError(
            f"the mesh has {mesh.ndim} dimensions; give the one of the experts by name, as divide_experts(model,"
            " mesh['ep'])"
        )
    ranks, own, group = mesh.size(), mesh.get_local_rank(), None if alone else mesh.get_group()
    for module in _divisible(model, ranks).values():
        for key, parameter in list(module._parameters.items()):
            assert parameter is not None
            local = parameter.detach().chunk(ranks)[own].clone()
            whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            module._parameters[key] = nn.Parameter(whole, parameter.requires_grad)
        _give_place(module, _Place(ranks, group))
    return model


def local_experts(model: nn.Module, ranks: int) -> Callable[[], dict[str, int]]:
    """Gives a model on the meta device the local shapes of one of `ranks`, in place.

    What is returned says, once the model was called, by the name of every module of experts to how many of them a token
    goes. A capture calls a few of many blocks that are alike: the others' are taken to choose as many.
    """
    found = _divisible(model, ranks)
    chosen: dict[str, int] = {}
    for name, module in found.items():
        for key, parameter in list(module._parameters.items()):
            assert parameter is not None
            module._parameters[key] = nn.Parameter(parameter.detach().chunk(ranks)[0].clone(), parameter.requires_grad)
        _give_place(module, _Place(ranks, None, functools.partial(chosen.__setitem__, name)))
    return lambda: {name: chosen.get(name, max(chosen.values(), default=1)) for name in found}


def _divisible(model: nn.Module, ranks: int) -> dict[str, nn.Module]:
    found = expert_modules(model)
    if not found:
        raise UsageError(
            f"{type(model).__name__} has no experts: no module with a num_experts and a matrix for each of them in one"
            " parameter; leave the dimension of experts out"
        )
    for name, module in found.items():
        number = _num_experts(module)
        if number % ranks:
            raise UsageError(f"the {number} experts of {name} do not divide over {ranks} ranks; give a divisor")
        takes = [p.name for p in inspect.signature(type(module).forward).parameters.values()][1:]
        if len(takes) < len(_CALL) and "args" not in takes:
            raise UsageError(
                f"{name} is called with {', '.join(takes) or 'nothing'}, and experts that osdp divides with"
                f" {', '.join(_CALL)}; divide them in your model, with DTensors over their dimension"
            )
    return found


@dataclass(frozen=True)
class _Place:
    """A rank's place in the dimension of experts; without a group it is one rank that is traced.

    `told` is told of how many experts a token goes to.
    """

    ranks: int
    group: dist.ProcessGroup | None
    told: Callable[[int], None] = lambda _: None

    def __deepcopy__(self, memo: object) -> _Place:
        return self


class DividedExperts(nn.Module):
    """What the class of a module of experts is mixed with once it is divided."""

    num_experts: int  # of this rank
    _osdp_place: _Place

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Tokens (tokens, width) go to the ranks of their experts (tokens, k) and come back, times their weights."""
        if top_k_index.shape != top_k_weights.shape or hidden_states.ndim != 2:
            raise UsageError(
                f"experts are called with tokens of shape {list(hidden_states.shape)}, experts of each of shape"
                f" {list(top_k_index.shape)} and weights of shape {list(top_k_weights.shape)}; osdp divides those of"
                " shape (tokens, width), (tokens, k) and (tokens, k)"
            )
        place, chosen = self._osdp_place, top_k_index.flatten()
        place.told(top_k_index.shape[-1])
        order = chosen.argsort(stable=True)
        token = order // top_k_index.shape[-1]
        if place.group is None:
            own = chosen[order] % self.num_experts
            returned = self._answers(hidden_states[token].clone(), own).clone()
        else:
            sent, received, own = _counted(chosen, self.num_experts, place.ranks, place.group)
            arrived = _AllToAll.apply(hidden_states[token], sent, received, place.group)
            returned = _AllToAll.apply(self._answers(arrived, own), received, sent, place.group)
        weighed = returned * top_k_weights.to(returned.dtype).flatten()[order, None]
        return torch.zeros_like(hidden_states).index_add(0, token, weighed)

    def _answers(self, tokens: Tensor, experts: Tensor) -> Tensor:
        """What this rank's experts make of tokens, one expert for each; see [Note: No tokens]."""
        number = len(tokens)
        if number == 0:
            tokens, experts = F.pad(tokens, (0, 0, 0, 1)), experts.new_zeros(1)
        with _plain_parameters(self):
            found: Tensor = super().forward(tokens, experts[:, None], tokens.new_ones(len(tokens), 1))  # type: ignore[misc]
        return found[:number]


@functools.cache
def _divided_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (DividedExperts, kind), {"__module__": kind.__module__})


def _give_place(module: nn.Module, place: _Place) -> None:
    module.__class__ = _divided_class(type(module))
    module.__dict__.update(num_experts=_num_experts_here(module), _osdp_place=place)


def _num_experts_here(module: nn.Module) -> int:
    first = next(module.parameters(recurse=False))
    return (first.to_local() if isinstance(first, DTensor) else first).shape[0]


def _counted(chosen: Tensor, local: int, ranks: int, group: dist.ProcessGroup) -> tuple[list[int], list[int], Tensor]:
    """How many tokens go to each rank and come from each; and the experts, of this rank's, of those that come."""
    counts = torch.bincount(chosen, minlength=local * ranks)
    coming = torch.empty_like(counts)
    dist.all_to_all_single(coming, counts, group=group)
    sent, received = torch.stack([counts, coming]).view(2, ranks, local).sum(-1).tolist()
    experts = torch.arange(local, device=chosen.device).repeat(ranks)
    return sent, received, experts.repeat_interleave(coming, output_size=sum(received))


class _AllToAll(torch.autograd.Function):
    """Rows of a tensor to the ranks of a group, so many to each; the gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way = received, sent, group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        return _exchanged(gradient, *ctx.way), None, None, None


def _exchanged(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    found = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), list(received), list(sent), group=group)
    return found


@contextlib.contextmanager
def _plain_parameters(module: nn.Module) -> Iterator[None]:
    """Within it the module's parameters are this rank's parts, as plain tensors."""
    parts = {key: p.to_local() for key, p in module._parameters.items() if isinstance(p, DTensor)}
    module.__dict__.update(parts)  # found before the parameters are
    try:
        yield
    finally:
        for key in parts:
            del module.__dict__[key]
