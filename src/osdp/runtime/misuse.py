"""What is easily done wrong around `parallelize` and would go wrong without a word.

[Note: Misuse]
- A model that is wrapped already (compiled, DDP, sharded, parallelized) has other modules than were planned: refused.
- An optimizer that was made before `parallelize` holds the parameters of before, which no backward reaches any more: it
  would step and change nothing. Its first step is refused.
- A batch that is larger or longer than the planned one needs more memory than was predicted: a warning says how much.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from osdp.cluster.sizes import format_bytes
from osdp.cost.positions import SAVED, TEMPORARIES
from osdp.errors import UsageError
from osdp.model.fake import refuse_own_checkpointing
from osdp.model.inputs import tensors_in
from osdp.planfile import Plan

_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameters of before, by identity
_is_watching = False


def refuse_wrapped(model: nn.Module) -> None:
    """Refuses a model whose modules are not those that were planned."""
    kind = type(model).__name__
    if hasattr(model, "_orig_mod"):
        raise UsageError(
            f"this {kind} is a compiled model: call osdp.parallelize on the model itself, then torch.compile the result"
        )
    if isinstance(model, DistributedDataParallel):
        raise UsageError(f"this {kind} reduces gradients itself: call osdp.parallelize on its .module instead")
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            where = f"its module {name!r}" if name else "it"
            raise UsageError(
                f"this {kind} is parallelized already: {where} is sharded; build a new model to apply a plan to, and"
                " call neither osdp.parallelize nor fully_shard twice"
            )
    refuse_own_checkpointing(model)


def refuse_steps_of(before: Iterable[nn.Parameter], after: Iterable[nn.Parameter]) -> None:
    """Has an optimizer's step refused that holds a parameter of `before` that is not in `after`."""
    global _is_watching
    now = {id(parameter) for parameter in after}
    for parameter in before:
        if id(parameter) not in now:
            _replaced[parameter] = True
    if not _is_watching:
        register_optimizer_step_pre_hook(_refuse_replaced)
        _is_watching = True


def _refuse_replaced(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    count = sum(parameter in _replaced for parameter in held)
    if count:
        raise UsageError(
            f"this {type(optimizer).__name__} was made before osdp.parallelize: {count} of its {len(held)} parameters"
            " are no longer the model's, and its step would change nothing; make it after osdp.parallelize"
        )


class BatchWatch:
    """Warns, once, of a training batch that needs more memory than was planned."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._planned = plan.batch_size * plan.model.sample_elements
        self._has_warned = not self._planned or not plan.predicted.peak_bytes  # nothing is known to compare with

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._has_warned or not torch.is_grad_enabled():
            return
        largest = max(tensors_in((args, kwargs)), key=Tensor.numel, default=None)
        if largest is None or largest.numel() <= self._planned:
            return
        self._has_warned = True
        warnings.warn(self._sentence(largest), stacklevel=2)

    def peak_bytes(self, growth: float) -> int:
        """The predicted peak of a batch that is `growth` times the planned one: activations grow with it."""
        parts = self._plan.predicted.memory_parts
        activations = sum(parts.get(part, 0) for part in (SAVED, TEMPORARIES))
        return self._plan.predicted.peak_bytes + int(activations * (growth - 1))

    def _sentence(self, largest: Tensor) -> str:
        plan, growth = self._plan, largest.numel() / self._planned
        peak, limit = self.peak_bytes(growth), plan.predicted.limit_bytes
        verdict = "above" if peak > limit else "within"
        return (
            f"a batch of shape {tuple(largest.shape)} came, {growth:.3g} times the {plan.batch_size} samples of"
            f" {plan.model.sample_elements:,} elements that were planned: its predicted peak is about"
            f" {format_bytes(peak)}, {verdict} the limit of {format_bytes(limit)}; plan with inputs as large as the"
            " largest that come"
        )
