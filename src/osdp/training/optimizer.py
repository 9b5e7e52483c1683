"""The plan's optimizer, and the learning rate over a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from osdp.cost.training import optimizer_cost
from osdp.runtime.local import local_tensor

BETAS = (0.9, 0.95)
MOMENTUM = 0.9
DECAY = 0.1  # where parameters come without groups that state their own


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
    return _MADE[optimizer_cost(name).name](parameters, lr=lr)


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., 2023): the sign of a mean of gradients is the step. One state, no roots.

    Every element is stepped by itself, so shards are stepped as they lie on each rank.
    """

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if trained:
                self._step(trained, group)
        return loss

    def _step(self, trained: list[nn.Parameter], group: dict[str, Any]) -> None:
        for parameter in trained:
            if not self.state[parameter]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
        parameters = [local_tensor(parameter) for parameter in trained]
        gradients = [local_tensor(parameter.grad) for parameter in trained if parameter.grad is not None]
        means = [local_tensor(self.state[parameter]["exp_avg"]) for parameter in trained]
        first, second = group["betas"]
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        steps = torch._foreach_lerp(means, gradients, 1 - first)
        torch._foreach_sign_(steps)
        torch._foreach_add_(parameters, steps, alpha=-group["lr"])
        torch._foreach_lerp_(means, gradients, 1 - second)


_MADE: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, betas=BETAS, foreach=True),
    "adamw-fused": partial(torch.optim.AdamW, betas=BETAS, fused=True),
    "sgd": partial(torch.optim.SGD, foreach=True),
    "sgd-momentum": partial(torch.optim.SGD, momentum=MOMENTUM, foreach=True),
    "lion": partial(Lion, weight_decay=DECAY),
    "adagrad": partial(torch.optim.Adagrad, weight_decay=DECAY, foreach=True),
}
