"""Starts `osdp train` in real processes, and reads what they say."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from benchmarks.common import free_port

TESTS = Path(__file__).parent
STEPS = 30
FSDP2_WARNS = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of views that nobody changes in place
SAME = ("tiny_lm:build", "--steps", str(STEPS), "--lr", "3e-3", "--json", "--quiet")


def _read(stream: IO[str], lines: list[str]) -> None:
    with stream:
        lines.extend(stream)


class Process:
    """A command under way; its output is read as it comes."""

    def __init__(self, command: Sequence[str], environment: dict[str, str] | None = None, **settings: Any) -> None:
        self.popen = subprocess.Popen(
            command,
            cwd=TESTS,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **settings,
        )
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=_read, args=(stream, lines))
            for stream, lines in ((self.popen.stdout, self.lines), (self.popen.stderr, self.errors))
        ]
        for reader in self._readers:
            reader.start()

    def end(self, seconds: float = 200) -> int:
        code = self.popen.wait(seconds)
        for reader in self._readers:
            reader.join()
        return code

    def kill(self) -> None:
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.end()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in map(json.loads, self.lines.copy()) if event["event"] == kind]

    def wait_for_step(self, number: int) -> None:
        self.wait_until(lambda: any(event["number"] >= number for event in self.events("step")))

    def wait_until(self, there: Callable[[], bool], seconds: float = 200) -> None:
        end = time.monotonic() + seconds
        while not there():
            assert time.monotonic() < end and self.popen.poll() is None, "".join(self.lines + self.errors)
            time.sleep(0.01)

    def sentences(self) -> list[str]:
        """What was said for users on standard error, but for warnings; torchrun may write to the same line."""
        found = (re.search(r"osdp: (?!warning: ).*", line, re.DOTALL) for line in self.errors)
        return [match[0] for match in found if match]

    def warnings(self) -> list[str]:
        return [line for line in self.errors if line.startswith("osdp: warning: ")]


@contextmanager
def running(*processes: Process) -> Iterator[tuple[Process, ...]]:
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()


def torchrun(*arguments: str, restarts: int = 0) -> Process:
    run = ("--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts), "--monitor-interval", "0.1")
    return Process([sys.executable, "-m", "torch.distributed.run", *run, "-m", "osdp", "train", *arguments])


def alone(*arguments: str, **settings: Any) -> Process:
    return Process([sys.executable, "-m", "osdp", "train", *arguments], **settings)


def two_ranks(*command: str, **environment: str) -> list[Process]:
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = ({**world, **environment, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1"))
    return [Process([sys.executable, *command], each) for each in ranks]


def rank_process(launcher: Process, rank: int) -> int:
    """The process id of a rank that torchrun has started."""
    pid = launcher.popen.pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if f"\0RANK={rank}\0".encode() in b"\0" + Path(f"/proc/{child}/environ").read_bytes():
            return int(child)
    raise AssertionError(f"torchrun has no rank {rank}")


def losses(process: Process) -> dict[int, float]:
    return {event["number"]: event["loss"] for event in process.events("step")}
