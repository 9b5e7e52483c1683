"""Recomputes blocks in backward with the random numbers of their forward.

[Note: Draws]
A checkpoint copies the state of the random numbers before every block, 5 KB on processors, and restores it in backward.
Most blocks draw nothing, so the states before them are equal: with `share_draws` they share one copy. Accelerators'
states are a few bytes on the host, and fake tensors have none: there torch's own checkpoint does it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class _Draws:
    """The last state that a block was entered with, as long as some block needs it."""

    def __init__(self) -> None:
        self._last: weakref.ref[Tensor] | None = None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """What a block's forward runs in, and what its recomputation does; called when it is entered."""
        state = torch.get_rng_state()
        last = None if self._last is None else self._last()
        if last is not None and np.array_equal(last.numpy(), state.numpy()):
            state = last
        else:
            self._last = weakref.ref(state)
        return nullcontext(), _restored(state)


@contextmanager
def _restored(state: Tensor) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        yield


def recompute(blocks: list[nn.Module], *, share_draws: bool) -> None:
    """Lets these modules keep their inputs only, and compute again in backward; see [Note: Draws]."""
    options = {"preserve_rng_state": False, "context_fn": _Draws().contexts} if share_draws else {}
    for block in blocks:
        block.forward = functools.partial(  # type: ignore[method-assign]
            checkpoint, block.forward, use_reentrant=False, **options
        )
