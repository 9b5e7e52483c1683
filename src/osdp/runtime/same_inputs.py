"""Keeps inputs that are one tensor one tensor.

[Note: Same inputs]
FSDP2 passes every input of a unit through an autograd function of its own, so that a tensor given three times arrives
as three. nn.MultiheadAttention asks whether query, key and value are one tensor: it computes one product instead of
three then, and saves less. A recomputed forward, where FSDP2 leaves inputs alone, would not repeat the first one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class _SameAs:
    """Stands for a tensor that another argument already is."""

    def __init__(self, key: int | str) -> None:
        self.key = key


def one_tensor_stays_one(module: nn.Module) -> None:
    """Call it after `fully_shard`, whose hook then runs later and sees every tensor once; see [Note: Same inputs]."""
    module.register_forward_pre_hook(_once, prepend=True, with_kwargs=True)
    module.forward = functools.partial(_resolved, module.forward)  # type: ignore[method-assign]


def _once(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    first: dict[int, int | str] = {}

    def stand_in(key: int | str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        found = first.setdefault(id(value), key)
        return value if found == key else _SameAs(found)

    seen = tuple(stand_in(place, value) for place, value in enumerate(args))
    return seen, {key: stand_in(key, value) for key, value in kwargs.items()}


def _resolved(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def own(value: Any) -> Any:
        if not isinstance(value, _SameAs):
            return value
        return args[value.key] if isinstance(value.key, int) else kwargs[value.key]

    return forward(*map(own, args), **{key: own(value) for key, value in kwargs.items()})
