"""What ends a run before its time: a signal, a peer that hangs or is gone, memory that does not suffice."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from osdp.cluster import format_bytes
from osdp.errors import OsdpError
from osdp.planfile import Plan
from osdp.runtime.alike import is_lost_peer

PATIENCE_SECONDS = 3.0  # torchrun passes on what the terminal has sent already: that is one wish, not two

_PLACE = re.compile(r"^\[[^\]]*\] ?")  # where in the library's source


class StopRequest:
    """SIGINT and SIGTERM: the first asks to stop after the step; one more, some seconds later, ends the process.

    torchrun sends SIGTERM to the ranks that are left of a failed run, while they find out why they fail. So a failure
    leaves signals heard until its sentence is printed, which is where this context ends.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    @contextmanager
    def heard(self) -> Iterator[StopRequest]:
        """While training; before it, a signal ends the process."""
        self._before = {number: signal.signal(number, self._hear) for number in (signal.SIGINT, signal.SIGTERM)}
        yield self
        self._restore()

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal and now - self._since > PATIENCE_SECONDS:
            os._exit(128 + number)
        if not self.signal:
            self.signal, self._since = number, now


class Watchdog:
    """Ends the process when what it watches takes too long: ranks wait for a hung peer where nothing can wake them.

    It watches inside its context only: a process that goes on after a failed run must not be ended later.
    """

    def __init__(self, timeout_seconds: float, *, sentence: Callable[[str], str]) -> None:
        self._timeout_seconds, self._sentence = timeout_seconds, sentence
        self._watched: tuple[str, float] | None = None
        self._left = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._run, name="osdp-watchdog", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._left.set()

    def watch(self, what: str) -> None:
        """From now on this; what was watched before is done."""
        self._watched = what, time.monotonic() + self._timeout_seconds

    def _run(self) -> None:
        while not self._left.wait(min(1.0, self._timeout_seconds / 10)):
            watched = self._watched
            if watched is not None and time.monotonic() > watched[1]:
                print(f"osdp: error: {self._sentence(watched[0])}", file=sys.stderr, flush=True)
                sys.stdout.flush()
                os._exit(1)


def explained(error: BaseException, *, during: str, plan: Plan | None, resumes: str) -> OsdpError | None:
    """The sentence for a failure that is nobody's bug; None for any other."""
    cause = _PLACE.sub("", str(error).strip().partition("\n")[0]).partition(". ")[0]
    if is_out_of_memory(error):
        text = f"out of memory in {during} ({cause})"
        if plan is not None:
            peak, limit = format_bytes(plan.predicted.peak_bytes), format_bytes(plan.predicted.limit_bytes)
            text += f"; the plan expected {peak} of {limit}"
        return OsdpError(f"{text}; plan with a smaller --memory or --batch, or on more ranks; {resumes}")
    if is_lost_peer(error):
        return OsdpError(f"lost another rank in {during} ({cause}); {resumes}")
    return None


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
