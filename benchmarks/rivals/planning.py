"""What osdp needs before it trains: a profile of these ranks with this model, then plans within the limit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from osdp.api import plan_graph
from osdp.cluster import Cluster
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.model.graph import ModelGraph
from osdp.planfile import Plan
from osdp.profiling.run import Wanted, profile_in
from osdp.runtime.consistency import by_rank_0
from osdp.sharding import FREE, REPLICATE
from osdp.training.world import World

from .cells import Cell
from .models import source_of
from .planned import OPTIMIZER, uniform_rules

TIMEOUT_SECONDS = 300.0
SEARCH_SECONDS = 20.0  # the default of `osdp plan`
PAPERS_RULES = Rules(modes=(REPLICATE, FREE), split=False, two_levels=False)
RULES = {
    "osdp": Rules(),
    "paper's space": PAPERS_RULES,
}


@dataclass(frozen=True)
class Planner:
    """A captured model and the cluster as it was measured."""

    graph: ModelGraph
    cluster: Cluster
    training: Training

    @staticmethod
    def measured(cell: Cell, world: World, *, seconds: float) -> Planner:
        source = source_of(cell.model, cell.shape)
        wanted = Wanted(source, None, "fp32", seconds, TIMEOUT_SECONDS, None, None, quiet=True)
        graph = by_rank_0(lambda: source.capture("fp32"))
        return Planner(graph, profile_in(world, wanted).cluster, Training.of("fp32", OPTIMIZER))

    def within(self, limit_bytes: int) -> Cluster:
        return replace(self.cluster, memory_bytes=limit_bytes, reserve_fraction=0.0)

    def best(self, rules: Rules, limit_bytes: int, *, batch: int | None = None) -> Plan:
        """The planner's choice, batch and all; raises DoesNotFit on all ranks."""
        cluster = self.within(limit_bytes)
        limits = {"batch": batch, "search_seconds": SEARCH_SECONDS}
        return by_rank_0(lambda: plan_graph(self.graph, cluster, self.training, rules, **limits))

    def freed(self, batch: int, recompute: str) -> Plan:
        """FSDP2's plan at a batch size."""
        cluster = self.within(1 << 36)
        rules = uniform_rules(FREE, recompute)
        return by_rank_0(lambda: plan_graph(self.graph, cluster, self.training, rules, batch=batch))
