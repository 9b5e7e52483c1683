"""What a collective takes from the computation that it runs beside.

[Note: Busy]
A row of phases as in training: a collective that takes M alone is started, products that take C alone are computed,
then it is waited for. A phase takes T, and the model says T = max(C + busy, M): so much of a collective is taken from
the computation, because who carries bytes needs the processor, or units of the accelerator, and because ranks that
share processors reach a collective at different times. C is made as long as M, so busy = T - C, at least 0. Two sizes
give a line: some seconds for every collective, and a part of its own time.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import torch

from osdp.cluster import Measured
from osdp.profiling.bench import Bench
from osdp.profiling.collectives import Carrier, TimedCollective

PHASES = 4
_ROUNDS = 3
_SMALL, _LARGE_SECONDS = 1 << 14, 0.03  # what the first takes is latency; the other is a unit's on a slow network
_MOST_FRACTION = 1.5
_WIDTH = 128


def solve(small: tuple[float, float], large: tuple[float, float]) -> tuple[float, float]:
    """Seconds and fraction, from (seconds alone, seconds that it took from computing) of two sizes."""
    slope = (large[1] - small[1]) / max(1e-9, large[0] - small[0])
    fraction = min(_MOST_FRACTION, max(0.0, slope))
    seconds = statistics.fmean((small[1] - fraction * small[0], large[1] - fraction * large[0]))
    return max(0.0, seconds), fraction


def with_busy(bench: Bench, carrier: Carrier, timed: list[TimedCollective], *, within: float) -> list[TimedCollective]:
    """The same collectives, each with what it takes from the computation beside it."""
    found = []
    for each in timed:
        measured = each.measured
        bench.watch(f"{measured.kind} in {measured.group} beside compute")
        share = within / len(timed) / 2
        small, large = (_taken(bench, carrier, measured, size, share) for size in (_SMALL, _large(each)))
        seconds, fraction = solve(small, large)
        found.append(replace(each, measured=replace(measured, busy_seconds=seconds, busy_fraction=fraction)))
    return found


def _taken(bench: Bench, carrier: Carrier, measured: Measured, size: int, within: float) -> tuple[float, float]:
    rounds = [_round(bench, carrier, measured, size, within / _ROUNDS) for _ in range(_ROUNDS)]
    alone, taken = (statistics.median(column) for column in zip(*rounds, strict=True))
    return alone, taken


def _round(bench: Bench, carrier: Carrier, measured: Measured, size: int, within: float) -> tuple[float, float]:
    """The three are timed in turn, so that whatever else the machines do meanwhile slows all of them."""
    job = carrier.job(measured.kind, measured.group, size)
    matrix = torch.ones(_WIDTH, _WIDTH, device=bench.device)
    product = bench.seconds(lambda: matrix @ matrix, within=within / 8)
    communication = bench.seconds(lambda: carrier.start(job)(), within=within / 8)
    times = max(1, round(communication / product))

    def compute() -> None:
        for _ in range(PHASES * times):
            matrix @ matrix

    def communicate() -> None:
        for _ in range(PHASES):
            carrier.start(job)()

    def both() -> None:
        for _ in range(PHASES):
            wait = carrier.start(job)
            for _ in range(times):
                matrix @ matrix
            wait()

    apart, alone, together = bench.seconds_in_turn(compute, communicate, both, within=within * 3 / 4)
    return alone / PHASES, max(0.0, together - apart) / PHASES


def _large(timed: TimedCollective) -> int:
    """A power of two whose collective takes about _LARGE_SECONDS, among the sizes that were timed."""
    measured, size = timed.measured, 4 * _SMALL
    while size < timed.largest_bytes and measured.latency_seconds + size / measured.bytes_per_second < _LARGE_SECONDS:
        size *= 2
    return size
