"""Whether a pass failed on all ranks of a model, or on some of them alone.

Where all ranks fail in one place and catch the exception, their collectives still match, and training can go on. A rank
that fails alone has left the others in the middle of theirs: its next gather would meet another unit's, which ends the
process where their sizes differ, and mixes units where they do not. So a rank that clears away a failed pass first
hears of the others that they failed too. Words go through the store that ranks met at, not by collectives, and only
after a failure. Where the failure is that another rank is gone, there is nothing to ask.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import count

import torch.distributed as dist

from osdp._torch import default_store, default_timeout
from osdp.errors import OsdpError

WAIT_SECONDS = 60.0  # ranks meet at every unit, so what all of them do, they do within a pass
_models = count()  # equal on all ranks, which parallelize their models in one order


class FailedAlike:
    """The failed passes of one model, by their number."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks, self._model, self._failures = ranks, next(_models), 0
        self._refusal: str | None = None

    def heard(self, *unused: object) -> None:
        """A hook of the model's forward that is called whether it fails or not: a lost rank is not asked later."""
        error = sys.exception()
        if error is not None and is_lost_peer(error):
            self._refusal = "another rank is gone; let the exception end the process, and resume from a checkpoint"

    def check(self, place: str, passes: int) -> None:
        """Raises OsdpError, now and ever after, unless every rank says that its pass of this number failed there."""
        if len(self._ranks) < 2:
            return
        if self._refusal is None:
            others = self._others(f"{place} {passes}")
            if others:
                self._refusal = (
                    f"a {place} failed on rank {dist.get_rank()}, and not on {_ranks(others)}, so that their"
                    " collectives no longer match; let the exception end the process, and resume from a checkpoint"
                )
            self._failures += 1
        if self._refusal is not None:
            raise OsdpError(self._refusal)

    def _others(self, word: str) -> list[int]:
        """The ranks that say something else, or nothing in time."""
        store, own = default_store(), dist.get_rank()
        keys = {rank: f"osdp/failed/{self._model}/{self._failures}/{rank}" for rank in self._ranks}
        store.set(keys[own], word)
        limit = default_timeout()
        until = time.monotonic() + min(WAIT_SECONDS, WAIT_SECONDS if limit is None else limit.total_seconds())
        silent = [rank for rank in self._ranks if rank != own]
        different = []
        while silent and time.monotonic() < until:
            for rank in [rank for rank in silent if store.check([keys[rank]])]:
                silent.remove(rank)
                different += [rank] if store.get(keys[rank]).decode() != word else []
            time.sleep(0.01 if silent else 0.0)
        return sorted([*silent, *different])


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed as another rank is gone, or does not answer."""
    words = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL", "Broken pipe")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )
