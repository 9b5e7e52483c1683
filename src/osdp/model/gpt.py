"""A small decoder-only GPT in plain torch: the model of the presets, the examples and the tests.

The blocks are pre-norm, as in GPT-2. A model has one or several stages of constant width; where the width
changes, a linear projection stands between the stages, so that one module list holds the whole depth.

Parameters of L blocks of width d with a tied head: 12·L·d² + 13·L·d + (vocabulary + positions + 2)·d.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from osdp.errors import UsageError
from osdp.losses import ChunkedHead


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT: stage i has `layers[i]` blocks of width `widths[i]`."""

    vocab_size: int
    positions: int
    layers: tuple[int, ...]
    widths: tuple[int, ...]
    head_width: int = 64
    tied: bool = True

    def __post_init__(self) -> None:
        if not self.layers or len(self.layers) != len(self.widths):
            raise UsageError(f"layers {self.layers} and widths {self.widths} must be equally long, at least 1")
        bad = [width for width in self.widths if width % self.head_width]
        if bad:
            raise UsageError(f"widths {bad} are not multiples of head_width {self.head_width}")
        if self.tied and self.widths[0] != self.widths[-1]:
            raise UsageError(f"widths {self.widths} differ at the ends and the head is tied; set tied=False")


class Block(nn.Module):
    """Attention and a four times wider feed-forward layer, each normalised before and added to its input."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, -1, self.head_width))
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """`forward(tokens)` gives logits; `forward(tokens, targets)` gives the mean cross entropy.

    Targets are the tokens that follow: the caller shifts, the model does not.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        first, last = config.widths[0], config.widths[-1]
        self.tokens = nn.Embedding(config.vocab_size, first)
        self.positions = nn.Embedding(config.positions, first)
        self.blocks = nn.ModuleList(self._depth(config))
        self.norm = nn.LayerNorm(last)
        self.head = nn.Linear(last, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight
        self.apply(self._init_weights)

    @staticmethod
    def _depth(config: GPTConfig) -> list[nn.Module]:
        modules: list[nn.Module] = []
        before = config.widths[0]
        for count, width in zip(config.layers, config.widths, strict=True):
            if width != before:
                modules.append(nn.Linear(before, width))
            modules.extend(Block(width, config.head_width) for _ in range(count))
            before = width
        return modules

    def _init_weights(self, module: nn.Module) -> None:
        # Residual branches start smaller with depth, as in GPT-2, so that their sum keeps its variance.
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            ends_branch = any(module in (block.proj, block.fc2) for block in self.blocks if isinstance(block, Block))
            nn.init.normal_(module.weight, std=0.02 / (2 * sum(self.config.layers)) ** 0.5 if ends_branch else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        if targets is not None and isinstance(self.head, ChunkedHead):
            return self.head(self.norm(x), targets)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
