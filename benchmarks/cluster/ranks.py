"""Ranks as processes: starts them, gathers what they print, and ends all when one fails."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import IO

from .devices import Devices

CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class Start:
    """A rank to start: where it belongs, its command and its whole environment."""

    rank: int
    host: int
    command: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class RankResult:
    """How a rank ended; a negative exit code is the signal that ended it."""

    rank: int
    exit_code: int
    stdout: str
    stderr: str
    host: int
    seconds: float


OnLine = Callable[[Start, str, str], None]  # the rank, `stdout` or `stderr`, a line of it


class ClusterTimeout(TimeoutError):
    """Ranks did not end in time and were killed; `results` has what they printed until then."""

    def __init__(self, message: str, results: Sequence[RankResult]) -> None:
        super().__init__(message)
        self.results = tuple(results)


def first_failure(results: Sequence[RankResult]) -> RankResult | None:
    """The rank that failed first: the others were killed for it."""
    return min((result for result in results if result.exit_code != 0), key=lambda r: r.seconds, default=None)


@dataclass
class _Stream:
    """One of a rank's two outputs: everything read so far, and how much of it was handed on as lines."""

    name: str
    pipe: IO[bytes]
    read: bytearray = field(default_factory=bytearray)
    handed_on: int = 0

    def pull(self) -> bool:
        """Reads what is there; False at the end."""
        try:
            chunk = os.read(self.pipe.fileno(), CHUNK_BYTES)
        except BlockingIOError:
            return False
        self.read += chunk
        return bool(chunk)

    def lines(self, *, ended: bool = False) -> list[str]:
        """Lines that were not handed on yet; an unfinished one only at the end."""
        until = len(self.read) if ended else self.read.rfind(b"\n") + 1
        fresh = self.read[self.handed_on : until] if until > self.handed_on else b""
        self.handed_on = max(until, self.handed_on)
        return fresh.decode(errors="replace").splitlines()


class _Rank:
    def __init__(self, start: Start, *, began: float) -> None:
        self.start, self.began, self.seconds = start, began, 0.0
        self.process = subprocess.Popen(
            start.command,
            env=start.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the one who started the cluster, who then ends the ranks
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        self.streams = (_Stream("stdout", self.process.stdout), _Stream("stderr", self.process.stderr))
        for stream in self.streams:
            os.set_blocking(stream.pipe.fileno(), False)
        self.exited = os.pidfd_open(self.process.pid)  # readable once the process has ended

    def end(self) -> int:
        """Takes note of the end; the exit code."""
        self.seconds = time.monotonic() - self.began
        return self.process.wait()

    def result(self) -> RankResult:
        stdout, stderr = (bytes(stream.read).decode(errors="replace") for stream in self.streams)
        code = self.process.returncode
        return RankResult(self.start.rank, code, stdout, stderr, host=self.start.host, seconds=self.seconds)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.exited)
        for stream in self.streams:
            stream.pipe.close()


def run_ranks(
    starts: Sequence[Start],
    *,
    timeout: float | None = None,
    on_line: OnLine | None = None,
    devices: Devices | None = None,
) -> list[RankResult]:
    """Runs all ranks to their end, or until the first fails or the seconds are over; then the rest is killed."""
    ranks: list[_Rank] = []
    began = time.monotonic()

    def hand_on(rank: _Rank, stream: _Stream, ended: bool) -> None:
        for line in stream.lines(ended=ended):
            if on_line is not None:
                on_line(rank.start, stream.name, line)

    try:
        for start in starts:
            ranks.append(_Rank(start, began=began))
        with nullcontext() if devices is None else devices.held(rank.process.pid for rank in ranks):
            late = _follow(ranks, deadline=None if timeout is None else began + timeout, hand_on=hand_on)
        for rank in ranks:
            for stream in rank.streams:
                while stream.pull():  # without waiting: a process that a rank left behind may hold the pipe open
                    pass
                hand_on(rank, stream, True)
        results = [rank.result() for rank in ranks]
    finally:
        for rank in ranks:
            rank.close()
    if late:
        raise ClusterTimeout(f"ranks {late} did not end within {timeout:g} s and were killed", results)
    return results


def _follow(
    ranks: Sequence[_Rank], *, deadline: float | None, hand_on: Callable[[_Rank, _Stream, bool], None]
) -> list[int]:
    """Gathers output until every rank has ended; returns the ranks that had to be killed for being late."""
    running, late = list(ranks), []
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.exited, selectors.EVENT_READ, (rank, None))
            for stream in rank.streams:
                selector.register(stream.pipe, selectors.EVENT_READ, (rank, stream))
        while running:
            for key, _ in selector.select(None if deadline is None else max(0.0, deadline - time.monotonic())):
                rank, stream = key.data
                if stream is not None:
                    if not stream.pull():
                        selector.unregister(key.fileobj)
                    hand_on(rank, stream, False)
                    continue
                selector.unregister(key.fileobj)
                running.remove(rank)
                if rank.end() != 0:
                    _kill(running)
            if running and deadline is not None and time.monotonic() >= deadline:
                deadline, late = None, [rank.start.rank for rank in running]
                _kill(running)
    return late


def _kill(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        rank.process.kill()
