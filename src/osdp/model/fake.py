"""Models over fake tensors: every shape and dtype is there, and no memory.

[Note: Packed]
Without an attention mask transformers looks into the position ids whether sequences are packed. Fake ones cannot tell,
and it prepares for the worst: a mask of length times length, cast and saved by every layer, and keys and values
repeated for every head. Where a model numbers the positions itself, none are packed.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FINDS_PACKED = "find_packed_sequence_indices"


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


@contextmanager
def sequences_not_packed(kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Lets a Hugging Face model compute as it does with data, if `kwargs` has no position ids; see [Note: Packed]."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    if "position_ids" in kwargs or not hasattr(masking, _FINDS_PACKED):
        yield
        return
    found = getattr(masking, _FINDS_PACKED)
    setattr(masking, _FINDS_PACKED, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(masking, _FINDS_PACKED, found)
