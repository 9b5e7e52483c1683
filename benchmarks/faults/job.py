"""Ranks of one command as processes of their own session: started, awaited, and ended to the last."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODEL = "benchmarks.faults.rank:build"


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
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self._folder = tempfile.TemporaryDirectory()
        self.processes = [self._start(rank, port) for rank in range(self.ranks)]

    def _start(self, rank: int, port: int) -> subprocess.Popen[str]:
        world = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "WORLD_SIZE": self.ranks,
            "LOCAL_WORLD_SIZE": self.ranks,
        }
        variables = {**world, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 1}
        if rank in self.faults:
            variables["OSDP_FAULT"] = json.dumps(self.faults[rank])
        command = [sys.executable, "-m", "benchmarks.faults.rank", *self.arguments]
        if self.limit_file_bytes is not None:  # a disk that is full: no file may grow beyond
            command = ["prlimit", f"--fsize={self.limit_file_bytes}", *command]
        with self._file(rank, "out").open("w") as out, self._file(rank, "err").open("w") as err:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **{name: str(value) for name, value in variables.items()}},
                stdout=out,
                stderr=err,
                text=True,
                start_new_session=True,
            )

    def _file(self, rank: int, kind: str) -> Path:
        return Path(self._folder.name) / f"{rank}.{kind}"

    def steps(self) -> dict[int, float]:
        """The loss of every step that rank 0 has said so far."""
        lines = [line for line in self._file(0, "out").read_text().splitlines() if line.startswith("{")]
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return {event["number"]: event["loss"] for event in events if event["event"] == "step"}

    def wait_for_step(self, number: int, seconds: float) -> None:
        until = time.monotonic() + seconds
        while max(self.steps(), default=0) < number and time.monotonic() < until:
            time.sleep(0.05)

    def end(self, seconds: float) -> Ended:
        """Waits until every rank that was not stopped has ended, then ends what is left."""
        stopped = {r for r, fault in self.faults.items() if fault["signal"] == signal.SIGSTOP}
        waiting = {rank for rank in range(self.ranks) if rank not in stopped}
        until, last = time.monotonic() + seconds, time.time()
        while waiting and time.monotonic() < until:
            for rank in [rank for rank in waiting if self.processes[rank].poll() is not None]:
                waiting.discard(rank)
                last = time.time()
            time.sleep(0.02)
        codes = tuple(None if rank in waiting else process.poll() for rank, process in enumerate(self.processes))
        self.close()
        said = "".join(self._file(rank, "err").read_text() for rank in range(self.ranks))
        struck = [json.loads(line)["at"] for line in said.splitlines() if line.startswith('{"event": "fault"')]
        noticed = last - struck[0] if struck and not waiting else None
        return Ended(codes, noticed, self.steps(), said)

    def close(self) -> None:
        """Ends what is left of every rank's session; those were all started here."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

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
