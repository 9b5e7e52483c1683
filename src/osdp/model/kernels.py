"""Kinds of kernels: what bounds a kernel, and so which rate it runs at. No torch in here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

# [Note: Workspaces]
# In 16 bits a CPU's matrix products are oneDNN's, which allocates working space through torch: panels of 64 columns of
# the second matrix, an accumulator in 32 bits, and the first matrix once more where it is transposed, as in every
# weight's gradient. The depth is rounded up to 64. Measured with torch 2.13 on AVX-512, on one thread, for 3,100
# random products of up to (1500, 1500, 1500): never above what `product_workspace` says where the first matrix is not
# transposed or the depth is below DEEP. From there on panels can be as wide as the second matrix, and WORKSPACE_BYTES
# is the bound; the most that was seen is 1,352,320, by products of up to (2048, 1024, 4096). torch's attention has
# blocks of scores in 32 bits and, in 16 bits, once more in these and packed keys; backward has a copy of the gradient.
# Each thread has its own of all but that copy.
WORKSPACE_BYTES = 1_500_000
SCALAR_BYTES = 256  # more than the loss, its gradient and numbers that are moved into tensors were ever seen to take
DEEP = 512
_PANEL = 64
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")


class KernelKind(IntEnum):
    """A kernel that moves bytes, one that multiplies matrices, or one that does all of attention at once.

    A collective that the compute stream waits for is given as the bytes that a kernel would move in its time.

    A causal attention kernel skips the blocks above the diagonal: it does half of the products that its shapes allow.
    """

    MEMORY = 0
    MATMUL = 1
    ATTENTION = 2
    CAUSAL_ATTENTION = 3
    COLLECTIVE = 4


def product_workspace(func: Any, args: Sequence[Any]) -> int:
    """Bytes of working space that a matrix product in 16 bits may take on a processor; 0 for other kernels.

    Without its bound and for a shallow product, so that it grows in a straight line with the batch; see [Note:
    Workspaces].
    """
    first = _first_matrix(func, args)
    if first is None:
        return 0
    rows, depth = first.shape[-2:]
    if first.stride(-1) == 1 and rows > 1:  # of one row nobody can tell whether it is transposed
        return 1152 + 2 * _PANEL * -(-depth // _PANEL) * _PANEL + 4 * _PANEL * rows
    depth += _PANEL - 1  # of a weight's gradient it is the batch: rounded up, it would not grow in a straight line
    return 1152 + 2 * (_PANEL + rows) * depth + 4 * _PANEL * rows


def transposed_depth(func: Any, args: Sequence[Any]) -> int:
    """The depth of a product in 16 bits whose first matrix is transposed, 0 for other kernels: see DEEP."""
    first = _first_matrix(func, args)
    return 0 if first is None or first.stride(-1) == 1 else first.shape[-1]


def _first_matrix(func: Any, args: Sequence[Any]) -> Any | None:
    """Of a matrix product in 16 bits."""
    name = func._schema.name.removeprefix("aten::")
    if name not in _PRODUCTS:
        return None
    first = args[1] if name in ("addmm", "baddbmm") else args[0]
    return first if first.itemsize == 2 else None


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
