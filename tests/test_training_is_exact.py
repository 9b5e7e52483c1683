"""Claim: training under a plan is training in a single process on the whole batch.

Every rank gets its own part of each batch. After several steps of AdamW the losses, and the gradients of the last
step, are compared on every rank with those of one process that saw all of it: to 1e-5, in fp32. Gradients and not
weights, because AdamW makes steps of full size out of gradients that are zero but for rounding (those of key biases).

- for fourteen architectures: decoders, encoders, both, vision, experts, tied and untied, widths that change;
- for plans that mix all modes, slices and recompute, at every granularity, on two to six ranks, in one node and two;
- for plans drawn at random, with gradient accumulation, and units gathered once for all micro-batches of a step;
- on both engines: the asynchronous one, and the stock one of backends with streams, which waits on gloo.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import CONFIGS, batch_of, graph_of, tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planned import plan_by_hand, whole_gradients
from ranks import run_ranks
from torch import Tensor

import osdp
from osdp.engine import ASYNC_GLOO, STOCK, Engine
from osdp.planfile import GRANULARITIES, OPERATORS, PARTS, WHOLE, Plan
from osdp.recompute import Recompute
from osdp.sharding import FREE, FREE_IN_NODE, FREE_TO_NODE, KEEP, KEEP_IN_NODE, MODES, REPLICATE

STEPS, BATCH, LEARNING_RATE = 3, 12, 1e-4
TOLERANCE = 1e-5
FLOOR = 1e-3  # of the model's largest gradient: below it a parameter's gradient counts as rounding
EVERY_MODE = (FREE, KEEP, REPLICATE, FREE_TO_NODE, FREE_IN_NODE, KEEP_IN_NODE)


@dataclass(frozen=True)
class Run:
    """What training gave: the loss of every step, and the gradients of the last one."""

    losses: list[float]
    gradients: dict[str, Tensor | None]


def batch_part(name: str, step: int, part: int, parts: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    args, kwargs = batch_of(name, BATCH, seed=step)
    return tuple(a.chunk(parts)[part] for a in args), {key: value.chunk(parts)[part] for key, value in kwargs.items()}


@cache
def alone(name: str) -> Run:
    """A single process on the whole batch."""
    torch.manual_seed(0)
    model, losses = tiny(name).build(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    for step in range(STEPS):
        args, kwargs = batch_part(name, step, 0, 1)
        optimizer.zero_grad()
        loss = tiny(name).loss(model(*args, **kwargs))
        loss.backward()
        losses.append(loss.item())
        if step < STEPS - 1:
            optimizer.step()
    return Run(losses, {key: parameter.grad for key, parameter in model.named_parameters()})


def train(name: str, plans: Sequence[Plan], engine: Engine) -> list[Run]:
    """On a rank: each plan in turn, on this rank's part of every batch."""
    # A head that is tied to its embedding returns a view of its product; nothing here changes it in place.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
    return [_train(name, plan, engine) for plan in plans]


def _train(name: str, plan: Plan, engine: Engine) -> Run:
    torch.manual_seed(0)
    model, losses = tiny(name).build(), []
    osdp.parallelize(model, plan, engine=engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    times = plan.accumulation
    for step in range(STEPS):
        first = dist.get_rank() * times
        micro_batches = [batch_part(name, step, first + i, dist.get_world_size() * times) for i in range(times)]
        optimizer.zero_grad()
        total = torch.zeros(())
        for args, kwargs in osdp.accumulate(model, micro_batches):
            loss = tiny(name).loss(model(*args, **kwargs)) / times
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
        if step < STEPS - 1:
            optimizer.step()
    return Run(losses, whole_gradients(model))


def worst_error(found: Run, truth: Run) -> tuple[float, str]:
    """The largest relative error, and of what."""
    assert found.gradients.keys() == truth.gradients.keys()
    losses = zip(found.losses, truth.losses, strict=True)
    errors = [(abs(a - b) / abs(b), f"the loss of step {step}") for step, (a, b) in enumerate(losses)]
    largest = max(float(g.abs().max()) for g in truth.gradients.values() if g is not None)
    for name, true in truth.gradients.items():
        own = found.gradients[name]
        if true is None or own is None:
            assert own is None or not own.any(), f"{name} has a gradient, alone it has none"
            assert true is None or not true.any(), f"{name} has no gradient, alone it has"
            continue
        scale = max(float(true.abs().max()), FLOOR * largest)
        errors.append((float((own - true).abs().max()) / scale, name))
    return max(errors)


def check(name: str, world: str, plans: Sequence[Plan], engine: Engine = ASYNC_GLOO) -> None:
    results = run_ranks(plans[0].cluster.world_size, train, name, plans, engine, timeout_seconds=120)
    for rank, runs in enumerate(results):
        for plan, run in zip(plans, runs, strict=True):
            error, where = worst_error(run, alone(name))
            assert error < TOLERANCE, f"{name} on {world}, rank {rank}: {where} is off by {error:.1e}\n{plan.units}"


def mixed_plans(name: str, world: str) -> list[Plan]:
    """One plan a granularity: all modes, so that over the three every unit has several; slices; recompute."""
    splits = (((2, 1), (3, 3)), ((2, 2), (1, 1), (3, 1)), ((4, 2), (1, 1), (2, 2), (3, 0)))
    recompute = ((Recompute.SELECTIVE, True, False), (False,), (False, True))
    return [
        plan_by_hand(
            graph_of(name),
            world,
            modes=EVERY_MODE[2 * index :] + EVERY_MODE[: 2 * index],
            granularity=granularity,
            splits=splits[index],
            recompute=recompute[index],
        )
        for index, granularity in enumerate((WHOLE, PARTS, OPERATORS))
    ]


WORLDS = ("2x2", "3", "2", "4")
OWN_WORLDS = {"mixtral": "3"}  # its 4 experts are sharded along other dimensions there
PLACES = [
    (name, OWN_WORLDS.get(name, WORLDS[index % len(WORLDS)])) for index, name in enumerate((*CONFIGS, "gpt-pyramid"))
]
MORE_PLACES = [("gpt", world) for world in ("3", "2x2", "2x3")] + [("t5", "2x2"), ("vit", "2x3")]


# In what a plan does to them: slow.
LIKE_ANOTHER = ("qwen2", "gpt_neox", "roberta", "distilbert", "bart", "swin", "opt", "gpt2")


def _quick_first() -> list[Any]:
    quick = [place for place in PLACES if place[0] not in LIKE_ANOTHER]
    rest = [place for place in PLACES if place not in quick]
    return [*quick, *(pytest.param(*place, marks=pytest.mark.slow) for place in (*rest, *MORE_PLACES))]


@pytest.mark.parametrize(("name", "world"), _quick_first())
def test_losses_and_gradients_equal_the_single_process(name: str, world: str) -> None:
    check(name, world, mixed_plans(name, world))


@pytest.mark.parametrize(("name", "world", "index"), [("llama", "2x2", 0), ("mixtral", "3", 1), ("t5", "2", 2)])
def test_the_stock_engine_equals_the_single_process_too(name: str, world: str, index: int) -> None:
    """FSDP2's own collectives, which wait here on gloo, under a plan of each granularity."""
    check(name, world, mixed_plans(name, world)[index : index + 1], STOCK)


@pytest.mark.parametrize("engine", [ASYNC_GLOO, STOCK], ids=lambda engine: engine.name)
def test_all_reduces_across_nodes_once_a_step_are_exact(engine: Engine) -> None:
    plans = [
        plan_by_hand(
            graph_of("gpt"),
            "2x2",
            modes=modes,
            granularity=granularity,
            recompute=(True, False),
            splits=((1, 1), (3, 2)),
            accumulation=3,
            all_reduce_once=late,
        )
        for modes, granularity, late in (
            ((KEEP_IN_NODE, FREE_IN_NODE), WHOLE, (True,)),
            ((FREE_IN_NODE, FREE, KEEP_IN_NODE, REPLICATE), OPERATORS, (True, True, False)),
        )
    ]
    assert all(any(unit.all_reduce_once for unit in plan.units) for plan in plans)
    check("gpt", "2x2", plans, engine)


@pytest.mark.parametrize("engine", [ASYNC_GLOO, STOCK], ids=lambda engine: engine.name)
def test_prefetching_two_units_is_exact(engine: Engine) -> None:
    plans = [
        plan_by_hand(
            graph_of("gpt"), "2", modes=modes, granularity=OPERATORS, recompute=again, prefetch=depth, accumulation=2
        )
        for modes, again, depth in (
            ((FREE,), (True, False), (2,)),
            ((FREE, KEEP, REPLICATE), (False, True), (2, 1)),
        )
    ]
    assert all(any(unit.prefetch == 2 for unit in plan.units) for plan in plans)
    check("gpt", "2", plans, engine)


@pytest.mark.parametrize("engine", [ASYNC_GLOO, STOCK], ids=lambda engine: engine.name)
@pytest.mark.parametrize("world", ["2", "2x2"])
def test_gathering_once_a_step_is_exact(world: str, engine: Engine) -> None:
    in_node = (KEEP_IN_NODE, FREE_IN_NODE) if world == "2x2" else ()
    plans = [
        plan_by_hand(
            graph_of("gpt"),
            world,
            modes=modes,
            granularity=granularity,
            recompute=(True, False),
            accumulation=3,
            gather_once=once,
            reduce_once=late,
            all_reduce_once=(True, False),
        )
        for modes, granularity, once, late in (
            ((KEEP, *in_node), WHOLE, (True,), (False,)),
            ((FREE, KEEP, REPLICATE, *in_node), OPERATORS, (True, True, False), (True, False)),
        )
    ]
    assert all(any(unit.gather_once for unit in plan.units) for plan in plans)
    check("gpt", world, plans, engine)


@st.composite
def random_plans(draw: st.DrawFn) -> tuple[str, str, list[Plan]]:
    """Three plans of one model for one world, which the same ranks run in turn."""
    name = draw(st.sampled_from(["gpt", "gpt-pyramid"]))
    world, accumulations = draw(st.sampled_from([("2", (1, 2, 3)), ("3", (1, 2)), ("4", (1, 3)), ("2x2", (1, 3))]))
    slices = st.integers(1, 4).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))
    plans = [
        plan_by_hand(
            graph_of(name),
            world,
            modes=draw(st.lists(st.sampled_from(MODES), min_size=1, max_size=6)),
            granularity=draw(st.sampled_from(GRANULARITIES)),
            splits=draw(st.lists(slices, min_size=1, max_size=3)),
            recompute=draw(st.lists(st.booleans(), min_size=1, max_size=3)),
            accumulation=draw(st.sampled_from(accumulations)),
            reduce_once=draw(st.lists(st.booleans(), min_size=1, max_size=3)),
            all_reduce_once=draw(st.lists(st.booleans(), min_size=1, max_size=3)),
            gather_once=draw(st.lists(st.booleans(), min_size=1, max_size=3)),
        )
        for _ in range(3)
    ]
    return name, world, plans


@settings(max_examples=4, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(random_plans())
def test_plans_drawn_at_random_are_exact(drawn: tuple[str, str, list[Plan]]) -> None:
    check(*drawn)
