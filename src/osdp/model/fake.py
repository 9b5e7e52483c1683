"""Models over fake tensors: every shape and dtype is there, and no memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def fake_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The same modules over new tensors, fake under a fake mode; floating parameters get the dtype. Ties stay."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        kind = dtype if parameter.is_floating_point() else parameter.dtype
        fake = torch.empty(parameter.shape, dtype=kind, device="cpu")
        memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
    return copy.deepcopy(model, memo)
