"""The plans that are run: familiar ones, and the planner's own under a range of memory limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from osdp.cluster import Cluster
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.errors import DoesNotFit
from osdp.infeasible import smallest_timeline
from osdp.model.graph import ModelGraph
from osdp.planfile import Plan
from osdp.planning import plan_graph
from osdp.recompute import Recompute

LIMIT = 1 << 34  # of memory where none is meant to bind
WAYS = {
    "replicate": Rules(modes=("replicate",), split=False, recompute=(Recompute.NONE,)),
    "keep": Rules(modes=("keep",), split=False, recompute=(Recompute.NONE,)),
    "free": Rules(modes=("free",), split=False, recompute=(Recompute.NONE,)),
    "free, recomputed": Rules(modes=("free",), split=False, recompute=(Recompute.FULL,)),
    "kept in the node": Rules(modes=("keep_in_node",), split=False, recompute=(Recompute.NONE,)),
    "freed in the node": Rules(modes=("free_in_node",), split=False, recompute=(Recompute.NONE,)),
    "freed to the node": Rules(modes=("free_to_node",), split=False, recompute=(Recompute.NONE,)),
}
PLANNED = "planned"  # within a memory limit between the smallest peak and what replicas need
TIGHT = "planned, tight"  # within little more than the smallest peak: slices, recompute


@dataclass(frozen=True)
class Case:
    """A plan of a model on a cluster, under the name of how it was made."""

    model: str
    way: str
    plan: Plan


def cases(
    name: str, graph: ModelGraph, cluster: Cluster, *, ways: tuple[str, ...], batches: tuple[int, ...]
) -> Iterator[Case]:
    """Plans in these ways at these batch sizes; ways that the cluster does not have are left out."""
    training = Training.of("fp32")
    roomy = replace(cluster, memory_bytes=LIMIT, reserve_fraction=0.0)
    for way in ways:
        for batch in batches:
            try:
                if way in WAYS:
                    if "node" in way and (cluster.nodes == 1 or cluster.devices_per_node == 1):
                        continue
                    yield Case(name, way, plan_graph(graph, roomy, training, WAYS[way], batch=batch))
                else:
                    within = _limited(graph, roomy, training, batch, share=0.02 if way == TIGHT else 0.4)
                    yield Case(name, way, plan_graph(graph, within, training, Rules(), batch=batch))
            except DoesNotFit:
                continue


def _limited(graph: ModelGraph, cluster: Cluster, training: Training, batch: int, *, share: float) -> Cluster:
    """The cluster with memory so far between the smallest peak and the fastest plan's."""
    least = smallest_timeline(graph, cluster, training, Rules(), batch).peak_bytes
    most = plan_graph(graph, cluster, training, WAYS["replicate"], batch=batch).predicted.peak_bytes
    return replace(cluster, memory_bytes=int(least + share * max(0, most - least)))
