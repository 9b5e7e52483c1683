"""Which part of communication hides behind compute when both run at once.

[Note: Overlap]
Matrix products that take C alone, and collectives that take M alone, take T together. The model says
T = o · max(C, M) + (1 - o) · (C + M), so o = (C + M - T) / min(C, M), held to 0 … 1. C is made about as long as M,
where o is seen best. Ranks that share too few processors hide little: who carries bytes takes time from who computes.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from osdp.profiling.bench import Bench
from osdp.profiling.collectives import Carrier, TimedCollective

_ROUNDS, _LEAST_ROUNDS = 5, 3
_SECONDS = 0.03  # of the collectives, about
_WIDTH = 256


@dataclass(frozen=True)
class Overlap:
    """`rounds` are the single answers, before they were held to 0 … 1."""

    value: float
    rounds: tuple[float, ...]


def solve(compute: float, communication: float, together: float) -> float:
    """See [Note: Overlap]; not yet held to 0 … 1."""
    return (compute + communication - together) / min(compute, communication)


def time_overlap(bench: Bench, carrier: Carrier, timed: list[TimedCollective], *, within: float) -> Overlap:
    """With gathers and scatters over all ranks in turn."""
    rounds = []
    for index in range(_ROUNDS):
        kind = ("all_gather", "reduce_scatter")[index % 2]
        rounds.append(_round(bench, carrier, next(t for t in timed if t.measured.kind == kind), within / _ROUNDS))
        if bench.late and len(rounds) >= _LEAST_ROUNDS:
            break
    return Overlap(min(1.0, max(0.0, statistics.median(rounds))), tuple(rounds))


def _round(bench: Bench, carrier: Carrier, timed: TimedCollective, within: float) -> float:
    """The three are timed in turn, so that whatever else the machines do meanwhile slows all of them."""
    job = carrier.job(timed.measured.kind, "world", _size(timed))
    matrix = torch.ones(_WIDTH, _WIDTH, device=bench.device)
    product = bench.seconds(lambda: matrix @ matrix, within=within / 8)
    communication = bench.seconds(lambda: carrier.start(job)(), within=within / 8)
    times = max(1, round(communication / product))

    def compute() -> None:
        for _ in range(times):
            matrix @ matrix

    def both() -> None:
        wait = carrier.start(job)
        compute()
        wait()

    return solve(*bench.seconds_in_turn(compute, lambda: carrier.start(job)(), both, within=within * 3 / 4))


def _size(timed: TimedCollective) -> int:
    """A power of two whose collective takes about _SECONDS, among the sizes that were timed."""
    measured, size = timed.measured, 1 << 16
    while size < timed.largest_bytes and measured.latency_seconds + size / measured.bytes_per_second < _SECONDS:
        size *= 2
    return size
