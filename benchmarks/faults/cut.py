"""Cuts the link of a simulated host while a job trains across it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.faults.job import ROOT

if TYPE_CHECKING:
    from benchmarks.cluster import SimulatedCluster
    from benchmarks.cluster.ranks import Start

AFTER_STEPS = 3
_SCRIPT = 'cd "$1"; shift; "$@"; echo "ended $?"'  # itself ends with 0, so that no rank is killed for the other


@dataclass(frozen=True)
class Cut:
    """Exit codes of all ranks, seconds from the cut to the end of the last, rank 0's losses, and all that was said."""

    codes: list[int]
    noticed_seconds: float | None
    losses: dict[int, float]
    said: str


def trained_on(cluster: SimulatedCluster, arguments: Sequence[str], seconds: float, *, cut: bool) -> Cut:
    """Trains on all hosts; with `cut`, the link of one is taken away after some steps, without a word to anybody."""
    began, cut_at, losses = time.monotonic(), list[float](), dict[int, float]()

    def on_line(start: Start, stream: str, line: str) -> None:
        if start.rank or not line.startswith("{"):
            return
        event = json.loads(line)
        if event["event"] != "step":
            return
        losses[event["number"]] = event["loss"]
        if cut and not cut_at and event["number"] >= AFTER_STEPS:
            cluster.cut(1)
            cut_at.append(time.monotonic())

    command = ["sh", "-c", _SCRIPT, "sh", str(ROOT), sys.executable, "-m", "benchmarks.faults.rank", *arguments]
    results = cluster.run(command, timeout=seconds, on_line=on_line)
    codes = [int(result.stdout.rpartition("ended ")[2] or -1) for result in results]
    noticed = began + max(result.seconds for result in results) - cut_at[0] if cut_at else None
    return Cut(codes, noticed, losses, "".join(result.stderr for result in results))
