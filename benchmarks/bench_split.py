"""What splitting large linears into slices saves of the gathered peak, and what it costs in time.

Two plain local ranks train feed-forwards, by default of 4096 -> 16384 -> 4096, whose linears are freed and split into 1
to 16 slices. Times are those of steps taken in turn in the same processes, each relative to the unsplit one of its
round; CPU is what the ranks' own threads spent, which others on the machine disturb less. The peak is what a step
allocates beyond what it starts with, where it starts with gradients, by the allocator's own account and at few tokens:
gathered copies, gather and reduction buffers, and gradients that are not reduced yet. It needs two feed-forwards: with
fewer units the unsplit one never has a gather, a reduction and a unit in use at once.

    python benchmarks/bench_split.py
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from common import Row, deliver, met, parser
from torch import Tensor, nn

import osdp
from osdp.profiling.trial import peak_above_start

SLICES = (1, 2, 4, 8, 16)
RANKS = 2
TIMED_LAYERS, PEAK_LAYERS, FEW_TOKENS = 1, 2, 8
ABOUT = 1.1  # a peak of at most this many times 1/n is about 1/n
SLOWER = {4: 1.02}  # by slices: at most so many times the step of one


def arguments() -> ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--width", type=int, default=4096)
    made.add_argument("--inner", type=int, default=16384)
    made.add_argument("--tokens", type=int, default=512, help="of a rank and a timed step (default %(default)s)")
    made.add_argument("--rounds", type=int, default=3, help="timed steps of each way (default %(default)s)")
    return made


def main() -> int:
    args = arguments().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, args=(args, folder), nprocs=RANKS)
        measured = json.loads((Path(folder) / "measured").read_text())
    title = f"{RANKS} local ranks, linears of {args.width} x {args.inner}, {args.tokens} tokens a rank"
    deliver({title: table(measured)}, as_json=args.json)
    return 0


def table(measured: dict[str, dict[str, Any]]) -> list[Row]:
    """A row for each number of slices; ratios are to the first, which is one slice."""
    rows: list[Row] = []
    whole = measured["1"]
    for key, figures in measured.items():
        slices = int(key)
        ratios, cpu = (
            [own / one for own, one in zip(figures[what], whole[what], strict=True)] for what in ("seconds", "cpu")
        )
        row: Row = {"slices": slices, "peak MiB": figures["peak"] / 2**20, "s/step": median(figures["seconds"])}
        if slices > 1:
            row["peak x"] = figures["peak"] / whole["peak"]
            row["target peak x"] = ABOUT / slices
            row["peak"] = met(row["peak x"], row["target peak x"])
            row["CPU x"], row["time x"] = median(cpu), median(ratios)
            row["from"], row["to"] = min(ratios), max(ratios)
        if slices in SLOWER:
            row["target time x"] = SLOWER[slices]
            row["time"] = met(row["time x"], SLOWER[slices])
        rows.append(row)
    return rows


def work(rank: int, args: Namespace, folder: str) -> None:
    """One rank: every number of slices in turn, round by round; rank 0 writes the figures down."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    peaks = {slices: peak(slices, args) for slices in SLICES}
    timed = times(args)
    if rank == 0:
        (Path(folder) / "measured").write_text(json.dumps({n: {"peak": peaks[n], **timed[n]} for n in SLICES}))
    dist.barrier()
    dist.destroy_process_group()


def peak(slices: int, args: Namespace) -> int:
    step = trainer(slices, freeing(PEAK_LAYERS, args), PEAK_LAYERS, args)
    step(FEW_TOKENS)  # from now on gradients are there
    found = peak_above_start(partial(step, FEW_TOKENS))
    del step
    gc.collect()  # FSDP2's modules name each other; the next one needs the room
    return found


def times(args: Namespace) -> dict[int, dict[str, list[float]]]:
    """Seconds, and seconds of the processor, of every number of slices in every round."""
    plan = freeing(TIMED_LAYERS, args)
    steps = {slices: trainer(slices, plan, TIMED_LAYERS, args) for slices in SLICES}
    for step in steps.values():
        step(FEW_TOKENS)
    found: dict[int, dict[str, list[float]]] = {slices: {"seconds": [], "cpu": []} for slices in SLICES}
    for number in range(args.rounds):
        for slices in SLICES if number % 2 else SLICES[::-1]:  # what else goes on favours none
            dist.barrier()
            began, busy = perf_counter(), process_time()
            steps[slices](args.tokens)
            found[slices]["cpu"].append(process_time() - busy)
            dist.barrier()
            found[slices]["seconds"].append(perf_counter() - began)
        if dist.get_rank() == 0:
            now = {slices: round(each["seconds"][-1], 2) for slices, each in found.items()}
            print(f"round {number + 1} of {args.rounds}: {now}", file=sys.stderr, flush=True)
    return found


class FeedForwards(nn.Module):
    """Returns its loss; the norm makes all linears compute the gradients of their inputs too."""

    def __init__(self, layers: int, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        sizes = [(width, inner), (inner, width)] * layers
        self.linears = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for linear in self.linears:
            x = torch.relu(linear(x))
        return x.square().mean()


def built(layers: int, args: Namespace) -> FeedForwards:
    with torch.device("meta"):
        return FeedForwards(layers, args.width, args.inner)


def freeing(layers: int, args: Namespace) -> osdp.Plan:
    """A plan that frees every unit and splits none."""
    cluster = osdp.Cluster.of("CPU", devices_per_node=RANKS, memory="64GiB")
    inputs = (torch.empty(1, args.width),)
    return osdp.plan(
        built(layers, args), inputs, cluster, precision="fp32", batch=1, modes=["free"], split=False, recompute=False
    )


def trainer(slices: int, plan: osdp.Plan, layers: int, args: Namespace) -> Callable[[int], None]:
    """A training step on so many tokens under the plan, with every linear split."""
    model = built(layers, args)
    split = [replace(u, splits=slices, sharded_splits=slices) if "linears" in u.name else u for u in plan.units]
    osdp.initialize(osdp.parallelize(model, replace(plan, units=tuple(split))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    x = torch.randn(args.tokens, args.width, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step(tokens: int) -> None:
        model(x[:tokens]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # gradients then are no part of what a step allocates

    return step


if __name__ == "__main__":
    sys.exit(main())
