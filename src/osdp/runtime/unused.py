"""Leaves no gradient where no rank has one, as a single process does.

[Note: Unused]
Ranks reduce a unit together, so one that did not use a parameter sends zeros for it. Where none used it, the sum is
zero and not a gradient: an optimizer would decay the weight and age its moments, which it does not do in a single
process. No rank can know that alone. So at the end of every backward that reduced anything, one all-reduce of a byte
for each parameter says which of them got a gradient anywhere; those that did not, and had none before, are left
without. DDP does the same for models that have unused parameters; here it is done for all, as it costs one latency. The
same all-reduce tells whether all ranks are at one place of training; see [Note: Place] in osdp.runtime.place.
A gradient that is reduced in the node alone is not one yet: that it was used is remembered until the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from osdp._torch.fsdp import FSDPParamGroup, WatchedParam, watch, when_backward_ends
from osdp.runtime.place import Place

Finish = Callable[[], None]
Exchange = Callable[[Tensor], None]


def on_this_rank(own: Sequence[int]) -> Sequence[int]:
    """The answer where there is no other rank to ask, in a dry run."""
    return own


def on_any_rank(own: Sequence[int], exchange: Exchange) -> Sequence[int]:
    """The answer of all ranks; `exchange` makes a tensor the largest of every rank's in place."""
    numbers = torch.tensor(own, dtype=torch.uint8)
    exchange(numbers)
    return numbers.tolist()


class UnusedGradients:
    """The parameters of a model, watched through every backward; see [Note: Unused].

    `finish` ends the reductions that are under way, `largest` gives the largest over all ranks of each of some numbers
    of one byte. `place` is where this rank is.
    """

    def __init__(
        self,
        units: Sequence[FSDPParamGroup],
        finish: Finish,
        largest: Callable[[Sequence[int]], Sequence[int]],
        place: Place,
    ) -> None:
        self._finish, self._largest, self._place = finish, largest, place
        self._params: list[WatchedParam] = [param for unit in units for param in watch(unit, self._reduced)]
        self._any = False

    def forget(self) -> None:
        """What a backward that failed has left."""
        self._any = False
        for param in self._params:
            param.is_zero = param.was_used = False

    def _reduced(self) -> None:
        """A parameter is about to be reduced: every rank's are, alike. The first asks for the end of backward."""
        if not self._any:
            self._any = True
            when_backward_ends(self._settle)

    def _settle(self) -> None:
        if not self._any:
            return
        own = [int(not param.is_zero) for param in self._params]
        found = self._largest([*self._place.codes(), *own])  # beside the last reduction
        self._finish()
        codes, used = found[: -len(own)], found[-len(own) :]
        self._place.compare(codes)
        for param, is_used in zip(self._params, used, strict=True):
            if param.is_reduced_in_part:
                param.was_used |= bool(is_used)
            else:
                param.was_used = False
                if not is_used:
                    param.sharded_param.grad = None
            param.is_zero = False
        self._any = False


def largest_of_all(used: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
