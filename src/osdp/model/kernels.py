"""Kinds of kernels: what bounds a kernel, and so which rate it runs at. No torch in here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

# [Note: Workspaces]
# In 16 bits a processor's matrix products are oneDNN's, which allocates working space through torch: panels of 64
# columns of the second matrix, an accumulator in 32 bits, and the first matrix once more where it is transposed, as in
# every weight's gradient. Measured with torch 2.13 on a processor with AVX-512, on one thread, for products of (m, k) and
# (k, n): never above what `product_workspace` says, and never above WORKSPACE_BYTES. Each thread has its own.
WORKSPACE_BYTES = 1_500_000
_PANEL = 64
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")


class KernelKind(IntEnum):
    """A kernel that moves bytes, one that multiplies matrices, or one that does all of attention at once.

    A causal attention kernel skips the blocks above the diagonal: it does half of the products that its shapes allow.
    """

    MEMORY = 0
    MATMUL = 1
    ATTENTION = 2
    CAUSAL_ATTENTION = 3


def product_workspace(func: Any, args: Sequence[Any]) -> int:
    """Bytes of working space that a matrix product in 16 bits may take on a processor; 0 for other kernels.

    Without its bound, so that it grows in a straight line with the batch; see [Note: Workspaces].
    """
    name = func._schema.name.removeprefix("aten::")
    if name not in _PRODUCTS:
        return 0
    first = args[1] if name in ("addmm", "baddbmm") else args[0]
    if first.itemsize != 2:
        return 0
    rows, depth = first.shape[-2:]
    transposed = 2 * rows * depth if first.stride(-1) != 1 else 0
    return 1152 + 2 * _PANEL * depth + 4 * _PANEL * rows + transposed


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
