"""Recomputes blocks in backward with the random numbers of their forward.

[Note: Draws]
A checkpoint copies the state of the random numbers before every block, 5 KB on CPUs, and restores it in backward.
Most blocks draw nothing, so the states before them are equal: with `share_draws` they share one copy. Accelerators'
states are a few bytes on the host, and fake tensors have none: there torch's own checkpoint does it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from osdp.model.selective import Contexts, checkpointed, selective_contexts
from osdp.recompute import Recompute


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

    def selective_contexts(self) -> Contexts:
        """The same, where the block is recomputed selectively."""
        forward, again = selective_contexts()
        return forward, _Both(self.contexts()[1], again)

    def contexts(self) -> Contexts:
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


class _Both(AbstractContextManager[None]):
    """Two contexts as one, the second inside the first."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self._inner.__exit__(*error)
        finally:
            self._outer.__exit__(*error)


def recompute(blocks: Iterable[tuple[nn.Module, Recompute]], *, share_draws: bool) -> None:
    """Lets these modules keep what `Recompute` says, and compute the rest again in backward; see [Note: Draws]."""
    draws = _Draws()
    for block, how in blocks:
        contexts = draws.selective_contexts if how is Recompute.SELECTIVE else draws.contexts
        options: dict[str, Any] = {"preserve_rng_state": False, "context_fn": contexts} if share_draws else {}
        block.forward = checkpointed(block.forward, how, **options)  # type: ignore[method-assign]
