"""What the engine adds to compute and collectives: the host's own time, and how far both slow each other.

[Note: Engine]
Stacks of blocks are trained by the real engine, in turn with the same blocks without it, and figures are chosen so that
the predicted passes equal the measured ones.

Tiny blocks, whose parameters are next to nothing, tell the host's time. Replicated ones send nothing in forward: what
it takes beyond its compute is `visit_seconds`, one for every unit. Freed ones are gathered twice and reduced:
`exchange_seconds` is for each of these.

Large blocks tell how far compute and communication hide behind each other. A pass takes max(C, M) + busy · min(C, M) of
each block's compute C and communication M: who carries bytes needs the processor, or units of the accelerator, and
ranks that share processors reach a collective at different times. On few tokens, where C is a fraction of M, every
collective over all ranks tells by which `factor` its latency differs from when it was alone, and those inside nodes and
across them tell it together: two that are under way hide each other's, and threads that compute make it longer. Bytes
take what they took. On many, where C is about M, all passes of a `Probe` together tell busy. That of collectives over
all ranks is the cluster's overlap, 1 - busy; what those inside nodes and across them take beyond that is their own
`busy_fraction`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from osdp.cluster import Cluster, Measured
from osdp.cost.seconds import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from osdp.cost.units import Option, modes_for
from osdp.planfile import FREE, KEEP, KEEP_IN_NODE, REPLICATE
from osdp.profiling.bench import Bench
from osdp.profiling.stack import HEAD_WIDTH, LENGTH, Passes, Stack, timed_in_turn

TINY_WIDTH = 8
_GATHER_SECONDS = 0.01  # of a large block, about: what a unit's takes on a slow network
_WEIGHTS, _BYTES = 12, 4  # of a block, times its width squared; of a weight
_MOST_SECONDS = 0.9
_CLOSE = 1e-4  # of a pass: what is solved for is solved for again in the next round
_FEW, _MANY = 0.2, 0.8  # of a gather, takes the forward on few tokens and on many
_LEAST_FACTOR, _MOST_FACTOR = 0.0, 4.0  # of a latency
_ROUNDS, _SETTLED = 24, 1e-3  # the host's time, latencies and the overlap depend on each other


class Probed(NamedTuple):
    """A pass of the large stacks, and the collectives in it that it tells of."""

    option: Option
    which: str
    collectives: tuple[tuple[str, str], ...]


Probe = list[Probed]  # whose collectives slow computation alike
Figures = dict[tuple[str, str], float]  # by a collective's kind and group


class CheckedPass(NamedTuple):
    """A pass as measured, and as predicted with the figures that were found."""

    blocks: str
    mode: str
    which: str
    measured_seconds: float
    predicted_seconds: float


@dataclass(frozen=True)
class EngineFigures:
    """The figures, and the passes that they were read off."""

    visit_seconds: float
    exchange_seconds: float
    busy: Figures
    factor: Figures
    passes: tuple[CheckedPass, ...]

    @property
    def overlap(self) -> float:
        return 1 - self.busy.get((ALL_GATHER, "world"), 0.0)

    def applied(self, cluster: Cluster) -> Cluster:
        return replace(
            cluster,
            visit_seconds=self.visit_seconds,
            exchange_seconds=self.exchange_seconds,
            overlap=self.overlap,
            measured=tuple(self._in_the_engine(each) for each in cluster.measured),
        )

    def _in_the_engine(self, alone: Measured) -> Measured:
        key = alone.kind, alone.group
        beyond = max(0.0, self.busy.get(key, 0.0) - (1 - self.overlap))
        latency = alone.latency_seconds * self.factor.get(key, 1.0)
        return replace(alone, latency_seconds=latency, busy_fraction=beyond)


def probes_of(cluster: Cluster) -> list[Probe]:
    """Over all ranks first: the others are measured by that."""
    keep, whole = Option(KEEP), Option(REPLICATE)
    probes = [
        [
            Probed(keep, "forward", ((ALL_GATHER, "world"),)),
            Probed(keep, "backward", ((REDUCE_SCATTER, "world"),)),
            Probed(whole, "backward", ((ALL_REDUCE, "world"),)),
        ]
    ]
    if KEEP_IN_NODE in modes_for(cluster):
        inside = Option(KEEP_IN_NODE)
        probes.append(
            [
                Probed(inside, "forward", ((ALL_GATHER, "node"),)),
                Probed(inside, "backward", ((REDUCE_SCATTER, "node"), (ALL_REDUCE, "across"))),
            ]
        )
    if cluster.has_two_levels:
        both = Option(KEEP, two_levels=True)
        probes.append(
            [
                Probed(both, "forward", ((ALL_GATHER, "across"),)),
                Probed(both, "backward", ((REDUCE_SCATTER, "across"),)),
            ]
        )
    return probes


def time_engine(bench: Bench, cluster: Cluster, *, largest_bytes: int, within: float) -> EngineFigures:
    """See [Note: Engine]; `cluster` has the device and the collectives as fitted, up to `largest_bytes`."""
    host = [Option(REPLICATE), Option(FREE)]
    tiny = TimedStack.of(bench, Stack(TINY_WIDTH, 1, bench.device), cluster, host, within=within / 5)
    options = list(dict.fromkeys(each.option for probe in probes_of(cluster) for each in probe))
    large = [_large_stack(cluster, largest_bytes, share, bench.device) for share in (_FEW, _MANY)]
    few, many = (TimedStack.of(bench, each, cluster, options, within=within * 2 / 5) for each in large)
    return fitted(tiny, few, many)


def fitted(tiny: TimedStack, few: TimedStack, many: TimedStack) -> EngineFigures:
    """The figures with which predictions equal what was measured; one after the other, which settles quickly."""
    found = EngineFigures(0.0, 0.0, {}, {}, ())
    for _ in range(_ROUNDS):
        before = found
        found = _with_host(found, tiny)
        for probe in probes_of(tiny.cluster):
            found = _with_probe(found, few, many, probe)
        if all(abs(found.busy[pair] - before.busy.get(pair, 0.0)) < _SETTLED for pair in found.busy):
            break
    checked = (("tiny", tiny), ("large, few tokens", few), ("large", many))
    return replace(found, passes=tuple(each for name, stack in checked for each in stack.checked(name, found)))


def _large_stack(cluster: Cluster, largest_bytes: int, share: float, device: torch.device) -> Stack:
    """Blocks that take about _GATHER_SECONDS to gather, and this share of it to compute forward."""
    size = 1 << 16
    while 2 * size <= largest_bytes and cluster.collective_seconds(ALL_GATHER, "world", size) < _GATHER_SECONDS:
        size *= 2
    width = max(1, round((size / _WEIGHTS / _BYTES) ** 0.5 / HEAD_WIDTH)) * HEAD_WIDTH
    gather = cluster.collective_seconds(ALL_GATHER, "world", _WEIGHTS * _BYTES * width**2)
    token = cluster.device.matmul_seconds(2 * _WEIGHTS * width**2, "fp32")
    return Stack(width, max(1, round(share * gather / token / LENGTH)), device)


@dataclass(frozen=True)
class TimedStack:
    """A stack's passes under a few options; `cluster` knows the blocks' compute."""

    stack: Stack
    cluster: Cluster
    passes: Mapping[Option, Passes]

    @staticmethod
    def of(bench: Bench, stack: Stack, cluster: Cluster, options: list[Option], *, within: float) -> TimedStack:
        """Timed in turn with the passes of the blocks alone."""
        runs = [stack.plain(), *(stack.under(option, cluster) for option in options)]
        plain, *timed = timed_in_turn(bench, runs, within=within)
        cluster = replace(cluster, stages=stack.timed_stages(plain))
        return TimedStack(stack, cluster, dict(zip(options, timed, strict=True)))

    def measured(self, passes: Probe) -> float:
        return sum(getattr(self.passes[each.option], each.which) for each in passes)

    def predicted(self, option: Option, figures: EngineFigures) -> Passes:
        return self.stack.predicted(option, figures.applied(self.cluster))

    def checked(self, blocks: str, figures: EngineFigures) -> list[CheckedPass]:
        return [
            CheckedPass(blocks, option.mode + (" on two levels" if option.two_levels else ""), which, *seconds)
            for option, measured in self.passes.items()
            for which, *seconds in zip(Passes._fields, measured, self.predicted(option, figures), strict=True)
        ]


def _with_host(found: EngineFigures, tiny: TimedStack) -> EngineFigures:
    """The host's times, given all else."""
    whole, freed = Option(REPLICATE), Option(FREE)
    visit = solve(
        lambda each: tiny.predicted(whole, replace(found, visit_seconds=each)).forward,
        tiny.passes[whole].forward,
        most=_MOST_SECONDS,
        within=_CLOSE,
    )
    found = replace(found, visit_seconds=visit)
    exchange = solve(
        lambda each: sum(tiny.predicted(freed, replace(found, exchange_seconds=each))),
        sum(tiny.passes[freed]),
        most=_MOST_SECONDS,
        within=_CLOSE,
    )
    return replace(found, exchange_seconds=exchange)


def _with_probe(found: EngineFigures, few: TimedStack, many: TimedStack, probe: Probe) -> EngineFigures:
    """The factors of a probe's collectives and how busy they keep, given all else."""
    collectives = [pair for each in probe for pair in each.collectives]

    def changed(busy: float, factor: Figures) -> EngineFigures:
        return replace(
            found, busy={**found.busy, **dict.fromkeys(collectives, busy)}, factor={**found.factor, **factor}
        )

    def seconds(stack: TimedStack, passes: Probe, busy: float, factor: Figures) -> float:
        figures = changed(busy, factor)
        return sum(getattr(stack.predicted(each.option, figures), each.which) for each in passes)

    before = found.busy.get(collectives[0], 0.0)
    over_all = all(group == "world" for _, group in collectives)  # others are too short to be told apart
    factor: Figures = {}
    for passes in [[each] for each in probe] if over_all else [probe]:
        pairs = [pair for each in passes for pair in each.collectives]
        times = solve(
            lambda times, passes=passes, pairs=pairs: seconds(few, passes, before, dict.fromkeys(pairs, times)),
            few.measured(passes),
            least=_LEAST_FACTOR,
            most=_MOST_FACTOR,
            within=_CLOSE,
        )
        factor |= dict.fromkeys(pairs, times)
    busy = solve(lambda busy: seconds(many, probe, busy, factor), many.measured(probe), most=1.0, within=_CLOSE)
    return changed(busy, factor)


def solve(
    predicted: Callable[[float], float], measured: float, *, least: float = 0.0, most: float, within: float = 1e-6
) -> float:
    """Where a prediction that rises meets what was measured, between both ends; by regula falsi."""
    low, high = least, most
    below, above = predicted(low) - measured, predicted(high) - measured
    if below >= 0:
        return low
    if above <= 0:
        return high
    for _ in range(60):
        middle = (low * above - high * below) / (above - below)
        off = predicted(middle) - measured
        if abs(off) <= within * measured:
            return middle
        if off < 0:
            low, below, above = middle, off, above / 2  # the end that stays counts half, else it may stay for ever
        else:
            high, above, below = middle, off, below / 2
    return (low + high) / 2
