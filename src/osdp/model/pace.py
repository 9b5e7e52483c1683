"""Says how long a long capture will take, and how far it is.

[Note: Pace]
A scan that Python unrolls has kernels for every step: thousands of steps make traces of minutes. Once a capture has
taken a few seconds, one forward at two short lengths tells how the number of kernels grows with the length, and so how
many all traces of this process have: two plain ones of three forwards each (backward has twice a forward's), and one
with blocks recomputed, of four at most. One more runs beside it where there is a second core, else after it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from osdp.model.fork_worker import may_fork
from osdp.model.values import place_of

_log = logging.getLogger("osdp")
KERNELS = 1024  # between two looks at the clock
_PATIENCE_SECONDS = 4.0
_BETWEEN_SECONDS = 10.0


def forwards_traced() -> int:
    return 2 * 3 + (1 if may_fork() else 2) * 4


@dataclass
class Pace:
    """Follows the traces of one capture; `forward_kernels` counts those of a forward, see [Note: Pace]."""

    name: str
    forward_kernels: Callable[[], tuple[int, int] | None]
    began: float = field(default_factory=monotonic)
    _done: int = 0
    _said: float | None = None
    _expected: int | None = None
    _grows: bool = False  # the number of kernels with the length

    def tick(self) -> None:
        """So many kernels more were traced."""
        self._done += KERNELS
        now = monotonic()
        if now - (self._said or self.began) < (_PATIENCE_SECONDS if self._said is None else _BETWEEN_SECONDS):
            return
        first, self._said = self._said is None, now
        if first:
            short, forward = self.forward_kernels() or (0, 0)
            self._expected, self._grows = forwards_traced() * forward or None, forward > 2 * short
        if self._expected is None:
            return
        left = (now - self.began) * max(0, self._expected - self._done) / self._done
        if first and left < _BETWEEN_SECONDS:
            self._expected = None  # it ends before there is more to say
        elif first:
            _log.warning(
                "osdp: capturing %s takes about %s more: it has about %s kernels, traced one by one (%s)%s",
                *(self.name, _duration(left), f"{self._expected:,}", place_of(sys._getframe(1))),
                "; some run once a token, so a shorter sequence takes less in proportion" if self._grows else "",
            )
        else:
            share = min(0.99, self._done / self._expected)
            _log.warning("osdp: capturing %s: %.0f %% done, about %s more", self.name, 100 * share, _duration(left))


def depth_said(name: str, seconds: float, traced: int, blocks: int) -> None:
    """Says how long the check at full depth takes if that is long; `seconds` were those of a trace of fewer blocks.

    Blocks that repeat others take less: torch has cached what the first one makes.
    """
    whole = seconds * blocks / max(1, traced)
    if whole > _BETWEEN_SECONDS:
        _log.warning(
            "osdp: capturing %s: %d of its %d blocks are traced, and all are checked, which takes at most about %s",
            *(name, traced, blocks, _duration(whole)),
        )


def waiting_said(name: str, what: str) -> Callable[[float], None]:
    """Says now and then what is waited for; for `ForkWorker.result`."""
    said = 0.0

    def say(seconds: float) -> None:
        nonlocal said
        if seconds > said + _BETWEEN_SECONDS:
            said = seconds
            _log.warning("osdp: capturing %s: %s, for %s so far", name, what, _duration(seconds))

    return say


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
