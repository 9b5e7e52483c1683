"""One rank of one cell: finds every rival at its best, then times all of them in rounds.

Rank 0 prints what is found as lines of JSON, as soon as it is found.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from osdp.cost.tables import Rules
from osdp.errors import DoesNotFit
from osdp.training.world import World, started

from .cells import Cell
from .data_parallel import alone, ddp
from .job import FULL, HALF, NONE, Job, NotHere, Trainer
from .ladder import Attempt, best, climb
from .meter import Meter
from .models import Model, batch_of
from .planned import planned
from .planning import RULES, TIMEOUT_SECONDS, Planner
from .rivals import ALONE, ENGINE, Rival, rivals_for

MOST_BATCH = 64  # samples of a step for each rank, whoever takes them
ENOUGH_SECONDS, MOST_STEPS = 0.25, 3  # of an attempt
FAR_BEHIND = 0.6  # of the fastest rival so far: such a one is not refined, as it cannot become the best

Build = Callable[[], Trainer]


class Bench:
    """This rank's meter and clock; figures are those of the slowest and the fullest rank, equal on all."""

    def __init__(self, cell: Cell, world: World) -> None:
        self.cell, self.world, self.meter = cell, world, Meter()
        self.fastest = 0.0  # samples a second of any rival so far

    def tell(self, what: str, **figures: Any) -> None:
        if self.world.leads:
            print(json.dumps({"what": what, **figures}), flush=True)

    def highest(self, *numbers: float) -> list[float]:
        return [max(column) for column in zip(*self.world.all_numbers(*numbers), strict=True)]

    def made(self, build: Build) -> tuple[Trainer, Any]:
        trainer = build()
        return trainer, batch_of(self.cell.shape, trainer.samples, seed=1 + trainer.part)

    def attempt(self, batch: int, build: Build, limit_bytes: int | None = None) -> Attempt:
        """Builds it and takes a few steps; with a limit, as on a device that has no more."""
        gc.collect()
        self.meter.begin()
        if limit_bytes is None:
            return self._attempt(batch, build)
        with self.meter.limited(limit_bytes):
            return self._attempt(batch, build)

    def _attempt(self, batch: int, build: Build) -> Attempt:
        trainer, data = self.made(build)
        trainer.step(*data)
        seconds: list[float] = []
        enough = False
        while not enough:
            dist.barrier()
            began = perf_counter()
            trainer.step(*data)
            (slowest,) = self.highest(perf_counter() - began)
            seconds.append(slowest)
            enough = len(seconds) >= MOST_STEPS or sum(seconds) >= ENOUGH_SECONDS
        (peak,) = self.highest(self.meter.peak_bytes)
        return Attempt(batch, trainer.samples * trainer.parts, min(seconds), int(peak))


def main() -> int:
    parser = ArgumentParser()
    arguments(parser)
    return on_ranks(parser.parse_args(), _measure)


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--cell", required=True, help="JSON")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--profile-seconds", type=float, required=True)
    parser.add_argument("--rungs", action="store_true", help="try every power of two as a batch size")
    parser.add_argument("--without", default="[]", help="JSON: rivals that broke a run before")


def on_ranks(args: Namespace, measure: Callable[[Bench, Namespace], None]) -> int:
    """Measures on all ranks of the cell."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with started(timeout_seconds=TIMEOUT_SECONDS) as world:
        measure(Bench(Cell(**json.loads(args.cell)), world), args)
    return 0


def _measure(bench: Bench, args: Namespace) -> None:
    cell = bench.cell
    job = partial(Job, cell.shape, cell.hosts, cell.ranks_per_host)
    reference = bench.attempt(1, lambda: ddp(job(1)))
    limit = int(cell.share * reference.peak_bytes)
    with torch.device("meta"):
        model = Model(cell.shape)
    sizes = {"parameters": sum(p.numel() for p in model.parameters())}
    sizes["trained"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    bench.tell("cell", limit_bytes=limit, ddp_bytes=reference.peak_bytes, **sizes)
    planner = Planner.measured(cell, bench.world, seconds=args.profile_seconds)
    chosen: dict[str, Build] = {}
    without = json.loads(args.without)
    _alone(bench, job, chosen)
    for name, rules in RULES.items():
        if name not in without:
            _plan(bench, planner, name, rules, limit, job, chosen)
    for rival in (_engine(planner), *rivals_for(cell.hosts, cell.ranks_per_host)):
        if rival.name not in without:
            _compete(bench, rival, limit, args.rungs, job, chosen)
    time_in_rounds(bench, chosen, args.rounds)


def _alone(bench: Bench, job: Callable[..., Job], chosen: dict[str, Build]) -> None:
    """The fastest that these ranks compute at any batch, without a limit and without communication."""
    bench.tell("begin", rival=ALONE)
    tried = [bench.attempt(batch, partial(alone, job(batch))) for batch in (2, 4, 8, 16)]
    fastest = max(tried, key=lambda attempt: attempt.rate)
    chosen[ALONE] = partial(alone, job(fastest.batch))
    tell_best(bench, ALONE, fastest, NONE, {})


def _plan(
    bench: Bench,
    planner: Planner,
    name: str,
    rules: Rules,
    limit: int,
    job: Callable[..., Job],
    chosen: dict[str, Build],
) -> None:
    """The planner's choice; where the meter finds more than the limit, a plan for as much less."""
    bench.tell("begin", rival=name)
    allowed = limit
    for _ in range(3):
        try:
            plan = planner.best(rules, allowed)
            if plan.batch_size > MOST_BATCH:  # no other way may take more
                plan = planner.best(rules, allowed, batch=MOST_BATCH)
        except DoesNotFit as error:
            bench.tell("none", rival=name, why=f"does not fit: {str(error).splitlines()[0]}")
            return
        build = partial(planned, job(plan.batch_size), plan)
        attempt = bench.attempt(plan.batch_size, build)
        if attempt.peak_bytes <= limit:
            break
        allowed -= attempt.peak_bytes - limit
    if attempt.peak_bytes > limit:
        bench.tell("none", rival=name, why=f"the plan held {attempt.peak_bytes} bytes, the limit is {limit}")
        return
    attempt = bench.attempt(plan.batch_size, build, limit)
    chosen[name] = build
    tell_best(bench, name, attempt, "by the plan", {}, plan=plan.to_dict())


def _engine(planner: Planner) -> Rival:
    return Rival(ENGINE, lambda job: planned(job, planner.freed(job.batch, job.recompute)), {}, recomputes=(NONE, FULL))


def _compete(
    bench: Bench, rival: Rival, limit: int, rungs: bool, job: Callable[..., Job], chosen: dict[str, Build]
) -> None:
    """Every recompute with every feasible batch, then the rival's other switches at the best of those."""
    bench.tell("begin", rival=rival.name)
    found: list[tuple[Attempt, str, dict[str, Any]]] = []
    least = None
    try:
        for recompute in sorted(rival.recomputes, key=(NONE, FULL, HALF).index):
            if recompute == HALF and max((each[0].rate for each in found), default=0.0) < FAR_BEHIND * bench.fastest:
                continue
            build = partial(_build, rival, job, recompute, dict(rival.switches))
            attempts = climb(
                lambda batch, build=build: bench.attempt(batch, partial(build, batch)),
                limit_bytes=limit,
                most_samples=MOST_BATCH * bench.cell.ranks,
                rungs=rungs,
            )
            least = min([*attempts, *([least] if least else [])], key=lambda attempt: attempt.peak_bytes)
            fastest = best(attempts, limit_bytes=limit)
            if fastest is not None:
                found.append((fastest, recompute, dict(rival.switches)))
        if not found:
            assert least is not None
            bench.tell("none", rival=rival.name, why="does not fit", peak_bytes=least.peak_bytes)
            return
        attempt, recompute, switches = max(found, key=lambda each: each[0].rate)
        for other in rival.others if attempt.rate >= FAR_BEHIND * bench.fastest else ():
            tried = bench.attempt(
                attempt.batch, partial(_build, rival, job, recompute, {**switches, **other}, attempt.batch)
            )
            if tried.peak_bytes <= limit:
                found.append((tried, recompute, {**switches, **other}))
        attempt, recompute, switches = max(found, key=lambda each: each[0].rate)
        bench.fastest = max(bench.fastest, attempt.rate)
        build = partial(_build, rival, job, recompute, switches, attempt.batch)
        attempt = bench.attempt(attempt.batch, build, limit)  # as on a device with this memory
    except NotHere as error:
        bench.tell("none", rival=rival.name, why=str(error))
        return
    except Exception as error:  # a rival that fails must not end the others
        traceback.print_exc()
        bench.tell("none", rival=rival.name, why=f"fails: {type(error).__name__}: {str(error)[:300]}")
        return
    chosen[rival.name] = build
    tell_best(bench, rival.name, attempt, recompute, switches, gradients=rival.moves_gradients)


def _build(rival: Rival, job: Callable[..., Job], recompute: str, switches: dict[str, Any], batch: int) -> Trainer:
    return rival.build(job(batch, recompute, switches))


def tell_best(bench: Bench, name: str, attempt: Attempt, recompute: str, switches: dict[str, Any], **more: Any) -> None:
    bench.tell(
        "best",
        rival=name,
        batch=attempt.batch,
        samples=attempt.samples,
        peak_bytes=attempt.peak_bytes,
        seconds=attempt.seconds,
        recompute=recompute,
        switches=switches,
        **more,
    )


def time_in_rounds(bench: Bench, chosen: dict[str, Build], rounds: int) -> None:
    """All of them are held and timed in turn, so that whatever else the machine does slows all alike."""
    gc.collect()
    bench.tell("begin", rival="rounds")
    held = {name: bench.made(build) for name, build in chosen.items()}
    for _ in range(rounds):
        for name, (trainer, data) in held.items():
            trainer.step(*data)  # in training the same was done before: caches are as it left them
            dist.barrier()
            began = perf_counter()
            trainer.step(*data)
            (seconds,) = bench.highest(perf_counter() - began)
            bench.tell("round", rival=name, seconds=seconds)
    bench.tell("done")


if __name__ == "__main__":
    sys.exit(main())
