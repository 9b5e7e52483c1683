"""A call beside this process gives what it gives here, and leaves nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from osdp.model import fork_worker
from osdp.model.fork_worker import ForkWorker, no_garbage_collection

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux forks here")


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets it fork; in the end no child may be left but those that were there before, of other tests."""
    monkeypatch.setattr(fork_worker, "may_fork", lambda: True)
    before = children()
    yield
    assert children() == before


def children() -> set[str]:
    return {child for file in Path("/proc/self/task").glob("*/children") for child in file.read_text().split()}


@pytest.mark.usefixtures("forking")
def test_the_call_runs_in_another_process() -> None:
    with ForkWorker[tuple[int, bytes]]() as call:
        call.start(lambda: (os.getpid(), b"x" * (1 << 20)))  # more than a pipe holds at once
        process, much = call.result()
    assert process != os.getpid() and len(much) == 1 << 20


@pytest.mark.usefixtures("forking")
def test_an_error_is_the_one_of_a_call_here() -> None:
    with ForkWorker[int]() as call:
        call.start(lambda: [][0])
        with pytest.raises(IndexError, match="list index"):
            call.result()


@pytest.mark.usefixtures("forking")
def test_a_killed_child_is_replaced_by_a_call_here() -> None:
    parent = os.getpid()

    def call_or_die() -> int:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    with ForkWorker[int]() as call:
        call.start(call_or_die)
        assert call.result() == parent


@pytest.mark.usefixtures("forking")
def test_a_child_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_worker, "_IDLE_SECONDS", 0.3)
    parent = os.getpid()
    with ForkWorker[int]() as call:
        call.start(lambda: parent if os.getpid() == parent else time.sleep(60) or 0)
        assert call.result() == parent


@pytest.mark.usefixtures("forking")
def test_a_child_that_works_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_worker, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(fork_worker, "_IDLE_SECONDS", 2.0)
    parent, told = os.getpid(), list[float]()

    def work() -> int:
        # the CPU time of a forked copy begins at 0
        while time.process_time() < 3.0:
            pass
        return os.getpid()

    with ForkWorker[int]() as call:
        call.start(work)
        assert call.result(told.append) != parent
    assert told == sorted(told) and told[-1] > 2.0


@pytest.mark.usefixtures("forking")
def test_an_interrupt_leaves_no_child() -> None:
    with pytest.raises(KeyboardInterrupt), ForkWorker[None]() as call:
        call.start(lambda: time.sleep(60))
        raise KeyboardInterrupt


def test_one_core_calls_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    with ForkWorker[int]() as call:
        call.start(os.getpid)
        assert call.result() == os.getpid()


def test_garbage_collection_is_as_before() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError, match="x"), no_garbage_collection():
        assert not gc.isenabled()
        raise ValueError("x")
    assert gc.isenabled()
