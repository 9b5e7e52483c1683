"""The plan's optimizer, and the learning rate over a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from osdp._torch.optimizer import on_shards
from osdp.cost.training import StateFormat, optimizer_cost
from osdp.runtime.local import local_tensor
from osdp.training.adafactor import ShardedAdafactor
from osdp.training.small_states import SmallStateAdamW

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


class _Elementwise(torch.optim.Optimizer):
    """Steps every element by itself, so shards are stepped as they lie on each rank, all tensors of a group at once."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            on_device: dict[torch.device, list[nn.Parameter]] = {}  # some may be on the host
            for parameter in group["params"]:
                if parameter.grad is not None:
                    on_device.setdefault(parameter.device, []).append(parameter)
            for trained in on_device.values():
                gradients = [local_tensor(parameter.grad) for parameter in trained if parameter.grad is not None]
                self._update(trained, [local_tensor(parameter) for parameter in trained], gradients, group)
        return loss

    def _update(
        self, trained: list[nn.Parameter], parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]
    ) -> None:
        raise NotImplementedError

    def _states(self, trained: list[nn.Parameter], name: str) -> list[Tensor]:
        """One for each parameter, zeros at first."""
        for parameter in trained:
            if not self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter)
        return [local_tensor(self.state[parameter][name]) for parameter in trained]


class SGD(_Elementwise):
    """SGD with momentum and L2 decay as torch has it, but for a copy of all gradients that torch decays.

    Decay goes into the parameters, or with momentum into the buffer, and gradients stay as they are.
    """

    def __init__(self, params: Any, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def _update(
        self, trained: list[nn.Parameter], parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]
    ) -> None:
        rate, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
        if momentum:
            buffers = self._states(trained, "momentum_buffer")
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, gradients)
            if decay:
                torch._foreach_add_(buffers, parameters, alpha=decay)
            torch._foreach_add_(parameters, buffers, alpha=-rate)
            return
        if decay:
            torch._foreach_mul_(parameters, 1 - rate * decay)
        torch._foreach_add_(parameters, gradients, alpha=-rate)


class Lion(_Elementwise):
    """Lion (Chen et al., 2023): the sign of a mean of gradients is the step. One state, no roots."""

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _update(
        self, trained: list[nn.Parameter], parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]
    ) -> None:
        means = self._states(trained, "exp_avg")
        first, second = group["betas"]
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        steps = torch._foreach_lerp(means, gradients, 1 - first)
        torch._foreach_sign_(steps)
        torch._foreach_add_(parameters, steps, alpha=-group["lr"])
        torch._foreach_lerp_(means, gradients, 1 - second)


def _torchs(kind: Callable[..., torch.optim.Optimizer], **settings: Any) -> Callable[..., torch.optim.Optimizer]:
    """One of torch's own, which steps shards; see [Note: Steps on shards]."""

    def made(params: Any, *, lr: float) -> torch.optim.Optimizer:
        return on_shards(kind(params, lr=lr, **settings))

    return made


_MADE: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": _torchs(torch.optim.AdamW, betas=BETAS, foreach=True),
    "adamw-fused": _torchs(torch.optim.AdamW, betas=BETAS, fused=True),
    "sgd": partial(SGD, weight_decay=DECAY),
    "sgd-momentum": partial(SGD, momentum=MOMENTUM, weight_decay=DECAY),
    "lion": partial(Lion, weight_decay=DECAY),
    "adagrad": _torchs(torch.optim.Adagrad, weight_decay=DECAY, foreach=True),
    "adam": _torchs(torch.optim.Adam, betas=BETAS, weight_decay=DECAY, foreach=True),
    "nadam": _torchs(torch.optim.NAdam, weight_decay=DECAY, decoupled_weight_decay=True, foreach=True),
    "radam": _torchs(torch.optim.RAdam, weight_decay=DECAY, decoupled_weight_decay=True, foreach=True),
    "adamax": _torchs(torch.optim.Adamax, weight_decay=DECAY, foreach=True),
    "adadelta": _torchs(torch.optim.Adadelta, weight_decay=DECAY, foreach=True),
    "rmsprop": _torchs(torch.optim.RMSprop, weight_decay=DECAY, foreach=True),
    "adamw-bf16": partial(SmallStateAdamW, betas=BETAS, states=StateFormat.BF16),
    "adamw-8bit": partial(SmallStateAdamW, betas=BETAS, states=StateFormat.BLOCKS),
    "adafactor": partial(ShardedAdafactor, weight_decay=DECAY),
}
