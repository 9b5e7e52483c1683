"""What a prefetch depth of two gains, predicted: by hand at either depth, then the search with and without it.

    python benchmarks/bench_prefetch.py gpt2-xl --cluster 8xA100-80GB --memory 12GiB
    python benchmarks/bench_prefetch.py gpt2-xl --cluster 4x8xA100-80GB --network 800Gbit --memory 12GiB

The first table has no search: every block is gathered by its operators and freed. The second is `osdp plan` at each
batch size; with `--memory` less than a device has, so that blocks have to be freed.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from osdp.cluster import Cluster, parse_bytes
from osdp.cluster.sizes import parse_rate
from osdp.cost.graph import step_graph
from osdp.cost.layout import Variant, Variants
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.cost.units import OPERATORS, Option
from osdp.errors import DoesNotFit
from osdp.model.graph import ModelGraph
from osdp.model.source import load_model
from osdp.planfile import Depth
from osdp.planning import plan_graph
from osdp.recompute import Recompute
from osdp.sharding import FREE

DEPTHS: tuple[Depth, Depth] = (1, 2)


def at_depths(graph: ModelGraph, cluster: Cluster, training: Training, batch: int, how: Recompute) -> str:
    """The step and the peak with every block freed by operators, at either depth."""
    variants, steps = Variants(graph), []
    for depth in DEPTHS:
        chosen = [Variant(OPERATORS, how, depth if stage.is_block else 1) for stage in graph.stages]
        layout = variants.layout(chosen)
        steps.append(step_graph(layout, [Option(FREE)] * len(layout.units), batch, training, cluster))
    seconds = [step.seconds for step in steps]
    peaks = [step.timeline().peak_bytes / 2**30 for step in steps]
    gain = f"{100 * (seconds[0] / seconds[1] - 1):>8.2f} %"
    return "".join(f"{s:>9.4f} s{p:>8.2f} GiB" for s, p in zip(seconds, peaks, strict=True)) + gain


def searched(graph: ModelGraph, cluster: Cluster, training: Training, batch: int) -> str:
    """The fastest plan with depth one alone, and with both to choose from."""
    rates, said = [], []
    for depths in ((1,), DEPTHS):
        began = time.process_time()
        try:
            plan = plan_graph(graph, cluster, training, Rules(prefetch=depths), batch=batch, accumulation=1)
        except DoesNotFit:
            return "  does not fit"
        rates.append(plan.predicted.samples_per_second)
        deep = {unit.block for unit in plan.units if unit.prefetch == 2}
        gap, cpu = 100 * plan.certificate.gap, time.process_time() - began
        said.append(f"{rates[-1]:>9.2f}/s gap {gap:.2f} %, {cpu:>4.1f} CPU s, {len(deep):>2} blocks deep")
    return ";".join(said) + f"{100 * (rates[1] / rates[0] - 1):>8.2f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--cluster", default="8xA100-80GB")
    parser.add_argument("--network", help="of each node and direction, such as 800Gbit")
    parser.add_argument("--memory", help="of each device, such as 12GiB")
    parser.add_argument("--batches", default="1,2,4,8")
    parser.add_argument("--no-search", action="store_true")
    given = parser.parse_args()
    cluster = Cluster.parse(given.cluster)
    if given.network:
        cluster = cluster.with_network(parse_rate(given.network))
    training = Training.of("bf16", "adamw")
    graph = load_model(given.model).capture("bf16", device=cluster.device, name=given.model)
    batches = [int(each) for each in given.batches.split(",")]
    print(f"{given.model} on {cluster.label}, every block freed by operators: depth one, depth two, gain")
    for how in (Recompute.NONE, Recompute.FULL):
        for batch in batches:
            print(f"batch {batch:>3} {how.words:<16}{at_depths(graph, cluster, training, batch, how)}", flush=True)
    if given.memory:
        cluster = replace(cluster, memory_bytes=parse_bytes(given.memory))
    print(f"searched, {cluster.limit_bytes / 2**30:.1f} GiB to use: depth one alone; both; gain")
    for batch in [] if given.no_search else batches:
        print(f"batch {batch:>3}{searched(graph, cluster, training, batch)}", flush=True)


if __name__ == "__main__":
    main()
