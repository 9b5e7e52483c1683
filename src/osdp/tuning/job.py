"""`osdp tune` on one rank: the world, the cluster it is planned for, the model's own times, then the rounds."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

from osdp.cluster import Cluster
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.errors import UsageError
from osdp.model.graph import ModelGraph
from osdp.model.source import ModelSource
from osdp.profiling.bench import Bench
from osdp.profiling.rounds import Rounds
from osdp.profiling.stages import StageRounds
from osdp.recompute import read_recompute
from osdp.sharding import MODES
from osdp.training.rank_job import RankJob
from osdp.training.run import this_cluster
from osdp.training.world import World, started
from osdp.tuning.run import Tuned, Tuner, Wanted

STAGE_SECONDS = 5.0


@dataclass(frozen=True)
class Job:
    """What was asked for; None is the cluster's, or the device's, own."""

    name: str
    cluster: Cluster | None
    memory_bytes: int | None
    precision: str | None
    optimizer: str
    reduce_dtype: str | None
    batch: int | None
    global_batch: int | None
    pins: Mapping[str, str]
    modes: tuple[str, ...] | None
    split: bool
    recompute: str
    candidates: int
    steps: int
    timeout_seconds: float
    quiet: bool


def tune(job: Job, source: ModelSource) -> tuple[Tuned, bool]:
    """Tunes on all ranks; gives the result, which is equal on all, and whether this rank leads."""
    with started(timeout_seconds=job.timeout_seconds) as world:
        return tune_in(world, job, source), world.leads


def tune_in(world: World, job: Job, source: ModelSource) -> Tuned:
    """The same in a world that runs already."""
    with RankJob(world, timeout_seconds=job.timeout_seconds, quiet=job.quiet).under_way() as rank_job:
        return _Run(job, source, rank_job).tuned()


class _Run:
    def __init__(self, job: Job, source: ModelSource, rank_job: RankJob) -> None:
        self.job, self.source, self.rank_job, self.world = job, source, rank_job, rank_job.world

    def tuned(self) -> Tuned:
        job, world = self.job, self.world
        if not world.leads:
            warnings.filterwarnings("ignore")  # rank 0 has the same ones
        cluster = job.cluster or this_cluster(world, memory_bytes=job.memory_bytes)
        if cluster.world_size != world.size:
            raise UsageError(
                f"--cluster {cluster.label} has {cluster.world_size} devices but {world.size} ranks run; start as many"
            )
        if job.memory_bytes is not None:
            cluster = replace(cluster, memory_bytes=job.memory_bytes)
        precision = job.precision or ("fp32" if world.device.type == "cpu" else "bf16")
        training = Training.of(precision, job.optimizer, job.reduce_dtype)
        self.rank_job.say("tracing the model")
        kind = training.precision
        graph = self.source.capture(
            kind.compute_dtype, held_dtype=kind.held_dtype, device=cluster.device, name=job.name
        )
        rules = Rules(modes=job.modes or MODES, split=job.split, pins=dict(job.pins) or None)
        rules = replace(rules, recompute=read_recompute(job.recompute))
        wanted = Wanted(training, rules, job.batch, job.global_batch, job.candidates, job.steps)
        return Tuner(self.source, graph, self._timed(cluster, graph), wanted, world).tuned(self.rank_job.say)

    def _timed(self, cluster: Cluster, graph: ModelGraph) -> Cluster:
        """The cluster with the model's stages timed, where its profile has none of them."""
        if any(cluster.timed_stage(stage.plain.signature) for stage in graph.stages):
            return cluster
        bench = Bench(self.rank_job, budget_seconds=STAGE_SECONDS, shares={"stages": 1.0})
        bench.begin("stages", "timing the model's blocks")
        stages = StageRounds(bench, self.source, graph, memory_bytes=cluster.limit_bytes)
        Rounds(bench, [stages]).take_all()
        return replace(cluster, stages=(*cluster.stages, *stages.timed().stages))
