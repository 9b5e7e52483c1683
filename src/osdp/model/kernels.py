"""Kinds of kernels: what bounds a kernel, and so which rate it runs at. No torch in here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")


class KernelKind(IntEnum):
    """A kernel that moves bytes, one that multiplies matrices, or one that does all of attention at once.

    A causal attention kernel skips the blocks above the diagonal: it does half of the products that its shapes allow.
    """

    MEMORY = 0
    MATMUL = 1
    ATTENTION = 2
    CAUSAL_ATTENTION = 3


def kernel_kind(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], flops: int) -> KernelKind:
    """The kind of a dispatched operator with so many FLOPs."""
    if not flops:
        return KernelKind.MEMORY
    if not func._schema.name.removeprefix("aten::").startswith(_ATTENTION):
        return KernelKind.MATMUL
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal":
            given = args[place] if place < len(args) else kwargs.get("is_causal", argument.default_value)
            return KernelKind.CAUSAL_ATTENTION if given else KernelKind.ATTENTION
    return KernelKind.ATTENTION
