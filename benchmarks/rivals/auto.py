"""osdp's own choice of a layout on these ranks: every pipeline with the best plan inside, and data parallelism alone.

All are priced from the one profile of these ranks; the fastest by that price is run, whatever it turns out to be. What
is tried is what the rivals' pipelines are tried with: as many micro-batches, and the samples of a step they may have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from osdp.batching import Batching
from osdp.cost.tables import Rules
from osdp.errors import OsdpError
from osdp.layouts import Asked, plan_inside
from osdp.planfile import Plan

from .bench import Bench
from .planned import planned_stage
from .planning import MOST_PLANS, Planner, searched
from .rivals import AUTO, OSDP, TUNED

ROUNDS_OF_STAGES = (4, 2, 1)  # micro-batches of a step ÷ stages, as of the rivals' pipelines
SEARCH_SECONDS = 1.0  # for each stage's plan
WORTH_A_TRY = 0.7  # of the fastest price: `osdp tune` runs the best layout of the other kind too


@dataclass(frozen=True)
class Priced:
    """A pipeline with its micro-batches: the plan of its slowest stage."""

    stages: int
    micro_batches: int
    plan: Plan

    @property
    def rate(self) -> float:
        return self.plan.predicted.samples_per_second


def make_layouts(bench: Bench, planner: Planner, limits: Mapping[float, int], most: int) -> None:
    """For each limit the plan, or the plans of all stages, of the layout that is fastest by its price."""
    for share, limit in limits.items():
        if bench.log.last("plan", way=AUTO, share=share) or bench.log.last("none", way=AUTO, share=share):
            continue
        bench.log.add("begin", way=AUTO)
        bench.check_time()
        alone = bench.log.last("plan", way=OSDP, share=share, kind=0)
        pipelines = _fastest(bench, planner, limit, most)
        prices = {"data parallelism alone": alone["predicted"] if alone else 0.0}
        prices |= {f"{each.stages} stages": each.rate for each in pipelines}
        best = max(prices.values())
        bench.log.add("layouts", share=share, samples_per_second=prices)
        if not best:
            bench.log.add("none", way=AUTO, share=share, why="does not fit")
            continue
        if alone and alone["predicted"] == best:
            same = {key: value for key, value in alone.items() if key != "what"}
            bench.log.add("plan", **{**same, "way": AUTO, "like": OSDP})
        for number, each in enumerate(pipelines[:1]):
            if each.rate == best:
                _make_stages(bench, planner, each, limit, {"way": AUTO, "share": share, "kind": number})
            elif each.rate >= WORTH_A_TRY * best:
                _make_stages(bench, planner, each, limit, {"way": TUNED, "share": share, "kind": "pipeline"})


def _fastest(bench: Bench, planner: Planner, limit: int, most: int) -> list[Priced]:
    """The best of every number of stages, the fastest first."""
    setting = bench.setting
    found: list[Priced] = []
    for stages in (2, 4, 8):
        if setting.ranks % stages == 0 and stages <= setting.ranks:
            priced = list(_priced(planner, limit, stages, most * stages))
            found += [max(priced, key=lambda each: each.rate)] if priced else []
    return sorted(found, key=lambda each: -each.rate)


def _priced(planner: Planner, limit: int, stages: int, most: int) -> Iterator[Priced]:
    """Until fewer micro-batches are slower; `most` bounds the samples of a step of one data-parallel copy."""
    best = 0.0
    for often in ROUNDS_OF_STAGES:
        micro_batches = often * stages
        try:
            plan = _inside(planner, limit, Batching(None, micro_batches), stages)
            if plan.batch_size * micro_batches > most:
                plan = _inside(planner, limit, Batching(most // micro_batches, micro_batches), stages)
        except OsdpError:  # does not fit, or does not divide
            continue
        found = Priced(stages, micro_batches, plan)
        yield found
        if found.rate < best:
            return
        best = found.rate


def _inside(planner: Planner, limit: int, batching: Batching, stages: int, stage: int | None = None) -> Plan:
    asked = Asked(
        lambda _: (planner.graph, ()),
        planner.within(limit),
        planner.training,
        Rules(),
        batching,
        seconds=SEARCH_SECONDS,
    )
    return searched(lambda: plan_inside(asked, 1, stages, stage))


def _make_stages(bench: Bench, planner: Planner, priced: Priced, limit: int, place: Mapping[str, object]) -> None:
    """A plan for each stage, once more for as much less where the meter finds more than the limit."""
    allowed, batch, predicted = limit, priced.plan.batch_size, priced.rate
    for _ in range(MOST_PLANS):
        bench.check_time()
        try:
            batching = Batching(batch, priced.micro_batches)
            plans = [_inside(planner, allowed, batching, priced.stages, stage) for stage in range(priced.stages)]
            if allowed < limit:
                predicted = _inside(planner, allowed, batching, priced.stages).predicted.samples_per_second
        except OsdpError:
            batch -= 1
            if not batch:
                break
            continue
        job = bench.job(batch)
        attempt = bench.peak(batch, lambda job=job, plans=plans: planned_stage(job, plans))  # type: ignore[misc]
        if attempt.peak_bytes <= limit:
            digest = hashlib.sha256("".join(plan.digest for plan in plans).encode()).hexdigest()
            figures = {"batch": batch, "predicted": predicted, "gap": max(plan.certificate.gap for plan in plans)}
            documents = [plan.to_dict() for plan in plans]
            bench.log.add("plan", **place, plan=digest, stages=documents, peak_bytes=attempt.peak_bytes, **figures)
            return
        allowed -= attempt.peak_bytes - limit
    bench.log.add("none", **place, why="no plans of the stages were within the limit")
