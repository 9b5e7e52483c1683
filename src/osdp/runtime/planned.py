"""What frameworks ask of a model that runs a plan: whether it does, whose optimizer is its own, its whole state."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from osdp.errors import UsageError
from osdp.runtime.apply import applied_to
from osdp.runtime.split import held_parameters
from osdp.runtime.weights_out import gathered


def runs_a_plan(model: object) -> bool:
    if not isinstance(model, nn.Module):
        return False
    try:
        applied_to(model)
    except UsageError:
        return False
    return True


def own_optimizer(model: nn.Module, optimizers: Iterable[Optimizer]) -> Optimizer | None:
    """The optimizer that has the model's parameters, without what a framework put around it."""
    own = set(model.parameters())
    for optimizer in optimizers:
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer  # type: ignore[union-attr]
        if any(parameter in own for group in optimizer.param_groups for parameter in group["params"]):
            return optimizer
    return None


@torch.no_grad()
def whole_state_dict(model: nn.Module, *, on_this_rank: bool) -> dict[str, Tensor]:
    """The plain model's state dict on the CPU of the ranks that want it; a collective that all ranks join."""
    found = {}
    for name, held in held_parameters(model).items():
        whole = gathered(*held)
        if on_this_rank:
            found[name] = whole
    if on_this_rank:
        plain = {
            name: buffer.cpu() for name, buffer in model.state_dict().items() if name in dict(model.named_buffers())
        }
        found |= plain
    return found
