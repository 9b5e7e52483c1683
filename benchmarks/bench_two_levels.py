"""Gathers and reduce-scatters over two levels beside flat ones, on hosts that a slow network joins (root needed).

    python benchmarks/bench_two_levels.py --hosts 2 --ranks-per-host 2 --across 500mbit

Both ways run in turn in the same processes, on the sizes given, which are those of the whole. What crosses is what the
busiest host's interface has sent, with headers, over the bytes of the whole; a flat ring must send (N-1)/N of them and
two levels (H-1)/H. Predictions are the cost model's, with the link's rate as asked and the catalogue's within a host.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

from cluster import SimulatedCluster, bits_per_second
from common import Row, deliver, met, parser

from osdp import Cluster
from osdp.cluster import Link

KINDS = ("all_gather", "reduce_scatter")
FLAT, TWO = "flat", "two levels"
SLACK = 1.05  # headers, acknowledgements, and the barrier before the counters are read
SETTLE_SECONDS = 0.02  # until what a barrier sends has left
NETWORK_LATENCY_SECONDS = 1e-4


def arguments() -> ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--hosts", type=int, default=2)
    made.add_argument("--ranks-per-host", type=int, default=2)
    made.add_argument("--across", default="500mbit", help="each host's link (default %(default)s)")
    made.add_argument("--mebibytes", default="1,4,16", help="sizes of the whole (default %(default)s)")
    made.add_argument("--times", type=int, default=7, help="runs of each (default %(default)s)")
    made.add_argument("--worker", action="store_true", help="run as one rank; the benchmark starts these itself")
    return made


def main() -> int:
    args = arguments().parse_args()
    if args.worker:
        return work(args)
    given = [word for word in sys.argv[1:] if word != "--json"]
    with SimulatedCluster(hosts=args.hosts, ranks_per_host=args.ranks_per_host, across=args.across) as cluster:
        measured = cluster.measured([sys.executable, __file__, "--worker", *given], timeout=300)
    model = modelled(args)
    title = f"{args.hosts} hosts of {args.ranks_per_host}, {args.across}"
    deliver({title: [row(each, model) for each in measured]}, as_json=args.json)
    return 0


def modelled(args: Namespace) -> Cluster:
    network = Link(bits_per_second(args.across) / 8, NETWORK_LATENCY_SECONDS)
    return Cluster.of("CPU", nodes=args.hosts, devices_per_node=args.ranks_per_host, network=network)


def predicted(kind: str, way: str, size: int, model: Cluster) -> float:
    if way == FLAT:
        return model.collective_seconds(kind, "world", size)
    inside = model.collective_seconds(kind, "node", size / model.nodes) * model.nodes
    return model.collective_seconds(kind, "across", size / model.devices_per_node) + inside


def row(measured: dict[str, object], model: Cluster) -> Row:
    """Both ways of one kind and size; two levels should be as much faster as the model says, or at least no slower."""
    kind, size = str(measured["kind"]), int(str(measured["bytes"]))
    made: Row = {"collective": kind, "MiB": size / 2**20}
    ways = {way: measured[way] for way in (FLAT, TWO)}
    least = {FLAT: 1 - 1 / model.world_size, TWO: 1 - 1 / model.nodes}
    for way, (seconds, crossed) in ways.items():  # type: ignore[misc]
        made[f"{way} s"], made[f"{way} said"] = seconds, predicted(kind, way, size, model)
        made[f"{way} crossed"] = crossed / size
    made["crossed"] = met(max(made[f"{way} crossed"] / least[way] for way in ways), SLACK)
    made["two/flat s"] = made[f"{TWO} s"] / made[f"{FLAT} s"]
    made["said"] = made[f"{TWO} said"] / made[f"{FLAT} said"]
    made["order"] = "as said" if (made["two/flat s"] < 1) == (made["said"] < 1) else "not as said"
    return made


def work(args: Namespace) -> int:
    """One rank: every size, kind and way, in turn."""
    import torch
    import torch.distributed as dist

    from osdp.engine import ASYNC_GLOO
    from osdp.runtime.meshes import meshes_of

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = meshes_of("cpu", args.hosts, args.ranks_per_host, engine=ASYNC_GLOO).groups
    found = []
    for mebibytes in args.mebibytes.split(","):
        size = int(float(mebibytes) * 2**20)
        for kind in KINDS:
            jobs = ways(kind, size // 4, groups)
            runs: dict[str, list[tuple[float, int]]] = {way: [] for way in jobs}
            for number in range(args.times + 1):
                for way, job in jobs.items():
                    one = timed(job)
                    if number > 0:  # the first opens what is opened at first use
                        runs[way].append(one)
            found.append(
                {
                    "kind": kind,
                    "bytes": size,
                    **{way: list(map(median, zip(*each, strict=True))) for way, each in runs.items()},
                }
            )
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def ways(kind: str, numel: int, groups: object) -> dict[str, Callable[[], None]]:
    """The runtime's own collectives, on buffers as it makes them."""
    import torch
    import torch.distributed as dist

    from osdp.runtime import collectives as own

    assert isinstance(groups, own.Groups)
    part = numel // dist.get_world_size()
    whole, mine, arrived = torch.zeros(part * dist.get_world_size()), torch.zeros(part), torch.zeros(part)
    column = torch.zeros(part * groups.across.size())
    if kind == "all_gather":
        return {
            FLAT: partial(own.gather, whole, mine, groups.world),
            TWO: partial(own.gather_two_levels, whole, mine, column, groups),
        }
    return {
        FLAT: partial(own.scatter_and_average, mine, whole, arrived, groups.world),
        TWO: partial(own.scatter_two_levels, mine, whole, arrived, column, groups),
    }


def timed(job: Callable[[], None]) -> tuple[float, int]:
    """Seconds from the first rank's begin to the last one's end, and the most bytes that a host sent to others."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    sleep(SETTLE_SECONDS)
    sent = _sent_bytes()
    dist.barrier()
    began = perf_counter()  # one clock for all: they are on one machine
    job()
    figures = torch.tensor([-began, perf_counter(), 0.0], dtype=torch.float64)
    sleep(SETTLE_SECONDS)
    figures[2] = _sent_bytes() - sent
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    return float(figures[:2].sum()), int(figures[2])


def _sent_bytes() -> int:
    device = os.environ["GLOO_SOCKET_IFNAME"]
    return int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    sys.exit(main())
