"""A language model of two layers that `osdp train` builds in its tests, and others that it cannot train."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from osdp.model.gpt import GPT, GPTConfig

SEQ_LEN = 32


def _tokens() -> torch.Tensor:
    return torch.zeros(2, SEQ_LEN, dtype=torch.long)


def build() -> tuple[nn.Module, tuple[Any, ...]]:
    """Two layers of 32, for bytes."""
    return GPT(GPTConfig(256, SEQ_LEN, (2,), (32,), head_width=16)), (_tokens(), _tokens())


def wider() -> tuple[nn.Module, tuple[Any, ...]]:
    """Two layers of 48: another model."""
    return GPT(GPTConfig(256, SEQ_LEN, (2,), (48,), head_width=16)), (_tokens(), _tokens())


def few_tokens() -> tuple[nn.Module, tuple[Any, ...]]:
    """Knows 64 tokens."""
    return GPT(GPTConfig(64, SEQ_LEN, (2,), (32,), head_width=16)), (_tokens(), _tokens())


def huge() -> tuple[nn.Module, tuple[Any, ...]]:
    """Two billion parameters, more than the test's limit."""
    return GPT(GPTConfig(256, SEQ_LEN, (10,), (4096,))), (_tokens(), _tokens())


def numbers() -> tuple[nn.Module, tuple[Any, ...], Any]:
    """Takes no tokens."""
    return nn.Linear(8, 8), (torch.zeros(2, 8),), torch.sum
