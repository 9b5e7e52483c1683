"""ColumnsOfStages of kernels: what bounds a kernel, and so which rate it runs at. No torch in here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

# [Note: Workspaces]
# In 16 bits a CPU's matrix products are oneDNN's, which allocates working space through torch: panels of 64 columns of
# the second matrix, an accumulator in 32 bits, and the first matrix once more where it is transposed, as in every
# weight's gradient. Measured with torch 2.13 on AVX-512, on one thread, for ten products from (32, 32, 32) to (2048,
# 1024, 4096): never above what `product_workspace` says, nor above WORKSPACE_BYTES. torch's fused attention on CPUs has
# blocks of scores in 32 bits and, in 16 bits, once more in these and packed keys; backward has a copy of the gradient.
# Each thread has its own of all but that copy.
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


def attention_workspace(func: Any, args: Sequence[Any]) -> int:
    """Bytes of working space that fused attention may take on a CPU; 0 for other kernels. See [Note: Workspaces]."""
    name = func._schema.name.removeprefix("aten::")
    if not name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
        return 0
    backward = name.endswith("backward")
    query, key = args[1:3] if backward else args[:2]
    length, width = query.shape[-2:]
    rows = min(length, 256 if length >= 768 else 64 if length >= 192 else 32)
    columns = min(key.shape[-2], 512)
    narrow = query.itemsize == 2
    if not backward:
        return 4 * rows * (columns + 2 + width) + (2 * rows * columns if narrow else 0)
    packed = max(16, width) * (8 * -(-columns // 32) * 32 + 330)
    blocks = 4 * rows * (2 * columns + 1) + (4 * rows * columns + packed if narrow else 0)
    return query.numel() * query.itemsize + blocks


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
