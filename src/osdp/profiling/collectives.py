"""Every collective in every group, as the runtime runs it, fitted to a latency and a rate.

On gloo they run in the communication threads, with their own groups and rings, into buffers that are made anew as FSDP2
makes them; on NCCL they are the library's own. All groups of a kind run at the same time: every node's, and all that
go across nodes, so that what they share is in the rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from osdp.accelerator import DeviceCalls, running_engine
from osdp.cluster import KINDS, Cluster, Measured, wire_bytes
from osdp.engine import ASYNC_GLOO
from osdp.profiling.bench import Action, Bench
from osdp.profiling.line_fit import Fit
from osdp.profiling.rounds import TimedLine
from osdp.runtime import collectives as carried
from osdp.runtime.async_comm import Groups, Job
from osdp.runtime.meshes import meshes_of

SIZES = tuple(1 << power for power in (12, 16, 18, 20, 22, 24))  # of the whole, not of a rank's part
SIZES_ACCELERATOR = (*SIZES, 1 << 26, 1 << 28)
LONG_SECONDS = 0.1  # of one call: nothing larger is timed then


@dataclass(frozen=True)
class TimedCollective:
    measured: Measured
    fit: Fit


class Carrier:
    """Runs collectives as the engine does: see [Note: Engines] in osdp.runtime.meshes."""

    def __init__(self, cluster: Cluster, device: torch.device) -> None:
        engine = running_engine(device)
        self.device, self._calls = device, DeviceCalls(device)
        self.meshes = meshes_of(device.type, cluster.nodes, cluster.devices_per_node, engine=engine)
        self._courier = self.meshes.comm_threads if engine == ASYNC_GLOO else None
        self._stream = self._calls.new_stream()
        self._whole = torch.zeros(0, device=device)

    def _zeros(self, numel: int) -> Tensor:
        """What is reduced, in place: all jobs share it. Sums of whatever was left in memory may be very slow."""
        if numel > len(self._whole):
            self._whole = torch.zeros(numel, device=self.device)
        return self._whole[:numel]

    def start(self, job: Job) -> Callable[[], object]:
        """Begins a collective beside the computation; what is given back waits for it."""
        if self._courier is not None:
            return self._courier.send(job).wait
        if self._stream is None:
            job(self.meshes.groups)
            return lambda: None
        with self._calls.beside(self._stream):
            job(self.meshes.groups)
        return lambda: self._calls.join(self._stream)

    def job(self, kind: str, group: str, total_bytes: int) -> Job:
        """One collective over this many bytes of fp32, its buffers made anew at every call."""
        members = getattr(self.meshes.groups, group)
        ranks, rank = members.size(), members.rank()
        part = max(1, total_bytes // 4 // ranks)
        empty = partial(torch.empty, dtype=torch.float32, device=self.device)
        whole = self._zeros(part * ranks)

        def gather(own: Groups) -> None:
            output = empty(part * ranks)
            carried.gather(output, output.narrow(0, part * rank, part), getattr(own, group))

        def scatter(own: Groups) -> None:
            carried.scatter_and_average(empty(part), whole, empty(part), getattr(own, group))

        def reduce(own: Groups) -> None:
            carried.average(whole, empty(part), getattr(own, group), ranks)

        return torch.no_grad()({"all_gather": gather, "reduce_scatter": scatter, "all_reduce": reduce}[kind])

    def action(self, kind: str, group: str, total_bytes: int) -> Action:
        """The same, waited for."""
        job = self.job(kind, group, total_bytes)
        return lambda: self.start(job)()


def groups_of(cluster: Cluster) -> tuple[str, ...]:
    """The groups of more than one rank, each under one name: with one node, or one device in each, there is one."""
    if cluster.world_size == 1:
        return ()
    return ("world",) if 1 in (cluster.nodes, cluster.devices_per_node) else ("world", "node", "across")


class CollectiveRounds:
    """Every kind of collective in every group, at every size once in a round."""

    def __init__(self, bench: Bench, carrier: Carrier, cluster: Cluster) -> None:
        self._bench, self._carrier = bench, carrier
        self._lines = {(kind, group): TimedLine[int](bench) for group in groups_of(cluster) for kind in KINDS}
        self._largest = {pair: self._admit(*pair) for pair in self._lines}
        self.round()  # now `timed` knows about what they take

    def _admit(self, kind: str, group: str) -> int:
        """Takes up sizes until one takes long; gives the largest."""
        ranks = getattr(self._carrier.meshes.groups, group).size()
        sizes = SIZES if self._bench.device.type == "cpu" else SIZES_ACCELERATOR
        largest = 0
        for size in sizes:
            self._bench.watch(f"{kind} in {group}")
            moved = wire_bytes(kind, ranks, max(1, size // 4 // ranks) * 4 * ranks)
            action = self._carrier.action(kind, group, size)
            once = self._lines[kind, group].admit(size, action, (1.0, moved))
            largest = size
            if once > LONG_SECONDS:
                break
        return largest

    def round(self) -> None:
        for line in self._lines.values():
            line.round()

    @property
    def largest_bytes(self) -> int:
        """What every collective was timed with, at least."""
        return min(self._largest.values())

    def timed(self) -> list[TimedCollective]:
        """By all rounds so far."""
        found = {pair: line.fit() for pair, line in self._lines.items()}
        return [TimedCollective(Measured(*pair, line.first, 1 / line.second), line) for pair, line in found.items()]
