"""The whole job on all ranks, in about a minute: look, time the links, train in every mode, compare the memory."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from osdp.accelerator import DeviceCalls, group_backend, running_engine
from osdp.cluster import KINDS, Cluster
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.cost.units import modes_for
from osdp.doctor.exact import Exactness, variants
from osdp.doctor.facts import of_rank, versions
from osdp.doctor.report import Check, MeasuredLink, MeasuredPeak, Report
from osdp.doctor.subject import Subject, sizeable, small
from osdp.errors import UsageError
from osdp.planfile import Plan
from osdp.planning import plan_graph
from osdp.profiling.bench import Bench
from osdp.profiling.collectives import Carrier, groups_of
from osdp.profiling.machine import look_around
from osdp.profiling.trial import WARM_UP_STEPS, Tried
from osdp.recompute import Recompute
from osdp.runtime.consistency import by_rank_0
from osdp.training.rank_job import RankJob
from osdp.training.world import World, started

LINK_SECONDS = 20.0
SIZES_CPU, SIZES_ACCELERATOR = (1 << 16, 1 << 20), (1 << 20, 1 << 26)
PEAK_LIMIT = 0.05  # of the allocated bytes: libraries allocate a little of their own
_PEAK_REMEDY = "send the report; until then leave that much room with --memory"


@dataclass(frozen=True)
class Wanted:
    timeout_seconds: float
    quiet: bool


def examine(wanted: Wanted) -> tuple[Report, bool]:
    """Starts, or joins, the ranks; gives the report and whether this rank leads."""
    with started(timeout_seconds=wanted.timeout_seconds) as world:
        rank_job = RankJob(world, timeout_seconds=wanted.timeout_seconds, quiet=wanted.quiet)
        with rank_job.under_way():
            return _examined(rank_job), world.leads


def _examined(rank_job: RankJob) -> Report:
    began, world = time.monotonic(), rank_job.world
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    rank_job.say("looking around")
    machine = look_around(world, nodes=None, devices_per_node=None)
    ranks: list[dict[str, object]] = [{} for _ in range(world.size)]
    dist.all_gather_object(ranks, of_rank(world))
    shared = _same_device(ranks)
    if shared is not None:
        raise UsageError(shared)
    links = _links(rank_job, machine.cluster)
    exact = _exactness(rank_job, machine.cluster)
    peaks = _peaks(rank_job, machine.cluster)
    memory = [
        Check(f"memory: {peak.mode}", peak.error, PEAK_LIMIT, _PEAK_REMEDY, "planned against allocated")
        for peak in peaks
    ]
    return Report(
        versions=versions(),
        ranks=tuple(ranks),
        cluster=machine.cluster.label,
        engine=running_engine(world.device).name,
        backend=group_backend(world.device.type) or "",
        known_device=machine.catalogue is not None,
        links=tuple(links),
        peaks=tuple(peaks),
        checks=(*exact, *memory),
        notes=tuple(_notes(world, ranks, known=machine.catalogue is not None)),
        seconds=time.monotonic() - began,
    )


def _same_device(ranks: list[dict[str, object]]) -> str | None:
    """Ranks must not share an accelerator."""
    places: dict[tuple[object, object], object] = {}
    for each in ranks:
        place = each["host"], each["device"]
        if each["device"] != "cpu" and place in places:
            return (
                f"ranks {places[place]} and {each['rank']} both use {each['device']} of {each['host']};"
                " start ranks with torchrun, which gives each a LOCAL_RANK of its own"
            )
        places[place] = each["rank"]
    return None


def _links(rank_job: RankJob, cluster: Cluster) -> list[MeasuredLink]:
    """Every collective in every group at two sizes."""
    if cluster.world_size == 1:
        return []
    bench = Bench(rank_job, budget_seconds=LINK_SECONDS, shares={"links": 1.0})
    bench.begin("links", f"collectives over {cluster.world_size} ranks")
    carrier = Carrier(cluster, rank_job.world.device)
    sizes = SIZES_CPU if rank_job.world.device.type == "cpu" else SIZES_ACCELERATOR
    cases = [(kind, group, size) for kind in KINDS for group in groups_of(cluster) for size in sizes]
    found = []
    for kind, group, size in cases:
        bench.watch(f"{kind} in {group}")
        seconds = bench.seconds(carrier.action(kind, group, size), within=LINK_SECONDS / len(cases) / 2)
        found.append(MeasuredLink(kind, group, size, seconds, cluster.collective_seconds(kind, group, size)))
    return found


def _exactness(rank_job: RankJob, cluster: Cluster) -> list[Check]:
    subject = small()
    (plan,) = _plans(subject, cluster, "fp32", modes_for(cluster)[-1:])
    checked, found = Exactness(subject, rank_job.world), []
    for name, variant in variants(plan):
        rank_job.say(f"training a small model: {name}")
        found.append(checked.check(name, variant))
    return found


def _peaks(rank_job: RankJob, cluster: Cluster) -> list[MeasuredPeak]:
    """One plan of each mode that differs here; the allocator counts on accelerators, torch's profiler on CPUs."""
    world, subject, found = rank_job.world, sizeable(rank_job.world), []
    precision = "fp32" if world.device.type == "cpu" else "bf16"
    modes = modes_for(cluster)
    for mode, plan in zip(modes, _plans(subject, cluster, precision, modes), strict=True):
        rank_job.say(f"memory of a step: {mode}")
        calls = DeviceCalls(world.device)
        calls.free_cached()
        tried = Tried(subject.source, plan, world)
        for _ in range(WARM_UP_STEPS):
            tried.step()
        own = tried.peak_bytes()
        reserved = calls.peak_reserved_bytes() if calls.has_streams else 0
        peak, reserved = (int(max(column)) for column in zip(*world.all_numbers(own, reserved), strict=True))
        predicted = plan.predicted
        found.append(MeasuredPeak(mode, predicted.peak_bytes, peak, reserved or None, predicted.reserve_bytes))
        del tried
    return found


def _plans(subject: Subject, cluster: Cluster, precision: str, modes: Sequence[str]) -> list[Plan]:
    """A plan for each mode, in which every unit has it, at the subject's batch."""
    training = Training.of(precision)

    def make() -> list[Plan]:
        kind = training.precision
        graph = subject.source.capture(kind.compute_dtype, held_dtype=kind.held_dtype)
        rules = [Rules(modes=(mode,), split=False, recompute=(Recompute.NONE,), two_levels=False) for mode in modes]
        return [plan_graph(graph, cluster, training, each, batch=subject.samples, accumulation=1) for each in rules]

    return by_rank_0(make)


def _notes(world: World, ranks: list[dict[str, object]], *, known: bool) -> list[str]:
    notes = []
    seen, here = ranks[0]["devices_seen"], world.local_size
    if isinstance(seen, int) and seen > here:
        notes.append(f"{here} of {seen} devices of this node ran; torchrun --nproc-per-node {seen} runs all")
    if world.size == 1:
        notes.append("one rank runs, so no collective was checked; start as many as you train with, by torchrun")
    if not known:
        notes.append(f"{ranks[0]['name']} is not in the catalogue: osdp profile measures it")
    if world.device.type == "cpu":
        notes.append("no accelerator was found: CPUs were checked")
    return notes
