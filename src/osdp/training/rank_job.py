"""A job that all ranks do together and that writes nothing before its end, such as measuring."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from osdp.errors import OsdpError, UsageError
from osdp.training.failures import Watchdog, explained
from osdp.training.world import World

_NOTHING = "nothing is written"


class RankJob:
    """What it does now is said on stderr and watched: a rank that hangs or fails ends all, and one of them says why."""

    def __init__(self, world: World, *, timeout_seconds: float, quiet: bool) -> None:
        self.world, self.now = world, "the start"
        self._timeout_seconds, self._silent = timeout_seconds, quiet or not world.leads
        self._watchdog = Watchdog(timeout_seconds, sentence=self._hung)

    def say(self, what: str) -> None:
        """Begins another part of the job."""
        self.watch(what)
        if not self._silent:
            print(what, file=sys.stderr, flush=True)

    def watch(self, what: str) -> None:
        self.now = what
        self._watchdog.watch(what)

    @contextmanager
    def under_way(self) -> Iterator[RankJob]:
        self.watch(self.now)
        try:
            with self._watchdog:
                yield self
        except BaseException as error:
            raise self._ended_by(error) from None

    def _hung(self, what: str) -> str:
        return (
            f"rank {self.world.rank} waited {self._timeout_seconds:g} s in {what}: another rank hangs or is gone, or "
            f"--timeout is too short; {_NOTHING}"
        )

    def _ended_by(self, error: BaseException) -> BaseException:
        """What to raise on this rank: of all that fail with one cause, the first speaks."""
        if isinstance(error, KeyboardInterrupt):
            return error if self.world.speaks_first() else SystemExit(130)
        known = error if isinstance(error, (OsdpError, OSError)) else None
        known = known or explained(error, during=self.now, plan=None, resumes=_NOTHING)
        if known is None:
            return error
        return known if self.world.speaks_first() else SystemExit(2 if isinstance(known, UsageError) else 1)
