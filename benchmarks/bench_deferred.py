"""What an all-reduce across nodes that waits for the last micro-batch gains, predicted: three ways to accumulate.

    python benchmarks/bench_deferred.py llama3-8b --cluster 4x8xA100-80GB --network 200Gbit --batch 1 --accumulation 8

Every unit is held in one mode within its node, blocks whole and recomputed. No search: the figures are the step and the
peak of each way, and what a node's network carries in a step.
"""

from __future__ import annotations

import argparse

from osdp.cluster import Cluster
from osdp.cluster.sizes import parse_rate
from osdp.cost.graph import step_graph
from osdp.cost.layout import Variant, Variants
from osdp.cost.training import Training
from osdp.cost.units import OPERATORS, WHOLE, Option
from osdp.model.source import load_model
from osdp.recompute import Recompute
from osdp.sharding import FREE_IN_NODE, KEEP_IN_NODE

WAYS = {
    "every micro-batch": {},
    "in the node each, across once": {"all_reduce_once": True},
    "once": {"reduce_once": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--cluster", default="4x8xA100-80GB")
    parser.add_argument("--network", help="of each node and direction, such as 200Gbit")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=8)
    given = parser.parse_args()
    cluster = Cluster.parse(given.cluster)
    if given.network:
        cluster = cluster.with_network(parse_rate(given.network))
    training = Training.of("bf16", "adamw", accumulation=given.accumulation)
    graph = load_model(given.model).capture("bf16", device=cluster.device, name=given.model)
    variants = Variants(graph)
    layout = variants.layout([Variant(WHOLE if s.is_block else OPERATORS, Recompute.FULL) for s in graph.stages])
    print(f"{given.model} on {cluster.label}, {given.accumulation} micro-batches of {given.batch}")
    print(f"{'mode':<14}{'reduced':<32}{'step':>10}{'peak':>12}{'across nodes':>16}")
    for mode in (KEEP_IN_NODE, FREE_IN_NODE):
        for name, way in WAYS.items():
            step = step_graph(layout, [Option(mode, **way)] * len(layout.units), given.batch, training, cluster)
            sent = sum(each.nbytes for each in step.collectives() if each.group == "across")
            peak = step.timeline().peak_bytes / 2**30
            print(f"{mode:<14}{name:<32}{step.seconds:>8.3f} s{peak:>8.1f} GiB{sent / 2**30:>12.2f} GiB")


if __name__ == "__main__":
    main()
