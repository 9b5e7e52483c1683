"""The kernels of the device that is planned for, traced on fake tensors of this machine.

[Note: Device kernels]
Torch chooses some kernels by the device, and fake tensors are of the CPU. There attention with dropout is not fused and
saves the scores, dropout saves its mask in the activations' dtype, and a root-mean-square norm is a row of kernels. An
accelerator's kernels have fake implementations too, with a backward, that run on any fake tensor: while a trace runs,
these three functions of `torch.nn.functional` are the accelerator's. They are replaced in the modules that define the
model's classes as well, which may have imported them by name. Attention chooses as torch does on CUDA: flash attention
without a mask and in 16 bits, else memory-efficient attention, else products and a softmax.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from osdp.cluster.device import Device

_aten = torch.ops.aten
_FLASH_WIDTH = 256  # the widest head that flash attention takes
_FLASH_MULTIPLE = 8  # of elements; narrower heads are padded
_ALIGNED_BYTES = 16  # of a head, for memory-efficient attention
_BIAS_MULTIPLE = 16  # of keys, for its mask


@contextmanager
def kernels_of(device: Device | None, model: nn.Module, *, compiled: bool = False) -> Iterator[None]:
    """Within it, a model over fake tensors runs the device's kernels; see [Note: Device kernels].

    With `compiled` those of attention alone: torch.compile makes dropout and norms out of smaller operators.
    """
    if device is None or device.is_cpu:
        yield
        return
    ours: dict[Callable[..., Any], Callable[..., Any]] = {F.scaled_dot_product_attention: _attention_on(device)}
    if not compiled:
        ours |= {F.dropout: _dropout, F.rms_norm: _rms_norm}
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    for space in _namespaces(model):
        for name, value in list(space.items()):
            if callable(value) and _hashable(value) and value in ours:
                replaced.append((space, name, value))
                space[name] = ours[value]
    try:
        yield
    finally:
        for space, name, value in replaced:
            space[name] = value


def _namespaces(model: nn.Module) -> list[dict[str, Any]]:
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}  # FSDP2 makes classes of its own
    names = {F.__name__, *(kind.__module__ for kind in kinds)}
    return [vars(sys.modules[name]) for name in names if name in sys.modules]


def _hashable(value: Any) -> bool:
    return getattr(value, "__hash__", None) is not None


def _attention_on(device: Device) -> Callable[..., Tensor]:
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        tensors = query, key, value
        if _takes_flash(device, tensors, attn_mask, enable_gqa):
            return _flash(*tensors, dropout_p, is_causal, scale)
        if _takes_efficient(device, tensors):
            return _efficient(*tensors, attn_mask, dropout_p, is_causal, scale)
        out, _ = _aten._scaled_dot_product_attention_math(
            *tensors, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return out

    return attention


def _takes_flash(device: Device, tensors: Sequence[Tensor], mask: Tensor | None, grouped: bool) -> bool:
    query = tensors[0]
    alike = all(each.dim() == 4 and each.shape[0] == query.shape[0] for each in tensors)
    widths = {each.shape[-1] for each in tensors}
    if not device.flash_attention or mask is not None or not alike or len(widths) > 1:
        return False
    heads = len({each.shape[1] for each in tensors}) == 1 or grouped
    return heads and query.dtype in (torch.float16, torch.bfloat16) and widths.pop() <= _FLASH_WIDTH


def _takes_efficient(device: Device, tensors: Sequence[Tensor]) -> bool:
    query = tensors[0]
    alike = all(each.dim() == 4 and each.shape[:2] == query.shape[:2] for each in tensors)
    aligned = all(each.shape[-1] * each.element_size() % _ALIGNED_BYTES == 0 for each in tensors)
    # devices without flash attention have no 16-bit products with the exponent of fp32 either
    return alike and aligned and (device.flash_attention or query.dtype != torch.bfloat16)


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float | None) -> Tensor:
    width = query.shape[-1]
    scale = width**-0.5 if scale is None else scale
    missing = -width % _FLASH_MULTIPLE
    if missing:
        query, key, value = (F.pad(each, (0, missing)) for each in (query, key, value))
    out = _aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, scale=scale)[0]
    return out[..., :width] if missing else out


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> Tensor:
    bias = None if mask is None else _bias(mask, query, key)
    needs_gradients = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needs_gradients, dropout, causal, scale=scale
    )[0]


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """What the kernel adds to the scores: in the queries' dtype, padded to aligned rows, for every head."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
    keys = key.shape[-2]
    missing = -keys % _BIAS_MULTIPLE if mask.shape[-1] == keys else 0
    if missing:
        mask = F.pad(mask, (0, missing))[..., :keys]
    return mask.expand(*query.shape[:2], query.shape[-2], keys)


_stock_dropout, _stock_rms_norm = F.dropout, F.rms_norm


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or inplace or not 0 < p < 1:
        return _stock_dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


class _FusedNorm(torch.autograd.Function):
    """Allocates, reads and writes what the fused norm does; torch's own is a row of kernels on fake tensors of the CPU.

    It saves its input and, in fp32, a number for every row.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        scales = input.new_empty(input.shape[: input.dim() - dims], dtype=torch.float32)
        ctx.save_for_backward(input, weight, scales)
        return input.clone() if weight is None else torch.mul(input, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        input, weight, _ = ctx.saved_tensors
        return torch.mul(grads[0], input), None if weight is None else torch.empty_like(weight), None


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if weight is not None and weight.dtype != input.dtype:
        return _stock_rms_norm(input, list(normalized_shape), weight, eps)
    return _FusedNorm.apply(input, weight, len(normalized_shape))
