"""The small models that are run: one whose weights are compared, and one whose memory is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from osdp.model.gpt import GPT, GPTConfig
from osdp.model.source import ModelSource
from osdp.training.world import World

_SMALL = GPTConfig(vocab_size=192, positions=32, layers=(2,), widths=(64,), head_width=16, tied=False)
_ON_CPUS = GPTConfig(vocab_size=512, positions=64, layers=(4,), widths=(128,), tied=False)
_ON_ACCELERATORS = GPTConfig(vocab_size=32000, positions=1024, layers=(8,), widths=(1024,), tied=False)


@dataclass(frozen=True)
class Subject:
    source: ModelSource
    config: GPTConfig
    samples: int  # of a rank

    def batch(self, world: World, step: int) -> tuple[Tensor, Tensor]:
        """The whole batch of a step, the same on every rank: tokens, and those that follow."""
        shape = (self.samples * world.size, self.config.positions + 1)
        draws = torch.Generator().manual_seed(step)
        windows = torch.randint(self.config.vocab_size, shape, generator=draws).to(world.device)
        return windows[:, :-1], windows[:, 1:]


def small() -> Subject:
    return _subject(_SMALL, 4)


def sizeable(world: World) -> Subject:
    """Large enough that its tensors are most of the memory."""
    return _subject(_ON_CPUS if world.device.type == "cpu" else _ON_ACCELERATORS, 4)


def _subject(config: GPTConfig, samples: int) -> Subject:
    def inputs(batch: int) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
        tokens = torch.empty(batch, config.positions, dtype=torch.long, device="meta")
        return (tokens, tokens), {}

    source = ModelSource(
        name=f"gpt-{config.layers[0]}x{config.widths[0]}",
        build=lambda: GPT(config),
        inputs=inputs,
        loss=lambda loss: loss,
        seq_len=config.positions,
        sample_tokens=config.positions,
        published_parameters=None,
        description="of osdp doctor",
    )
    return Subject(source, config, samples)
