"""Cuts the link of a simulated host while a job trains across it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.faults.job import ROOT

if TYPE_CHECKING:
    from benchmarks.cluster import SimulatedCluster
    from benchmarks.cluster.ranks import Start

AFTER_STEPS = 3
_SCRIPT = 'cd "$1"; shift; "$@"; echo "ended $?"'  # itself ends with 0, so that no rank is killed for the other


def cut_while_training(
    cluster: SimulatedCluster, arguments: Sequence[str], seconds: float
) -> tuple[list[int], float | None, str]:
    """Exit codes of all ranks, the seconds from the cut to the end of the last, and all that was said."""
    began, cut_at = time.monotonic(), list[float]()

    def on_line(start: Start, stream: str, line: str) -> None:
        if cut_at or not line.startswith("{"):
            return
        event = json.loads(line)
        if event["event"] == "step" and event["number"] >= AFTER_STEPS:
            cluster.cut(1)
            cut_at.append(time.monotonic())

    command = ["sh", "-c", _SCRIPT, "sh", str(ROOT), sys.executable, "-m", "benchmarks.faults.rank", *arguments]
    results = cluster.run(command, timeout=seconds, on_line=on_line)
    codes = [int(result.stdout.rpartition("ended ")[2] or -1) for result in results]
    noticed = began + max(result.seconds for result in results) - cut_at[0] if cut_at else None
    return codes, noticed, "".join(result.stderr for result in results)
