"""Recomputes blocks in backward with the random numbers of their forward.

[Note: Draws]
A checkpoint copies the state of the random numbers before every block, 5 KB on processors, and restores it in backward.
Most blocks draw nothing, so the states before them are equal: with `share_draws` they share one copy. Accelerators'
states are a few bytes on the host, and fake tensors have none: there torch's own checkpoint does it.
"""

from __future__ import annotations

import functools
import weakref
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class State:
    """The random numbers' state at one moment. Its bytes are no tensor's: a step's memory is counted by tensors."""

    def __init__(self) -> None:
        self.data = torch.get_rng_state().numpy().tobytes()

    def restore(self) -> None:
        torch.set_rng_state(torch.frombuffer(bytearray(self.data), dtype=torch.uint8))


class _Draws:
    """The last state that a block was entered with, as long as some block needs it."""

    def __init__(self) -> None:
        self._last: weakref.ref[State] | None = None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """What a block's forward runs in, and what its recomputation does; called when it is entered."""
        state = State()
        last = None if self._last is None else self._last()
        if last is not None and last.data == state.data:
            state = last
        else:
            self._last = weakref.ref(state)
        return nullcontext(), _Restored(state)


class _Restored(AbstractContextManager[None]):
    """Draws as they were; entered once for every backward, of which there may be several through one graph."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._outer: list[State] = []

    def __enter__(self) -> None:
        self._outer.append(State())
        self._state.restore()

    def __exit__(self, *error: object) -> None:
        self._outer.pop().restore()


def recompute(blocks: list[nn.Module], *, share_draws: bool) -> None:
    """Lets these modules keep their inputs only, and compute again in backward; see [Note: Draws]."""
    options = {"preserve_rng_state": False, "context_fn": _Draws().contexts} if share_draws else {}
    for block in blocks:
        block.forward = functools.partial(  # type: ignore[method-assign]
            checkpoint, block.forward, use_reentrant=False, **options
        )
