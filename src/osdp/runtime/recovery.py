"""Steps that end early: by `break`, by an exception in a micro-batch, or by a backward that fails.

[Note: Steps that end early]
Units that the plan reduces once keep their gradients unsharded until the last micro-batch. Where the loop is left
before that, they are reduced as it is left: `.grad` then is what the micro-batches that ran have given, as in a single
process. A forward that fails leaves no gradients, so only FSDP2's state is cleared. A backward that fails leaves
gradients of a part of the model, on top of those of micro-batches before: the step is lost. Its unreduced gradients are
dropped, and `.grad` must be cleared by `optimizer.zero_grad()`; until then the next forward and the optimizer's step
are refused. All of that is done where all ranks failed alike; see osdp.runtime.alike. A `zero_grad()` before the last
micro-batch also clears what is not reduced yet, which no parameter's `.grad` has.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from osdp._torch.fsdp import (
    FSDPModule,
    FSDPParamGroup,
    backward_broke,
    clear_unreduced,
    drop_gradients,
    forward_broke,
    gathered_copies,
    has_unreduced,
    reduce_unreduced,
)
from osdp.errors import UsageError
from osdp.runtime.alike import FailedAlike
from osdp.runtime.async_comm import Reductions
from osdp.runtime.place import LEFT, Place
from osdp.runtime.unused import UnusedGradients


class Recovery:
    """Keeps a model's gradients whole or refused; see [Note: Steps that end early]."""

    def __init__(
        self,
        model: FSDPModule,
        groups: Sequence[FSDPParamGroup],
        reductions: Reductions | None,
        unused: UnusedGradients,
        ranks: Sequence[int],
        gathered_once: Sequence[FSDPParamGroup],
        place: Place,
    ) -> None:
        self._gathered_once, self.place = gathered_once, place
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # that are known to have parameters of it
        self._model, self._groups, self._reductions, self._unused = model, groups, reductions, unused
        self._alike, self._passes = FailedAlike(ranks), 0
        self._is_lost = False  # a backward failed, and its gradients may still be there
        assert isinstance(model, nn.Module)
        model.register_forward_hook(self._alike.heard, always_call=True)
        _watch_optimizers()
        _all.add(self)

    def before_forward(self, *unused: object) -> None:
        """Clears away what a pass that failed, and was caught, has left behind."""
        self.place.refuse()
        self._clear()
        if torch.is_grad_enabled():
            self._refuse_lost()
        self._passes += 1

    def before_step(self, optimizer: Optimizer) -> None:
        """Refuses to step with gradients that are not whole, and frees gathered copies, which the step makes stale.

        A forward without a backward leaves such copies: the next forward would compute with them.
        """
        if not self._owns(optimizer):
            return
        self.place.refuse()
        gathered = [group for group in self._groups if not group.is_sharded]
        unreduced = [group for group in self._groups if has_unreduced(group)]
        self._clear()
        self._refuse_lost()
        for group in gathered:
            group.reshard()
        if any(has_unreduced(group) for group in self._groups):
            raise UsageError(
                f"optimizer.step() came before the end of osdp.accumulate, when {len(unreduced)} units are not reduced"
                " yet; step after the loop, and, if the iterator has a name, call its close() where it is left early"
            )
        self.place.steps += 1

    def zeroed(self, parameters: Iterable[nn.Parameter], *, set_to_none: bool) -> None:
        """Clears what backwards have left unreduced of parameters whose `.grad` was cleared.

        While a unit is gathered, its modules have the gathered copies: the gradients of their shards are cleared too.
        """
        groups = [group for group in self._groups if has_unreduced(group) or not group.is_sharded]
        if not groups:
            return
        cleared = set(parameters)
        for shard in [shard for copy, shard in self.gathered_now().items() if copy in cleared]:
            cleared.add(shard)
            if set_to_none:
                shard.grad = None
            elif shard.grad is not None:
                shard.grad.zero_()
        for group in groups:
            if has_unreduced(group):
                clear_unreduced(group, cleared)

    def gathered_now(self) -> dict[nn.Parameter, nn.Parameter]:
        """By gathered copy that modules have now, its shard."""
        return gathered_copies(group for group in self._groups if not group.is_sharded)

    def unreduced(self) -> set[nn.Parameter]:
        """The parameters of units that a backward has left unreduced."""
        return {param.sharded_param for group in self._groups if has_unreduced(group) for param in group.fsdp_params}

    def leave(self) -> None:
        """Ends the micro-batches of a step: what is not reduced and freed yet, as the last one did not come or failed.

        What stays gathered must not be seen by whatever changes weights before the next forward.
        """
        if self._is_lost or backward_broke(self._model):
            return
        try:
            self._clear()
            unreduced = [group for group in self._groups if has_unreduced(group)]
            if unreduced:
                self.place.micro_batch = LEFT
                reduce_unreduced(unreduced)
            for group in self._gathered_once:
                group.reshard()
        except Exception:  # a rank is gone: the loop is left by that error already, and the step is lost
            self._is_lost = True
            for group in self._groups:
                drop_gradients(group)

    def _clear(self) -> None:
        broke = backward_broke(self._model)
        if not (broke or forward_broke(self._model)):
            return
        self._alike.check("backward" if broke else "forward", self._passes)
        if broke:
            self._is_lost = True
            if self._reductions is not None:
                self._reductions.abandon()
            self._unused.forget()
        self._model.reset_iter_state()
        for group in self._groups if broke else ():
            drop_gradients(group)

    def _refuse_lost(self) -> None:
        if not self._is_lost:
            return
        if any(param.sharded_param.grad is not None for group in self._groups for param in group.fsdp_params):
            raise UsageError(
                "the last backward failed and left gradients of a part of the model; call optimizer.zero_grad(), with"
                " its default set_to_none=True, and begin the step again"
            )
        self._is_lost = False

    def _owns(self, optimizer: Optimizer) -> bool:
        if optimizer not in self._optimizers:
            own = {param.sharded_param for group in self._groups for param in group.fsdp_params}
            held = set(_parameters_of(optimizer))
            copies = held & gathered_copies(self._groups).keys() - own
            if copies:
                raise UsageError(
                    f"this {type(optimizer).__name__} was made between a forward and its backward: {len(copies)} of its"
                    f" {len(held)} parameters are gathered copies, which no step may change; make it right after"
                    " osdp.parallelize"
                )
            if own.isdisjoint(held):
                return False
            self._optimizers.add(optimizer)
        return True


_all: weakref.WeakSet[Recovery] = weakref.WeakSet()
_is_watching = False


def _watch_optimizers() -> None:
    global _is_watching
    if not _is_watching:
        register_optimizer_step_pre_hook(_before_step)
        Optimizer.zero_grad = _clearing(Optimizer.zero_grad, _parameters_of)  # type: ignore[method-assign]
        nn.Module.zero_grad = _clearing(nn.Module.zero_grad, nn.Module.parameters)  # type: ignore[method-assign]
        _is_watching = True


def shards_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The same parameters, shards where they are gathered copies: those have no gradients that are reduced.

    Refused where gradients of some are not reduced yet, and so not in their `.grad`.
    """
    shards: dict[Tensor, nn.Parameter] = {}
    unreduced: set[Tensor] = set()
    for recovery in list(_all):
        shards |= recovery.gathered_now()
        unreduced |= recovery.unreduced()
    found = [shards.get(parameter, parameter) for parameter in parameters]
    if not unreduced.isdisjoint(found):
        raise UsageError(
            "gradients were to be clipped before the end of osdp.accumulate, when some are not reduced yet; clip after"
            " the loop, and, if the iterator has a name, call its close() where it is left early"
        )
    return found


def _parameters_of(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _clearing(
    stock: Callable[..., None], parameters_of: Callable[[Any], Iterable[nn.Parameter]]
) -> Callable[..., None]:
    """A `zero_grad` that also clears what is not reduced yet: torch has hooks for an optimizer's step alone."""

    @functools.wraps(stock)
    def zero_grad(cleared: Any, set_to_none: bool = True) -> None:
        stock(cleared, set_to_none)
        for recovery in list(_all):
            recovery.zeroed(parameters_of(cleared), set_to_none=set_to_none)

    return zero_grad


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for recovery in list(_all):
        recovery.before_step(optimizer)
