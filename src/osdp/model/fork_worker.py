"""Less waiting for a trace: a second process where there is a second core, and no garbage collection meanwhile."""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")

_ORPHAN_SECONDS = 600  # a child whose parent was killed ends by then, whatever it waits for
_IDLE_SECONDS = 30.0  # a child that took no CPU time for so long is taken to hang
_LOOK_SECONDS = 5.0  # between two looks at a child that is waited for


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Importing torch and tracing make objects by the million that stay: looking through them finds nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class ForkWorker(Generic[T]):
    """Calls a function in a forked copy of this process, or, where that cannot be or fails, here when asked.

    What the function changes stays in the copy, and the copy's prints are dropped; leaving the context ends it.
    """

    def __init__(self) -> None:
        self._call: Callable[[], T] | None = None
        self._child: tuple[int, int] | None = None  # process, and the end of the pipe that it answers through
        self._began = 0.0

    def start(self, call: Callable[[], T]) -> None:
        self.end()
        self._call, self._began = call, time.monotonic()
        self._child = _forked(call) if may_fork() else None

    def result(self, waiting: Callable[[float], None] = lambda seconds: None) -> T:
        """The function's result. Its error is raised by a call in this process: the same, with its own traceback.

        `waiting` is told now and then how many seconds ago the function was begun.
        """
        if self._call is None:
            raise RuntimeError("nothing was started; call start() first")
        answer = b""
        if self._child is not None:
            answer = _read(*self._child, lambda: waiting(time.monotonic() - self._began))
        self.end()
        return pickle.loads(answer) if answer else self._call()

    def end(self) -> None:
        if self._child is None:
            return
        process, pipe = self._child
        self._child = None
        os.close(pipe)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()


def may_fork() -> bool:
    """Whether a copy of this process can trace: it has no accelerator's or process group's threads to miss.

    Of CUDA is known whether it runs already; beside any other accelerator nothing is forked.
    """
    if sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2:
        return False
    import torch
    import torch.distributed as dist

    there = torch.accelerator.current_accelerator()
    runs = torch.cuda.is_initialized() if there is None or there.type == "cuda" else True
    return not runs and not (dist.is_available() and dist.is_initialized())


def _forked(call: Callable[[], object]) -> tuple[int, int] | None:
    reading, writing = os.pipe()
    try:
        with warnings.catch_warnings():
            # Python warns of forking beside threads: the copy takes no lock of theirs, and is not waited for forever.
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
    except OSError:  # no memory or no process left: it is done here
        os.close(reading)
        os.close(writing)
        return None
    if process == 0:
        _answer(call, writing)
    os.close(writing)
    return process, reading


def _answer(call: Callable[[], object], pipe: int) -> None:
    """The child's whole life: it never returns, and an answer that is missing or empty means that it failed."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(_ORPHAN_SECONDS)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)  # the threads of the parent's pool are not here
        answer = pickle.dumps(call())
        with os.fdopen(pipe, "wb") as file:
            file.write(len(answer).to_bytes(8) + answer)
    finally:
        os._exit(0)  # no cleaning up: files, threads and locks are the parent's


def _read(process: int, pipe: int, waiting: Callable[[], None]) -> bytes:
    """What the child answers; empty where it hangs, or did not come to the end."""
    answer = b""
    used, since = _cpu_ticks(process), time.monotonic()
    while time.monotonic() - since < _IDLE_SECONDS:
        if not select.select([pipe], [], [], min(_LOOK_SECONDS, _IDLE_SECONDS))[0]:
            if (ticks := _cpu_ticks(process)) > used:
                used, since = ticks, time.monotonic()
            waiting()
            continue
        read = os.read(pipe, 1 << 20)
        if not read:
            whole = len(answer) > 8 and int.from_bytes(answer[:8]) == len(answer) - 8
            return answer[8:] if whole else b""
        answer += read
        since = time.monotonic()
    return b""


def _cpu_ticks(process: int) -> int:
    """The CPU time that a process has used, in the kernel's ticks."""
    with open(f"/proc/{process}/stat", encoding="utf-8") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
