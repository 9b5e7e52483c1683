"""Every collective in every group, as the runtime runs it, fitted to a latency and a rate.

On gloo the courier's own groups, thread and rings carry them, into buffers that are made anew as FSDP2 makes them; on
NCCL they are the library's own. All groups of a kind run at the same time: every node's, and all that go across nodes,
so that what they share is in the rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from osdp.cluster import KINDS, Cluster, Measured, wire_bytes
from osdp.profiling.bench import Action, Bench
from osdp.profiling.fit import Fit, Point, settled
from osdp.runtime import collectives as carried
from osdp.runtime.courier import Groups, Job
from osdp.runtime.meshes import meshes_of

SIZES = tuple(1 << power for power in range(12, 25, 2))  # of the whole, not of a rank's part
SIZES_CUDA = (*SIZES, 1 << 26, 1 << 28)
LONGEST_SECONDS = 0.5  # of one call: nothing larger is timed then
ENOUGH_SECONDS = 1.0  # for one collective; with less, every other size is timed: both ends are needed for a line


@dataclass(frozen=True)
class TimedCollective:
    measured: Measured
    fit: Fit
    largest_bytes: int


class Carrier:
    """Runs collectives as the engine does: see [Note: Engines] in osdp.runtime.meshes."""

    def __init__(self, cluster: Cluster, device: torch.device) -> None:
        carried = dist.get_backend() == dist.Backend.GLOO
        self.device = device
        self.meshes = meshes_of(device.type, cluster.nodes, cluster.devices_per_node, carried=carried)
        self._courier = self.meshes.courier if carried else None
        self._stream = None if carried else torch.cuda.Stream(device)

    def start(self, job: Job) -> Callable[[], object]:
        """Begins a collective beside the computation; what is given back waits for it."""
        if self._courier is not None:
            return self._courier.send(job).wait
        assert self._stream is not None
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            job(self.meshes.groups)
        return lambda: torch.cuda.current_stream().wait_stream(stream)

    def job(self, kind: str, group: str, total_bytes: int) -> Job:
        """One collective over this many bytes of fp32, its buffers made anew at every call."""
        members = getattr(self.meshes.groups, group)
        ranks, rank = members.size(), members.rank()
        part = max(1, total_bytes // 4 // ranks)
        empty = partial(torch.empty, dtype=torch.float32, device=self.device)
        whole = torch.zeros(part * ranks, device=self.device)  # sums of what was left in memory may be very slow

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


def time_collectives(bench: Bench, carrier: Carrier, cluster: Cluster, *, within: float) -> list[TimedCollective]:
    pairs = [(kind, group) for group in groups_of(cluster) for kind in KINDS]
    found = []
    for kind, group in pairs:
        bench.watch(f"{kind} in {group}")
        found.append(_timed(bench, carrier, kind, group, within / len(pairs)))
    return found


def _timed(bench: Bench, carrier: Carrier, kind: str, group: str, within: float) -> TimedCollective:
    sizes = SIZES_CUDA if bench.device.type == "cuda" else SIZES
    sizes = sizes if within >= ENOUGH_SECONDS else sizes[::2]
    ranks = getattr(carrier.meshes.groups, group).size()
    began = bench.passed_seconds

    def late() -> bool:
        return bench.passed_seconds - began > 2 * within

    def timed(size: int) -> Point:
        seconds = bench.seconds(carrier.action(kind, group, size), within=within / len(sizes))
        return Point((1.0, wire_bytes(kind, ranks, max(1, size // 4 // ranks) * 4 * ranks)), seconds)

    points: dict[int, Point] = {}
    for size in sizes:
        points[size] = timed(size)
        if points[size].seconds > LONGEST_SECONDS and len(points) > 1:
            break
    line = settled(points, timed, late=late)
    return TimedCollective(Measured(kind, group, line.first, 1 / line.second), line, max(points))
