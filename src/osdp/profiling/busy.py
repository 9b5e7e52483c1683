"""How far a collective and the computation beside it slow each other.

[Note: Busy]
A row of phases as in training: a collective that takes M alone is started, products that take C alone are computed,
then it is waited for. A phase takes T, and the model says T = max(C, M) + busy · min(C, M): who carries bytes needs the
processor, or units of the accelerator, and ranks that share processors reach a collective at different times. C is made
as long as M, where busy is seen best. More than 1 means that both together take longer than one after the other.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import torch

from osdp.profiling.bench import Bench
from osdp.profiling.collectives import Carrier, TimedCollective

PHASES = 4
_ROUNDS, _MOST = 3, 2.0
_SECONDS = 0.01  # of a collective, about: what a unit's takes on a slow network
_WIDTH = 128


def solve(compute: float, communication: float, together: float) -> float:
    """See [Note: Busy]."""
    longer, shorter = max(compute, communication), min(compute, communication)
    return min(_MOST, max(0.0, (together - longer) / shorter))


def with_busy(bench: Bench, carrier: Carrier, timed: list[TimedCollective], *, within: float) -> list[TimedCollective]:
    """The same collectives, each with how far it and the computation beside it slow each other."""
    found = []
    for each in timed:
        bench.watch(f"{each.measured.kind} in {each.measured.group} beside compute")
        rounds = [_round(bench, carrier, each, within / len(timed) / _ROUNDS) for _ in range(_ROUNDS)]
        found.append(replace(each, measured=replace(each.measured, busy_fraction=statistics.median(rounds))))
    return found


def _round(bench: Bench, carrier: Carrier, timed: TimedCollective, within: float) -> float:
    """The three are timed in turn, so that whatever else the machines do meanwhile slows all of them."""
    job = carrier.job(timed.measured.kind, timed.measured.group, _size(timed))
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

    return solve(*bench.seconds_in_turn(compute, communicate, both, within=within * 3 / 4))


def _size(timed: TimedCollective) -> int:
    """A power of two whose collective takes about _SECONDS, among the sizes that were timed."""
    measured, size = timed.measured, 1 << 16
    while size < timed.largest_bytes and measured.latency_seconds + size / measured.bytes_per_second < _SECONDS:
        size *= 2
    return size
