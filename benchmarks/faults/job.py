"""Ranks of one command as processes of their own session: started, awaited, and ended to the last.

They are forked from a server that has torch and the command's modules loaded, so a start costs no import; from there on
each is a process like any other, with its own environment, session, output and exit code.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import free_port

ROOT = Path(__file__).parents[2]
MODEL = "benchmarks.faults.rank:build"
_LOADED = ["benchmarks.faults.rank", "osdp.cli.train", "osdp.training.run", "osdp.api", "osdp.profiling.run"]
_LOADED += ["osdp.runtime.checkpoint", "torch._dynamo", "torch.distributed.checkpoint"]


@dataclass(frozen=True)
class Ended:
    """How a job ended: by rank, and when after the fault the last rank that was not hit did."""

    codes: tuple[int | None, ...]
    noticed_seconds: float | None
    losses: Mapping[int, float]
    said: str

    @property
    def has_traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.said


@dataclass
class Job:
    """A command on several ranks, that is under way; `faults` are given to ranks by their number."""

    arguments: Sequence[str]
    ranks: int
    faults: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    limit_file_bytes: int | None = None

    def __post_init__(self) -> None:
        port = free_port()
        self._folder = tempfile.TemporaryDirectory()
        self.processes = [self._start(rank, port) for rank in range(self.ranks)]

    def _start(self, rank: int, port: int) -> Any:
        world = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "WORLD_SIZE": self.ranks,
            "LOCAL_WORLD_SIZE": self.ranks,
        }
        variables = {**world, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 1}
        process = _context().Process(
            target=_rank,
            args=(
                {name: str(value) for name, value in variables.items()},
                [str(self._file(rank, kind)) for kind in ("out", "err")],
                self.limit_file_bytes,
                self.faults.get(rank),
                list(self.arguments),
            ),
        )
        for kind in ("out", "err"):
            self._file(rank, kind).touch()
        process.start()
        return process

    def _file(self, rank: int, kind: str) -> Path:
        return Path(self._folder.name) / f"{rank}.{kind}"

    def steps(self) -> dict[int, float]:
        """The loss of every step that rank 0 has said so far."""
        lines = [line for line in self._file(0, "out").read_text().splitlines() if line.startswith("{")]
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return {event["number"]: event["loss"] for event in events if event["event"] == "step"}

    def wait_until_stopped(self, rank: int, seconds: float) -> bool:
        """Whether a rank has been stopped by then."""
        stat, until = Path(f"/proc/{self.processes[rank].pid}/stat"), time.monotonic() + seconds
        while time.monotonic() < until and self.processes[rank].exitcode is None:
            if stat.read_text().rpartition(")")[2].split()[0] == "T":
                return True
            time.sleep(0.02)
        return False

    def go_on(self, rank: int) -> None:
        """Lets a stopped rank run; it is waited for from now on."""
        self.faults = {other: fault for other, fault in self.faults.items() if other != rank}
        os.kill(self.processes[rank].pid, signal.SIGCONT)

    def end(self, seconds: float) -> Ended:
        """Waits until every rank that was not stopped has ended, then ends what is left."""
        stopped = {r for r, fault in self.faults.items() if fault["signal"] == signal.SIGSTOP}
        waiting = {rank for rank in range(self.ranks) if rank not in stopped}
        until, last = time.monotonic() + seconds, time.time()
        while waiting and time.monotonic() < until:
            for rank in [rank for rank in waiting if self.processes[rank].exitcode is not None]:
                waiting.discard(rank)
                last = time.time()
            time.sleep(0.02)
        codes = tuple(None if rank in waiting else process.exitcode for rank, process in enumerate(self.processes))
        self.close()
        said = "".join(self._file(rank, "err").read_text() for rank in range(self.ranks))
        struck = [json.loads(line)["at"] for line in said.splitlines() if line.startswith('{"event": "fault"')]
        noticed = last - struck[0] if struck and not waiting else None
        return Ended(codes, noticed, self.steps(), said)

    def close(self) -> None:
        """Ends what is left of every rank; those were all started here."""
        for process in self.processes:
            process.kill()
            process.join()

    def left_behind(self) -> int:
        """Processes of the ranks' sessions that outlive them."""
        sessions = {process.pid for process in self.processes}
        found = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            found += fields[0] != "Z" and int(fields[3]) in sessions
        return found


@functools.cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LOADED)
    return context


def _rank(
    variables: Mapping[str, str],
    files: Sequence[str],
    limit_file_bytes: int | None,
    fault: Mapping[str, Any] | None,
    arguments: list[str],
) -> None:
    """The command, in a process that has just been forked."""
    import torch

    from benchmarks.faults.rank import arm
    from osdp.cli.main import main

    os.setsid()
    os.chdir(ROOT)
    os.environ.update(variables)
    for stream, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), stream)
    torch.set_num_threads(1)
    if fault is not None:
        arm(dict(fault))
    if limit_file_bytes is not None:  # a disk that is full: no file may grow beyond
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_file_bytes, limit_file_bytes))
    sys.exit(main(arguments))
