"""Sequence parallelism: outside of divided operators a tensor-parallel rank has its part of the tokens, for capture.

[Note: Sequence parallel]
Norms, additions and dropouts between operators that ranks share are computed by each rank for its tokens alone, and
saved so. Ranks gather the tokens where a group of operators divided by columns is entered, and scatter them where one
divided by rows is left: in place of an all-reduce in either direction a reduce-scatter and an all-gather, as with
torch's `SequenceParallel`. The first block gets its tokens' part of what embeddings put out. Tokens are the second
dimension of an activation, and collectives join along the first: each costs one copy more, which is traced here; the
collectives themselves are put in by osdp.cost.outer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from osdp.errors import UsageError
from osdp.model.graph import TensorOperator, column_groups
from osdp.model.structure import find_blocks

TOKENS = 1  # the dimension of an activation: samples, tokens, features


def divide_tokens(model: nn.Module, shared: Sequence[TensorOperator], ranks: int) -> None:
    """Makes a model with operators of local shapes hold a part of the tokens between them, in place."""
    first, *_ = find_blocks(model)
    model.get_submodule(first).register_forward_pre_hook(_Enters(ranks, _Scatter), with_kwargs=True)
    for each in shared:
        if each.adds_outputs and _is_below(each.name, model):
            model.get_submodule(each.name).register_forward_hook(_Leaves(ranks))
    for group in column_groups(shared):
        where = _common_module(group, model)
        model.get_submodule(where).register_forward_pre_hook(_Enters(ranks, _Gather), with_kwargs=True)


def _is_below(name: str, model: nn.Module) -> bool:
    return any(name.startswith(f"{block}.") for block in find_blocks(model))


def _common_module(group: Sequence[str], model: nn.Module) -> str:
    """The operator, or the smallest module that has all of them: there their common input comes in."""
    if len(group) == 1:
        return group[0]
    first, *others = [name.split(".") for name in group]
    depth = next(n for n, part in enumerate(first) if any(other[n] != part for other in others))
    found = ".".join(first[:depth])
    if found in ("", *find_blocks(model)):
        raise UsageError(
            f"{', '.join(group)} share an input, but no module below {found or 'the model'} holds just these, so that"
            " tokens cannot be gathered for them; leave sequence parallelism out"
        )
    return found


@dataclass(frozen=True)
class _Enters:
    """Gathers, or scatters, the activation that a module is called with."""

    ranks: int
    exchange: type[_Gather] | type[_Scatter]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        changed = False

        def exchanged(given: Any) -> Any:
            nonlocal changed
            if changed or not isinstance(given, Tensor) or not given.is_floating_point():
                return given
            changed = True
            return self.exchange.apply(given, self.ranks)

        args = tuple(exchanged(each) for each in args)
        return args, {key: exchanged(value) for key, value in kwargs.items()}


@dataclass(frozen=True)
class _Leaves:
    """Scatters a module's output."""

    ranks: int

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return _Scatter.apply(output, self.ranks)


def _gathered(part: Tensor, ranks: int) -> Tensor:
    """As large as all ranks' parts, put in order by a copy."""
    return torch.cat([part] * ranks, TOKENS)


def _scattered(whole: Tensor, ranks: int) -> Tensor:
    """As large as one rank's part of a tensor whose tokens were put in the order of ranks by a copy."""
    if whole.shape[TOKENS] % ranks:
        raise UsageError(
            f"{whole.shape[TOKENS]} tokens do not divide over {ranks} tensor-parallel ranks; give a multiple, or leave"
            " sequence parallelism out"
        )
    ordered = torch.cat(whole.chunk(ranks, TOKENS))
    return torch.empty_like(ordered[: whole.shape[0]])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return _gathered(part, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _scattered(grad, ctx.ranks), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return _scattered(whole, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _gathered(grad, ctx.ranks), None
