"""Starts ranks with torchrun, shows what they say, and lets none outlive the demonstration."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
GRACE_SECONDS = 5  # that torchrun gives ranks to end, before it kills them

_OF_TORCHRUN = re.compile(r"[EWI]\d{4} |Traceback|=====")
_OF_PROFILER = "USDT:"  # torch's profiler, each time that it starts and stops


class RanksFailed(Exception):
    """Ranks that did not end well; the message has their last words."""


def run_ranks(count: int, *command: str, log: Path) -> None:
    """Runs `python -m` the command on so many ranks; all that they say goes to the log, progress also to stderr."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count))
    process = subprocess.Popen(
        [sys.executable, *launcher, "--shutdown-timeout", str(GRACE_SECONDS), "-m", *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # ranks share the cores
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C comes to this process alone, which ends torchrun, which ends the ranks
    )
    try:
        words = _heard(process, log)
        if process.wait() != 0:
            last = words[-1].strip() if words else f"exit code {process.returncode}"
            raise RanksFailed(f"{log.stem} failed on {count} ranks: {last} (all of it: {log})")
    finally:
        _ended(process)


def _heard(process: subprocess.Popen[str], log: Path) -> list[str]:
    """Reads until the ranks close stderr; gives their own lines, without torchrun's report of a failure."""
    words: list[str] = []
    reported = False
    assert process.stderr is not None
    with log.open("w") as file, process.stderr:
        for line in process.stderr:
            file.write(line)
            reported = reported or _OF_TORCHRUN.match(line) is not None
            if line.strip() and not reported and _OF_PROFILER not in line:
                words.append(line)
                print(f"        {line}", end="", file=sys.stderr, flush=True)
    return words


def _ended(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        process.wait()
