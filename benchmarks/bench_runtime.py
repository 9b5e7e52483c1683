"""What a plan's runtime takes beside DDP and plain FSDP2, on real ranks that a slow network joins.

Runs every way to train in turn, several rounds of each in the same processes, on a simulated cluster (root needed):

    python benchmarks/bench_runtime.py --hosts 4 --across 500mbit

The limit of a way is the longer of its compute alone and its bytes at the link's rate. CPU seconds are those of rank 0
for a step, of all its threads and of the one that trains; unlike seconds by the clock they mean something on a machine
that does other work. `--profile replicate` prints where rank 0 spends them in Python.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import statistics
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter, process_time, thread_time
from typing import Any

from cluster import SimulatedCluster, bits_per_second
from cluster.ranks import Start
from common import Row, deliver, met, parser

ALONE, DDP, FSDP2 = "compute alone", "DDP", "FSDP2"
APART = "apart"  # replicas, each reduced by itself
MODES = ("replicate", APART, "keep", "free")
WAYS = (ALONE, DDP, FSDP2, *MODES)
TRAFFIC = {
    ALONE: 0,
    DDP: 2,
    FSDP2: 3,
    "replicate": 2,
    APART: 2,
    "keep": 2,
    "free": 3,
}  # in units of parameters * (N-1)/N


def arguments() -> ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--hosts", type=int, default=4)
    made.add_argument("--ranks-per-host", type=int, default=1)
    made.add_argument("--across", default="500mbit", help="each host's link (default %(default)s)")
    made.add_argument("--layers", type=int, default=24)
    made.add_argument("--width", type=int, default=256)
    made.add_argument("--vocab", type=int, default=512)
    made.add_argument("--seq-len", type=int, default=64)
    made.add_argument("--batch", type=int, default=1, help="samples a rank (default %(default)s)")
    made.add_argument("--steps", type=int, default=3, help="steps of a round (default %(default)s)")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--recompute", action="store_true", help="recompute every block in backward")
    made.add_argument("--profile", metavar="WAY", help="after the rounds, profile three steps of this way on rank 0")
    made.add_argument("--ways", default=",".join(WAYS), help="default: %(default)s")
    made.add_argument("--worker", action="store_true", help="run as one rank; the benchmark starts these itself")
    return made


def main() -> int:
    args = arguments().parse_args()
    if args.worker:
        return work(args)
    given = [word for word in sys.argv[1:] if word != "--json"]
    with SimulatedCluster(hosts=args.hosts, ranks_per_host=args.ranks_per_host, across=args.across) as cluster:
        command = [sys.executable, __file__, "--worker", *given]
        measured = cluster.measured(command, timeout=900, on_line=_show)
    title = f"{args.hosts} hosts of {args.ranks_per_host}, {args.across}, {measured.pop('model')}"
    deliver({title: table(measured, args)}, as_json=args.json)
    return 0


def _show(start: Start, stream: str, line: str) -> None:
    if start.rank == 0 and (line.startswith("round") or stream == "stderr"):
        print(line.rstrip(), file=sys.stderr, flush=True)


def table(measured: dict[str, dict[str, Any]], args: Namespace) -> list[Row]:
    ranks = args.hosts * args.ranks_per_host
    rate = bits_per_second(args.across) / 8
    rows: list[Row] = []
    alone = measured[ALONE]["seconds"] if ALONE in measured else 0.0
    for way, figures in measured.items():
        wire = TRAFFIC[way] * figures["parameters"] * 4 * (ranks - 1) / ranks
        limit = max(alone, wire / rate)
        against = FSDP2 if way == "free" else DDP
        row: Row = {"way": way, "s/step": figures["seconds"], "limit s": limit}
        row["CPU s/step"], row["training thread CPU s"] = figures["cpu_seconds"], figures["thread_seconds"]
        row["limit/measured"] = limit / figures["seconds"]
        row["peak MB"] = figures["peak"] / 1e6
        if way in MODES and against in measured:
            row["against"] = against
            row["speed x"] = measured[against]["seconds"] / figures["seconds"]
            row["peak x"] = figures["peak"] / measured[against]["peak"]
            row["target x"] = {"replicate": 0.95, APART: 0.95, "keep": 1.0, "free": 1.3}[way]
            row[""] = met(row["speed x"], row["target x"], least=True)
        rows.append(row)
    return rows


def work(args: Namespace) -> int:
    """One rank: every way, round by round."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps = {way: _trainer(way, args) for way in args.ways.split(",")}  # all of them hold memory: peaks come later
    seconds: dict[str, list[tuple[float, float, float]]] = {way: [] for way in steps}
    for step in steps.values():
        step()
        step()
    for number in range(args.rounds):
        for way, step in steps.items():
            dist.barrier()
            began = _clocks()
            for _ in range(args.steps):
                step()
            cpu = _clocks()[1:]
            dist.barrier()
            ended = (perf_counter(), *cpu)
            seconds[way].append(tuple((b - a) / args.steps for a, b in zip(began, ended, strict=True)))
        if dist.get_rank() == 0:
            now = {way: tuple(round(figure, 3) for figure in each[-1]) for way, each in seconds.items()}
            print(f"round {number + 1} of {args.rounds}, seconds, CPU, training thread's: {now}", flush=True)
    from osdp.profiling.trial import peak_above_start

    if args.profile:
        _profile(steps[args.profile])
    figures: dict[str, Any] = {"model": f"{args.layers} x {args.width} GPT, batch {args.batch} x {args.seq_len}"}
    ways = list(steps)
    del step
    steps.clear()
    for way in ways:
        peak = peak_above_start(partial(_two_steps, way, args))
        clock, cpu, thread = (statistics.median(each) for each in zip(*seconds[way], strict=True))
        figures[way] = {"seconds": clock, "cpu_seconds": cpu, "thread_seconds": thread, "peak": peak}
        figures[way]["parameters"] = _parameters(args)
    if dist.get_rank() == 0:
        print(json.dumps(figures), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _clocks() -> tuple[float, float, float]:
    """By the wall, CPU of this process, CPU of the thread that trains."""
    return perf_counter(), process_time(), thread_time()


def _profile(step: Callable[[], None]) -> None:
    import torch.distributed as dist

    profiler = cProfile.Profile(thread_time)
    profiler.enable()
    for _ in range(3):
        step()
    profiler.disable()
    if dist.get_rank() == 0:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(45)


def _two_steps(way: str, args: Namespace) -> None:
    step = _trainer(way, args)
    step()
    step()


def _model(args: Namespace) -> Any:
    import torch

    from osdp.model.gpt import GPT, GPTConfig

    torch.manual_seed(0)
    return GPT(GPTConfig(args.vocab, args.seq_len, (args.layers,), (args.width,), tied=False))


def _recomputed(model: Any, args: Namespace) -> Any:
    from torch.distributed._composable import checkpoint

    for block in model.blocks if args.recompute else ():
        checkpoint(block)
    return model


def _parameters(args: Namespace) -> int:
    return sum(parameter.numel() for parameter in _model(args).parameters())


def _trainer(way: str, args: Namespace) -> Callable[[], None]:
    """A training step in one of the ways."""
    import torch
    from torch import nn

    model: nn.Module = _model(args)
    if way == DDP:
        model = nn.parallel.DistributedDataParallel(_recomputed(model, args))
    elif way == FSDP2:
        from torch.distributed.fsdp import fully_shard

        for block in _recomputed(model, args).blocks:
            fully_shard(block)
        fully_shard(model)
    elif way in MODES:
        import osdp

        tokens = torch.zeros(args.batch, args.seq_len, dtype=torch.long)
        cluster = osdp.Cluster.of("CPU", nodes=args.hosts, devices_per_node=args.ranks_per_host)
        with torch.device("meta"):
            planned = _model(args)
        plan = osdp.plan(
            planned,
            (tokens, tokens),
            cluster,
            precision="fp32",
            batch=args.batch,
            modes=["replicate" if way == APART else way],
            split=False,
            recompute="full" if args.recompute else False,
        )
        if way == APART:
            plan = replace(plan, units=tuple(replace(unit, reduced_with=None) for unit in plan.units))
        model = osdp.parallelize(model, plan)
    elif way == ALONE:
        model = _recomputed(model, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    tokens = torch.randint(args.vocab, (args.batch, args.seq_len + 1), generator=generator)

    def step() -> None:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    sys.exit(main())
