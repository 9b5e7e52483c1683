"""The model of the demonstration: deep and narrow, so that what goes between ranks matters beside what they compute."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from osdp.model.gpt import GPT, GPTConfig

LENGTH = 64
GLOBAL_BATCH = 8
CONFIG = GPTConfig(vocab_size=256, positions=LENGTH, layers=(16,), widths=(256,))  # a byte is a token


def build() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A GPT of 16 layers of 256 that reads bytes."""
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    return GPT(CONFIG), (tokens, tokens.clone())
