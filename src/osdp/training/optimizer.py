"""The plan's optimizer, and the learning rate over a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

BETAS = (0.9, 0.95)
MOMENTUM = 0.9


@dataclass(frozen=True)
class Schedule:
    """Warm-up from 0 to `lr` in a straight line, then half a cosine down to `lr * floor` at `decay_steps`."""

    lr: float
    warmup_steps: int
    decay_steps: int
    floor: float = 0.1

    def at(self, step: int) -> float:
        """For the step of that number, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        way = min(1.0, (step - self.warmup_steps) / max(1, self.decay_steps - self.warmup_steps))
        return self.lr * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * way)) / 2)


def make_optimizer(model: nn.Module, name: str, *, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Only matrices decay: norms and biases have no reason to be small."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((matrices, weight_decay), (vectors, 0.0))
        if params
    ]
    return optimizer_of(name, groups, lr=lr)


def optimizer_of(name: str, parameters: Iterable[Any], *, lr: float) -> torch.optim.Optimizer:
    """The optimizer that a plan names, over parameters or groups of them."""
    if name.startswith("adamw"):
        way = {"fused": True} if name == "adamw-fused" else {"foreach": True}
        return torch.optim.AdamW(parameters, lr=lr, betas=BETAS, **way)
    return torch.optim.SGD(parameters, lr=lr, momentum=MOMENTUM if name == "sgd-momentum" else 0.0, foreach=True)
