"""What a step takes: compute by roofline, collectives by latency and bandwidth, copies and the optimizer by memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from osdp.cluster import Cluster
from osdp.cluster.measured import at_least as timed_at_least
from osdp.cluster.measured import between as timed_at
from osdp.cost.kernel_time import KernelTime
from osdp.cost.offload import adding_seconds, input_seconds, to_device_seconds, to_host_seconds
from osdp.cost.positions import Places
from osdp.cost.training import Training
from osdp.cost.units import Option, Sizes, Unit
from osdp.model.graph import FloatArray, Segment, Trace
from osdp.model.kernels import KernelKind
from osdp.sharding import ShardingMode

TO_HOST = "to_host"  # a copy that is no collective, on the stream of the reduction before it
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather", "reduce_scatter", "all_reduce"
FORWARD, BACKWARD = "forward", "backward"


class Compute:
    """Seconds of a pass of a stage: its kernels, and the copy of its input where that is on the host.

    See [Note: Kernel rates] in osdp.cost.kernel_time and [Note: Inputs] in osdp.cost.offload.

    Segments add up, and none takes longer a sample where there are more of them.
    """

    def __init__(self, trace: Trace, cluster: Cluster, training: Training, *, backward: bool) -> None:
        segments = trace.backward if backward else trace.forward
        none = np.zeros((0, 2), dtype=np.int64)
        self.flops = np.concatenate([none, *(segment.flops for segment in segments)])
        self.moved = np.concatenate([none, *(segment.moved for segment in segments)])
        kinds = np.concatenate([np.zeros(0, dtype=np.int64), *(segment.kinds for segment in segments)])
        dtype = training.precision.compute_dtype
        self._kernels = KernelTime(self.flops, self.moved, kinds, cluster, dtype, compiled=training.compiled)
        self._is_collective = kinds == KernelKind.COLLECTIVE
        self._behind = np.cumsum([0, *(len(segment.flops) for segment in segments)])  # kernels before each segment
        self._known: dict[int, FloatArray] = {}
        self._trace, self._cluster = trace, cluster
        self._copied = _copied_in(segments, backward=backward) if trace.is_on_host else None

    def _before(self, batch: int) -> FloatArray:
        """Seconds of all kernels before each segment, by the rule."""
        if batch not in self._known:
            sums = np.concatenate([[0.0], np.cumsum(self._kernels.each(batch))])
            self._known[batch] = sums[self._behind]
        return self._known[batch]

    def at(self, batch: int) -> float:
        return self._kernels_at_least(batch, batch) + self.copies(0, len(self._behind) - 1, batch)

    def at_least(self, low: int, high: int) -> float:
        """Seconds of batch `high` at the best rate per sample from `low` on: its own, as launches are shared."""
        return self._kernels_at_least(low, high) + self.copies(0, len(self._behind) - 1, high)

    def between(self, first: int, stop: int, low: int, high: int) -> float:
        """The same as `at_least` of the segments from `first` up to `stop`."""
        return self._kernels_between(first, stop, low, high) + self.copies(first, stop, high)

    def copies(self, first: int, stop: int, batch: int) -> float:
        """Of these seconds those of a copy over the host's link."""
        is_inside = self._copied is not None and first <= self._copied < stop
        return input_seconds(self._trace, batch, self._cluster) if is_inside else 0.0

    def _kernels_at_least(self, low: int, high: int) -> float:
        return float(self._before(high)[-1])

    def _kernels_between(self, first: int, stop: int, low: int, high: int) -> float:
        before = self._before(high)
        return float(before[stop] - before[first])

    def flops_at(self, batch: int) -> int:
        return int((self.flops @ np.array([1, batch])).sum())


def _copied_in(segments: Sequence[Segment], *, backward: bool) -> int:
    """The segment in which a block's input is copied: as its forward begins, or before its second one does."""
    entered = (n for n, s in enumerate(segments) if s.mark.kind == "enter" and s.mark.recomputed == backward)
    return max(0, next(entered, 0) - backward)


class TimedCompute(Compute):
    """The same, where a profile timed this stage's kernels; a larger layout's collectives among them come on top."""

    def __init__(
        self,
        trace: Trace,
        cluster: Cluster,
        training: Training,
        batches: tuple[int, ...],
        seconds: tuple[float, ...],
        *,
        backward: bool,
    ) -> None:
        super().__init__(trace, cluster, training, backward=backward)
        self._timed = batches, seconds

    def at(self, batch: int) -> float:
        return (
            timed_at(*self._timed, batch) + self._collectives(batch)[-1] + self.copies(0, len(self._behind) - 1, batch)
        )

    def _kernels_at_least(self, low: int, high: int) -> float:
        return timed_at_least(*self._timed, low, high) + float(self._collectives(high)[-1])

    def _kernels_between(self, first: int, stop: int, low: int, high: int) -> float:
        """By the roofline at the largest batch size that was timed, the segments' share of the whole."""
        largest = max(self._timed[0])
        before = self._before(largest) - self._collectives(largest)
        whole = float(before[-1])
        own = float(before[stop] - before[first]) / whole * timed_at_least(*self._timed, low, high) if whole else 0.0
        waits = self._collectives(high)
        return own + float(waits[stop] - waits[first])

    def _collectives(self, batch: int) -> FloatArray:
        """Seconds of collectives before each segment."""
        if not self._is_collective.any():
            return np.zeros(len(self._behind))
        sums = np.concatenate([[0.0], np.cumsum(np.where(self._is_collective, self._kernels.each(batch), 0.0))])
        return sums[self._behind]


def compute_time(trace: Trace, cluster: Cluster, training: Training, *, backward: bool) -> Compute:
    """The compute of one pass of a stage: as timed where the cluster's profile has it, else by roofline."""
    timed = cluster.timed_stage(trace.signature) if cluster.stages else None
    if timed is None:
        return Compute(trace, cluster, training, backward=backward)
    seconds = timed.backward_seconds if backward else timed.forward_seconds
    return TimedCompute(trace, cluster, training, timed.batches, seconds, backward=backward)


def taken_seconds(seconds: float, busy: float) -> float:
    """What a collective takes from the computation beside it, in the sum of a phase; all of its seconds at most."""
    return min(1.0, busy) * seconds


class Collective(NamedTuple):
    """One collective, or local copy, that a unit's option asks for in a phase."""

    kind: str
    group: str | None
    nbytes: int
    seconds: float
    copied_bytes: int  # moved on the device beside it: casts, copies in and out
    copy_seconds: float
    busy: float = 0.0  # see [Note: Engine] in osdp.profiling.engine
    once: bool = False  # in the last micro-batch only
    first: bool = False  # in the first micro-batch only

    @property
    def taken_seconds(self) -> float:
        return taken_seconds(self.seconds, self.busy)


@dataclass(frozen=True)
class UnitWork:
    """All that a unit's option adds to a step beside its kernels."""

    gather: tuple[Collective, ...]
    gather_again: tuple[Collective, ...]
    reduce: tuple[Collective, ...]
    step_bytes: int
    step_seconds: float


def unit_work(unit: Unit, option: Option, places: Places, training: Training, cluster: Cluster) -> UnitWork:
    """The collectives of a unit's option; with slices, one of each kind for every slice."""
    works = [(slice_work(unit, option, mode, places, training, cluster), count) for mode, count in option.held]
    return UnitWork(
        gather=tuple(each for work, count in works for each in work.gather * count),
        gather_again=tuple(each for work, count in works for each in work.gather_again * count),
        reduce=tuple(each for work, count in works for each in work.reduce * count),
        step_bytes=sum(work.step_bytes * count for work, count in works),
        step_seconds=sum(work.step_seconds * count for work, count in works),
    )


def slice_work(
    unit: Unit, option: Option, mode: ShardingMode, places: Places, training: Training, cluster: Cluster
) -> UnitWork:
    """The collectives of a unit, or of one of its slices, that is held in `mode`."""
    gather: list[Collective] = []
    again: list[Collective] = []
    reduce: list[Collective] = []
    cluster = unit.held_by(cluster)
    sizes = unit.sizes(mode, cluster, option.slices)
    two_levels = option.crosses(mode)
    if places.enter is not None:
        gather = _gather(mode, sizes, training, cluster, again=False, two_levels=two_levels)
        if option.stays_gathered(training.accumulation):  # host overhead comes with every pass
            gather = [*_with_unit_overhead([], cluster), *(each._replace(first=True) for each in gather)]
        else:
            gather = _with_unit_overhead(gather, cluster)
    in_vain = places.issue_backward is not None and mode.is_gathered_again  # see [Note: Left at the end]
    if in_vain or (places.enter_backward is not None and (not mode.is_kept)):
        again = _gather(mode, sizes, training, cluster, again=True, two_levels=two_levels)
    if option.offload:
        gather, again = (_from_host(work, sizes, training, cluster) for work in (gather, again))
    if unit.trained and places.leave_backward is not None:
        reduce = _with_unit_overhead(_reduce(mode, sizes, option, training, cluster), cluster)
        if option.offload:
            reduce = _to_host(reduce, sizes, training, cluster)
        late = [option.reduce_once or (option.defers(mode) and each.kind == ALL_REDUCE) for each in reduce]
        reduce = [each._replace(once=once) for each, once in zip(reduce, late, strict=True)]
    held = training.precision.master_bytes * sizes.trained
    step_bytes = training.optimizer.passes * held
    timed = cluster.timed_optimizer(training.optimizer.name)
    seconds = cluster.device.memory_seconds(step_bytes)
    if timed is not None:
        seconds = len(sizes.gradients) * timed.tensor_seconds + held * timed.byte_seconds
    if option.offload:
        seconds = cluster.host_seconds(step_bytes)
    if training.optimizer.exchanges and mode.is_sharded:
        seconds += _exchange_seconds(mode, sizes, training, cluster)
    return UnitWork(tuple(gather), tuple(again), tuple(reduce), step_bytes, seconds)


def _from_host(work: list[Collective], sizes: Sizes, training: Training, cluster: Cluster) -> list[Collective]:
    """A gather whose shard the computation's stream copies in first; see [Note: Offload] in osdp.cost.offload."""
    seconds = to_device_seconds(sizes, training, cluster)
    return [each._replace(copy_seconds=each.copy_seconds + seconds) for each in work[:1]] + work[1:]


def _to_host(work: list[Collective], sizes: Sizes, training: Training, cluster: Cluster) -> list[Collective]:
    """A reduction whose result is copied out; of several micro-batches the host adds, and the computation waits."""
    nbytes = sizes.trained * training.precision.master_bytes
    out = Collective(TO_HOST, None, nbytes, to_host_seconds(sizes, training, cluster), 0, 0.0)
    if training.accumulation == 1:
        return [*work, out]
    out = out._replace(seconds=out.seconds + adding_seconds(sizes, training, cluster))
    return [each._replace(seconds=0.0, copy_seconds=each.copy_seconds + each.seconds) for each in (*work, out)]


def _exchange_seconds(mode: ShardingMode, sizes: Sizes, training: Training, cluster: Cluster) -> float:
    """What adding up a unit's factors takes; they are sent with those of all units, so that latency counts nothing."""
    optimizer, master = training.optimizer, training.precision.master_bytes
    nbytes = sum(optimizer.format.nbytes(shape, master) for _, shape in sizes.shards)
    group = "node" if mode.is_reduced_across else "world"
    return cluster.collective_seconds(ALL_REDUCE, group, nbytes) - cluster.collective_seconds(ALL_REDUCE, group, 0)


def _with_unit_overhead(work: list[Collective], cluster: Cluster) -> list[Collective]:
    """The same with the host overhead of a unit's pass, before its first collective."""
    if not cluster.unit_overhead_seconds:
        return work
    first, *rest = work or [Collective("copy", None, 0, 0.0, 0, 0.0)]
    return [first._replace(copy_seconds=first.copy_seconds + cluster.unit_overhead_seconds), *rest]


def _collective(kind: str, group: str, nbytes: int, copied: int, tensors: int, cluster: Cluster) -> Collective:
    """With no tensors it is the next step of an exchange for which the host has taken its time."""
    launch = cluster.device.kernel_seconds
    seconds = cluster.collective_seconds(kind, group, nbytes)
    beside = cluster.copy_seconds(copied)
    beside += launch + cluster.collective_overhead_seconds + tensors * cluster.tensor_seconds if tensors else 0.0
    busy = cluster.busy_fraction(kind, group)
    return Collective(kind, group, nbytes, seconds + launch, copied, beside, busy)


def _over_world(
    kind: str, nbytes: int, copied: int, tensors: int, cluster: Cluster, *, two_levels: bool
) -> list[Collective]:
    """A gather or scatter over all ranks, in one step or on two levels: then the nodes' parts go one by one."""
    if not two_levels:
        return [_collective(kind, "world", nbytes, copied, tensors, cluster)]
    across = _collective(kind, "across", nbytes // cluster.devices_per_node, copied, tensors, cluster)
    inside = [_collective(kind, "node", nbytes // cluster.nodes, 0, 0, cluster)] * cluster.nodes
    return [across, *inside] if kind == ALL_GATHER else [*inside, across]


def _gather(
    mode: ShardingMode, sizes: Sizes, training: Training, cluster: Cluster, *, again: bool, two_levels: bool
) -> list[Collective]:
    master, compute = training.precision.master_bytes, training.precision.compute_bytes
    nbytes = sizes.gathered * compute
    if not mode.is_sharded:  # a local cast, or nothing: see [Note: In place] in osdp.cost.lifetimes
        if not training.precision.casts:
            return []
        copied = sizes.gathered * (master + compute)
        seconds = cluster.copy_seconds(copied) + cluster.device.kernel_seconds
        return [Collective("copy", None, nbytes, 0.0, copied, seconds)]
    copied, tensors = 2 * nbytes + 2 * sizes.moved * compute, len(sizes.tensors)
    if mode.is_reduced_across or (mode.is_sharded_anew and again):
        return [_collective(ALL_GATHER, "node", nbytes, copied, tensors, cluster)]
    return _over_world(ALL_GATHER, nbytes, copied, tensors, cluster, two_levels=two_levels)


def _reduce(mode: ShardingMode, sizes: Sizes, option: Option, training: Training, cluster: Cluster) -> list[Collective]:
    compute, reduce = training.precision.compute_bytes, training.reduce_bytes
    nbytes, tensors = sizes.reduced * reduce, len(sizes.gradients)
    moved = sum(numel for _, numel in sizes.moved_gradients)
    copied = (sum(numel for _, numel in sizes.gradients) + 2 * moved) * compute + nbytes
    if not mode.is_sharded:
        return [_all_reduce(nbytes, copied + 2 * nbytes, tensors, option, option.carries * reduce, cluster)]
    if mode.is_reduced_across:
        return [
            _collective(REDUCE_SCATTER, "node", nbytes, copied, tensors, cluster),
            _collective(ALL_REDUCE, "across", sizes.trained * reduce, 0, 0, cluster),
        ]
    return _over_world(REDUCE_SCATTER, nbytes, copied, tensors, cluster, two_levels=option.crosses(mode))


def _all_reduce(nbytes: int, copied: int, tensors: int, option: Option, carried: int, cluster: Cluster) -> Collective:
    """A replica's, which may be joined with others': see [Note: Joined reductions] in osdp.cost.buckets."""
    if option.reduced_with is not None:
        seconds = cluster.copy_seconds(copied) + tensors * cluster.tensor_seconds
        return Collective("copy", None, nbytes, 0.0, copied, seconds)
    packed = 4 * (nbytes + carried) if carried else 0  # read and written, in both directions
    return _collective(ALL_REDUCE, "world", nbytes + carried, copied + packed, tensors, cluster)
