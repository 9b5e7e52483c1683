"""What tests of split operators share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def conv1d(inputs: int, outputs: int) -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return Conv1D(outputs, inputs)


def same_state(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Equal names in equal order, equal shapes, dtypes and bits."""
    if list(left) != list(right):
        return False
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(left.values(), right.values(), strict=True))
