"""What the links really carry: real gloo ranks, the measured rate beside the asked one."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .network import bits_per_second
from .ranks import first_failure
from .simulated import SimulatedCluster

UNLIMITED_BYTES = 16 << 20  # of a message where no rate is asked
TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Rate:
    """What a link carried in bits a second, and what was asked, None where nothing is limited.

    The median is what to expect, the best is what the link itself allows: the machine's cores are shared.
    """

    link: str
    collective: str
    median: float
    best: float
    asked: float | None

    @property
    def off(self) -> float | None:
        return None if self.asked is None else self.median / self.asked - 1


def measured_rates(cluster: SimulatedCluster, *, seconds: float = 0.25) -> list[Rate]:
    """The rates of the links between hosts and of the first host's loopback, where two ranks are on them.

    Messages are as large as the asked rate carries in so many seconds.
    """
    across, node = (None if rate is None else bits_per_second(rate) for rate in (cluster.across, cluster.node))
    asked = {"across": across, "across, all ranks": across, "node": node}
    sizes = [UNLIMITED_BYTES if rate is None else int(rate / 8 * seconds) for rate in (across, node)]
    command = [sys.executable, str(Path(__file__).with_name("measure.py")), *map(str, sizes)]
    results = cluster.run(command, timeout=TIMEOUT_SECONDS)
    failed = first_failure(results)
    if failed is not None:
        raise RuntimeError(f"rank {failed.rank} ended with {failed.exit_code}:\n{failed.stderr}")
    return [
        Rate(link, collective, median, best, asked[link])
        for link, rates in json.loads(results[0].stdout).items()
        for collective, (median, best) in rates.items()
    ]


def table(rates: Sequence[Rate]) -> str:
    lines = [f"{'link':<18} {'collective':<23} {'median':>9} {'best':>9} {'asked':>9} {'off':>8}   (Mbit/s)"]
    for rate in rates:
        asked = "–" if rate.asked is None else f"{rate.asked / 1e6:,.0f}"
        off = "–" if rate.off is None else f"{rate.off:+.1%}"
        measured = f"{rate.median / 1e6:>9,.0f} {rate.best / 1e6:>9,.0f}"
        lines.append(f"{rate.link:<18} {rate.collective:<23} {measured} {asked:>9} {off:>8}")
    return "\n".join(lines)
