"""What the engine adds to compute and collectives: host overhead, and how far both slow each other.

[Note: Engine]
Stacks of blocks are trained by the real engine, in turn with the same blocks without it, and figures are chosen so that
the predicted passes are as near as can be to the measured ones: least squares of their ratios' logarithms.

Tiny blocks, whose parameters are next to nothing, tell the host's time. Replicated ones send nothing in forward: what
it takes beyond its compute is `unit_overhead_seconds`, one for every unit. Freed ones are gathered twice and reduced:
`collective_overhead_seconds` is for each of these, and `tensor_seconds` for each of the parameters in it. To tell them
apart, the same blocks are run as one unit of twelve parameters and as five of two to four. What large blocks take for
every byte that is copied, beyond the memory's rate, is `copy_byte_seconds`: fresh memory, more than caches hold.

Large blocks tell how far compute and communication hide behind each other. A pass takes max(C, M) + busy · min(C, M) of
each block's compute C and communication M: who carries bytes needs the processor, or units of the accelerator, and
ranks that share CPUs reach a collective at different times. On few tokens, where C is a fraction of M, passes
tell by which `factor` a collective's latency differs from when it was alone: two that are under way hide each other's,
and threads that compute make it longer. Bytes take what they took. On many tokens, where C is about M, all passes of a
`Probe` together tell busy. That of collectives over all ranks is the cluster's overlap, 1 - busy; what those inside
nodes and across them take beyond that is their own `busy_fraction`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from osdp.cluster import Cluster, Measured
from osdp.cost.time_model import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from osdp.cost.units import OPERATORS, WHOLE, Option, modes_for
from osdp.profiling.bench import Bench
from osdp.profiling.line_fit import Array, least_squares
from osdp.profiling.stack import HEAD_WIDTH, LENGTH, Passes, Stack, Turns
from osdp.runtime.consistency import by_rank_0
from osdp.sharding import FREE, KEEP, KEEP_IN_NODE, REPLICATE

TINY_WIDTH = 8
_GATHER_SECONDS = 0.01  # of a large block, about: what a unit's takes on a slow network
_WEIGHTS, _BYTES = 12, 4  # of a block, times its width squared; of a weight
_MOST_SECONDS = 0.9
_FEW, _MANY = 0.2, 0.8  # of a gather, takes the forward on few tokens and on many
_BLOCK_SHARE = 1 / 128  # of the memory may a block take: of each there are eight, a few times, and their gradients
_MOST_FACTOR = 4.0  # of a latency
_UNITS = np.array([1e-3, 1e-3, 1e-3, 1e-9])  # of the host's times: in ms, and of a byte in ns
_FACTOR_WEIGHT = 0.01  # of what a latency's factor differs from 1, beside errors of passes, where these leave it open


Collective = tuple[str, str]  # its kind and group
Figures = dict[Collective, float]


class Probe(NamedTuple):
    """Options of the large stacks, and the collectives that they tell of, which slow computation alike."""

    options: tuple[Option, ...]
    collectives: tuple[Collective, ...]


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

    unit_overhead_seconds: float
    collective_overhead_seconds: float
    tensor_seconds: float
    copy_byte_seconds: float
    busy: Figures
    factor: Figures
    passes: tuple[CheckedPass, ...]

    @property
    def overlap(self) -> float:
        return 1 - self.busy.get((ALL_GATHER, "world"), 0.0)

    def applied(self, cluster: Cluster) -> Cluster:
        return replace(
            cluster,
            unit_overhead_seconds=self.unit_overhead_seconds,
            collective_overhead_seconds=self.collective_overhead_seconds,
            tensor_seconds=self.tensor_seconds,
            copy_byte_seconds=self.copy_byte_seconds,
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
    over_all = tuple((kind, "world") for kind in (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE))
    probes = [Probe((Option(KEEP), Option(REPLICATE), Option(FREE)), over_all)]
    if KEEP_IN_NODE in modes_for(cluster):
        inside = (ALL_GATHER, "node"), (REDUCE_SCATTER, "node"), (ALL_REDUCE, "across")
        probes.append(Probe((Option(KEEP_IN_NODE),), inside))
    if cluster.has_two_levels:
        across = (ALL_GATHER, "across"), (REDUCE_SCATTER, "across")
        probes.append(Probe((Option(KEEP, two_levels=True),), across))
    return probes


class EngineRounds:
    """See [Note: Engine]; `cluster` has the device, and collectives about as they are, up to `largest_bytes`."""

    def __init__(self, bench: Bench, cluster: Cluster, *, largest_bytes: int) -> None:
        host = [Option(REPLICATE), Option(FREE)]
        options = [option for probe in probes_of(cluster) for option in probe.options]
        largest_bytes = min(largest_bytes, int(_BLOCK_SHARE * cluster.limit_bytes))
        large = [_large_stack(cluster, largest_bytes, share, bench.device) for share in (_FEW, _MANY)]
        tiny = [Stack(TINY_WIDTH, 1, bench.device, granularity) for granularity in (WHOLE, OPERATORS)]
        self._turns = [
            *(Turns(bench, stack, host, cluster) for stack in tiny),
            *(Turns(bench, stack, options, cluster) for stack in large),
        ]

    def round(self) -> None:
        for turns in self._turns:
            turns.take()

    def figures(self, cluster: Cluster) -> EngineFigures:
        """By all rounds so far and the cluster's collectives; rank 0 computes them, as others would be in its way."""
        stacks = [TimedStack.of(turns, cluster) for turns in self._turns]
        return by_rank_0(lambda: fitted(*stacks))


def fitted(tiny: TimedStack, split: TimedStack, few: TimedStack, many: TimedStack) -> EngineFigures:
    """The figures whose predictions are nearest to all passes; see [Note: Engine]."""
    stacks = {"tiny": tiny, "tiny, by operators": split, "large, few tokens": few, "large": many}
    unknown = _Unknown(probes_of(tiny.cluster))

    def errors(values: Array) -> Array:
        figures = unknown.figures(values)
        off = [stack.errors(figures) for stack in stacks.values()]
        return np.concatenate([*off, _FACTOR_WEIGHT * (unknown.factors(values) - 1)])

    found = unknown.figures(least_squares(errors, *unknown.bounds()))
    return replace(found, passes=tuple(each for name, stack in stacks.items() for each in stack.checked(name, found)))


class _Unknown:
    """The figures as a vector of numbers about 1: the host's times in ms, how busy each probe's collectives keep, and
    the factors of latencies: of each collective over all ranks, of those inside nodes and across them by probes, as
    these are too short to be told apart.
    """

    def __init__(self, probes: Sequence[Probe]) -> None:
        self._busy = [probe.collectives for probe in probes]
        over_all, *others = self._busy
        self._factors = [*((each,) for each in over_all), *others]

    def bounds(self) -> tuple[Array, Array, Array]:
        """Where to start, the least and the most."""
        busy, factors = len(self._busy), len(self._factors)
        start = np.array([1.0, 1.0, 0.1, 0.1, *[0.5] * busy, *[1.0] * factors])
        most = [*(_MOST_SECONDS / _UNITS), *[1.0] * busy, *[_MOST_FACTOR] * factors]
        return start, np.zeros(len(start)), np.array(most)

    def factors(self, values: Array) -> Array:
        return values[-len(self._factors) :]

    def figures(self, values: Array) -> EngineFigures:
        unit, collective, tensor, byte = (values[: len(_UNITS)] * _UNITS).tolist()
        rest = values[len(_UNITS) :].tolist()
        busy, factors = rest[: len(self._busy)], rest[len(self._busy) :]
        found = _each(self._busy, busy), _each(self._factors, factors)
        return EngineFigures(unit, collective, tensor, byte, *found, ())


def _each(groups: Sequence[tuple[Collective, ...]], values: Sequence[float]) -> Figures:
    """The value of its group for every collective."""
    return {each: value for group, value in zip(groups, values, strict=True) for each in group}


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
    def of(turns: Turns, cluster: Cluster) -> TimedStack:
        plain, *timed = turns.passes()
        cluster = replace(cluster, stages=turns.stack.timed_stages(plain))
        return TimedStack(turns.stack, cluster, dict(zip(turns.options, timed, strict=True)))

    def predicted(self, option: Option, figures: EngineFigures) -> Passes:
        return self.stack.predicted(option, figures.applied(self.cluster))

    def errors(self, figures: EngineFigures) -> Array:
        """Of each pass the logarithm of predicted over measured."""
        predicted = [self.predicted(option, figures) for option in self.passes]
        return np.log(np.array(predicted) / np.array(list(self.passes.values()))).flatten()

    def checked(self, blocks: str, figures: EngineFigures) -> list[CheckedPass]:
        return [
            CheckedPass(blocks, option.mode + (" on two levels" if option.two_levels else ""), which, *seconds)
            for option, measured in self.passes.items()
            for which, *seconds in zip(Passes._fields, measured, self.predicted(option, figures), strict=True)
        ]
