"""What every way to train has in common: what it is asked for, its first weights, its optimizer, its recompute."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from .models import Model, Shape, values

LR, BETAS = 1e-3, (0.9, 0.95)
NONE, SELECTIVE, HALF, FULL = "none", "all but products", "every second block", "every block"
RECOMPUTES = (NONE, SELECTIVE, HALF, FULL)
# What selective checkpointing saves, as torchtitan's does: products and attention.
_SAVED = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)


class NotHere(Exception):
    """A way to train that does not exist for this model on these ranks; the message says why."""


@dataclass(frozen=True)
class Job:
    """One way's settings: `batch` is a data-parallel rank's samples, or those of a pipeline's micro-batch."""

    shape: Shape
    hosts: int
    ranks_per_host: int
    batch: int
    recompute: str = NONE
    switches: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host


class Trainer(Protocol):
    """A model that takes steps; this rank gets part `part` of `parts` of a step's samples."""

    part: int
    parts: int
    samples: int  # of this part

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """A whole step; gives the loss of this part where this rank knows it."""
        ...


@dataclass
class Replica:
    """A model whose ranks all run it whole, or a shard of every product, on a part of the samples each."""

    model: Callable[[Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    part: int
    parts: int
    samples: int

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.model(inputs, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def whole(job: Job) -> Model:
    """The model with its first weights, on this rank alone."""
    model = on_meta(job).to_empty(device="cpu")
    fill(model)
    return model


def on_meta(job: Job) -> Model:
    """The model without memory, its blocks recomputed as asked."""
    with torch.device("meta"):
        model = Model(job.shape)
    recomputed(model.blocks, job.recompute)
    return model


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """First weights, of every shard what belongs to it; a parameter at a time is whole."""
    for place, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            norm = isinstance(module, nn.LayerNorm | nn.RMSNorm)
            full = values(f"{place}.{key}", parameter.shape, norm=norm)
            if isinstance(parameter, DTensor):
                parameter.copy_(
                    distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
                )
            else:
                parameter.copy_(full)


def recomputed(blocks: Iterable[nn.Module], how: str) -> None:
    """Activation checkpointing of every block, of every second one, of all but the products, or of none."""
    if how == NONE:
        return
    real = [block for block in blocks if not isinstance(block, nn.Linear)]
    contexts = functools.partial(create_selective_checkpoint_contexts, list(_SAVED))
    selective = {"context_fn": contexts} if how == SELECTIVE else {}
    for block in real[:: 2 if how == HALF else 1]:
        block.forward = functools.partial(  # type: ignore[method-assign]
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **selective
        )


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Fused AdamW, one group for each mesh: one kernel cannot take tensors of several."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            key = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault(key, []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=LR, betas=BETAS, fused=True)
