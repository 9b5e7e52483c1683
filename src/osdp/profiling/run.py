"""The whole job on one rank: from the machine to a profile, which is a cluster with measured figures."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch

from osdp.cluster import Cluster, Device
from osdp.cluster.device import MEASURED
from osdp.cost.training import PRECISIONS
from osdp.files import plain
from osdp.profiling.bench import SPREAD, Bench
from osdp.profiling.collectives import Carrier, CollectiveRounds, TimedCollective
from osdp.profiling.compute import Rate, kernel_seconds, memory_rate, product_rates
from osdp.profiling.engine import EngineFigures, EngineRounds
from osdp.profiling.machine import Machine, look_around
from osdp.profiling.optimizer import FittedOptimizer, OptimizerRounds
from osdp.profiling.rounds import Rounds
from osdp.profiling.stages import StageRounds, TimedStages
from osdp.runtime.consistency import by_rank_0
from osdp.training.rank_job import RankJob
from osdp.training.world import World, started

if TYPE_CHECKING:
    from osdp.model.source import ModelSource

_SHARES = {"device": 0.1, "rounds": 0.9}


@dataclass(frozen=True)
class Wanted:
    """What to profile beside the cluster, and within which time; sizes that are None are torchrun's.

    `batches` that are None are chosen: see [Note: Batches] in osdp.profiling.stages.
    """

    source: ModelSource | None
    batches: tuple[int, ...] | None
    precision: str | None
    seconds: float
    timeout_seconds: float
    nodes: int | None
    devices_per_node: int | None
    quiet: bool


@dataclass(frozen=True)
class Profile:
    """What was measured: `cluster` has the figures, all else says how good they are."""

    cluster: Cluster
    catalogue: Device | None
    rates: tuple[Rate, ...]
    collectives: tuple[TimedCollective, ...]
    engine: EngineFigures | None
    optimizers: tuple[FittedOptimizer, ...]
    stages: TimedStages | None
    rounds: tuple[float, ...]  # seconds of each
    model: str | None
    precision: str
    notes: tuple[str, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "version": 1,
            "seconds": self.seconds,
            "model": self.model,
            "precision": self.precision,
            "cluster": self.cluster.to_dict(),
            "catalogue": None if self.catalogue is None else self.catalogue.to_dict(),
            "rates": [
                {"what": r.what, "dtype": r.dtype, "per_second": r.per_second, **r.fit.to_dict()} for r in self.rates
            ],
            "collectives": [{**plain(c.measured), **c.fit.to_dict()} for c in self.collectives],
            "engine": None if self.engine is None else [each._asdict() for each in self.engine.passes],
            "optimizers": [{**plain(o.timed), **o.fit.to_dict()} for o in self.optimizers],
            "stages": None
            if self.stages is None
            else {"batches": list(self.stages.batches), "stopped": self.stages.stopped},
            "rounds": list(self.rounds),
            "notes": list(self.notes),
        }


def profile(wanted: Wanted) -> tuple[Profile, bool]:
    """Profiles on all ranks; gives the profile, which is equal on all, and whether this rank leads."""
    with started(timeout_seconds=wanted.timeout_seconds) as world:
        return profile_in(world, wanted), world.leads


def profile_in(world: World, wanted: Wanted) -> Profile:
    """The same in a world that runs already."""
    with RankJob(world, timeout_seconds=wanted.timeout_seconds, quiet=wanted.quiet).under_way() as rank_job:
        profiling = Profiling(wanted, rank_job)
        profiling.rounds.take_all()
        return profiling.profile()


class Profiling:
    """The job on this rank: figures that are taken once, then rounds; `profile` is by all rounds so far."""

    def __init__(self, wanted: Wanted, rank_job: RankJob) -> None:
        self.wanted, self.world = wanted, rank_job.world
        self.bench = Bench(rank_job, budget_seconds=wanted.seconds, shares=_SHARES)
        # Blocks of the user's may return views; nobody changes them in place here.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        self.machine = look_around(self.world, nodes=wanted.nodes, devices_per_node=wanted.devices_per_node)
        self.precision = wanted.precision or ("fp32" if self.world.device.type == "cpu" else "bf16")
        with torch.no_grad():
            self.rates, device = self._device(self.machine)
        self.cluster = replace(self.machine.cluster, device=device)
        self._begin_rounds()
        carrier = Carrier(self.cluster, self.world.device)
        self.collectives = CollectiveRounds(self.bench, carrier, self.cluster) if self.world.size > 1 else None
        self.optimizers = self._optimizers(carrier)
        self.engine = None if self.collectives is None else self._engine(self.collectives)
        self.stages = self._stages()
        parts = (self.collectives, self.optimizers, self.engine, self.stages)
        self.rounds = Rounds(self.bench, [part for part in parts if part is not None])

    def profile(self) -> Profile:
        collectives = [] if self.collectives is None else self.collectives.timed()
        optimizers, cluster = self.optimizers.timed(), _with(self.cluster, collectives)
        engine = None if self.engine is None else self.engine.figures(cluster)
        if engine is not None:
            cluster = engine.applied(cluster)
            both = zip(collectives, cluster.measured, strict=True)
            collectives = [replace(each, measured=measured) for each, measured in both]
        stages = None if self.stages is None else self.stages.timed()
        self.bench.slowest(0.0)
        return Profile(
            cluster=replace(
                cluster,
                name=f"{cluster.word}, profiled",
                optimizers=tuple(each.timed for each in optimizers),
                stages=() if stages is None else stages.stages,
            ),
            catalogue=self.machine.catalogue,
            rates=tuple(self.rates),
            collectives=tuple(collectives),
            engine=engine,
            optimizers=tuple(optimizers),
            stages=stages,
            rounds=tuple(self.rounds.seconds),
            model=None if self.wanted.source is None else self.wanted.source.name,
            precision=self.precision,
            notes=tuple(self._notes(stages)),
            seconds=self.bench.passed_seconds,
        )

    def _device(self, machine: Machine) -> tuple[list[Rate], Device]:
        bench, world = self.bench, self.world
        share = bench.begin("device", f"computing on {world.size} ranks at once")
        with torch.enable_grad():
            kernel = kernel_seconds(bench, within=share / 20)
        rates = [*product_rates(bench, kernel, within=share * 0.7), memory_rate(bench, kernel, within=share / 4)]
        return rates, measured_device(machine.cluster.device, rates, kernel, ranks=world.size)

    def _begin_rounds(self) -> None:
        parts = ["optimizers"]
        if self.world.size > 1:
            parts = ["collectives", *parts, "the engine on stacks of blocks"]
        if self.wanted.source is not None:
            parts.append(f"the stages of {self.wanted.source.name}")
        self.bench.begin("rounds", f"in turn: {', '.join(parts)}")

    def _optimizers(self, carrier: Carrier) -> OptimizerRounds:
        master = torch.bfloat16 if PRECISIONS[self.precision].master_bytes == 2 else torch.float32
        return OptimizerRounds(self.bench, carrier.meshes.world, master=master)

    def _engine(self, collectives: CollectiveRounds) -> EngineRounds:
        cluster = _with(self.cluster, collectives.timed())
        return EngineRounds(self.bench, cluster, largest_bytes=collectives.largest_bytes)

    def _stages(self) -> StageRounds | None:
        source = self.wanted.source
        if source is None:
            return None
        compute_dtype, device = PRECISIONS[self.precision].compute_dtype, self.cluster.device
        graph = by_rank_0(lambda: source.capture(compute_dtype, device=device))
        batches, memory = self.wanted.batches, self.cluster.limit_bytes
        return StageRounds(self.bench, source, graph, batches=batches, memory_bytes=memory)

    def _notes(self, stages: TimedStages | None) -> list[str]:
        notes = []
        if self.bench.spread_out:
            notes.append(
                f"{self.bench.spread_out} of {self.bench.timed} timings kept a spread of more than {SPREAD}x between "
                "their quartiles after repetition: something else ran on the machines"
            )
        unsteady = self.rounds.unsteady()
        if unsteady is not None:
            notes.append(unsteady)
        if stages is not None and stages.stopped:
            notes.append(f"{stages.stopped}: larger batches were not timed")
        return notes


def _with(cluster: Cluster, collectives: Sequence[TimedCollective]) -> Cluster:
    return replace(cluster, measured=tuple(each.measured for each in collectives))


def measured_device(form: Device, rates: Sequence[Rate], kernel: float, *, ranks: int) -> Device:
    """The device with measured figures, at efficiencies of 1; a dtype that was not timed has the rate of fp32."""
    flops = {rate.dtype: rate.per_second for rate in rates if rate.what == "products"}
    memory = next(rate.per_second for rate in rates if rate.what == "memory")
    day = datetime.now(UTC).date().isoformat()
    how = (
        f"osdp profile, {day}, torch {torch.__version__}, {ranks} ranks at once, {torch.get_num_threads()} threads each"
    )
    return replace(
        form,
        peak_flops={dtype: flops.get(dtype, flops["fp32"]) for dtype in form.peak_flops},
        memory_bytes_per_second=memory,
        matmul_efficiency=1.0,
        memory_efficiency=1.0,
        attention_efficiency=0.0,  # stages are timed; what was not is priced by the rule that the rates were taken for
        attention="",
        attention_rates={},
        matmul_traffic=0.0,
        speed_spread=0.0,
        busy_fraction=0.0,
        kernel_seconds=kernel,
        basis=MEASURED,
        note="measured where the profile was taken",
        source={"flops": how, "bandwidth": how, "kernel": how},
    )
