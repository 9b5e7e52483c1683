"""Claim: a step that ends early trains as in a single process, or is refused by a sentence.

The micro-batches of a step are left by `break` or by an exception that is caught, before, in and after forward, outside
and inside of the loop; or a backward fails. Losses, gradients and weights of all steps are compared with those of one
process that does the same, on two, three and 2 x 2 ranks, with both engines, for units that are reduced once,
all-reduced across nodes once, gathered once, and for others. `zero_grad()` inside of the loop clears what is not
reduced yet. A rank that fails alone, or leaves out a micro-batch or a step, is not let on: its collectives no longer
match the others'.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from odd_models import Model, Twice, built, data, odd_graph
from planned import plan_by_hand, whole_gradients, whole_parameters
from ranks import RankFailed, run_ranks
from selection import one_in
from torch import Tensor, nn
from trained import Trained, same, sgd, three_plans

import osdp
from osdp.engine import ASYNC_GLOO, STOCK, Engine
from osdp.errors import OsdpError
from osdp.planfile import Plan
from osdp.runtime import alike
from osdp.sharding import FREE, KEEP, REPLICATE

TIMES, EACH = 3, 12  # micro-batches of a step, and samples in each
STEPS, EARLY = 3, 1  # the step that ends early


class Wrong(Exception):
    """What goes wrong in a micro-batch."""


class Failing:
    """Raises in the forward or the backward of the model's second block, when it is told to."""

    def __init__(self, model: Any) -> None:
        self.now = ""
        model.blocks[1].register_forward_hook(lambda *_: self._check("forward"))
        model.blocks[1].register_full_backward_hook(lambda *_: self._check("backward"))

    def _check(self, place: str) -> None:
        if self.now == place:
            raise Wrong(place)


Batches = Sequence[tuple[Tensor, Tensor]]
Loss = Callable[[tuple[Tensor, Tensor]], Tensor]
Way = Callable[[Iterator[Any], Loss, Failing, torch.optim.Optimizer], None]


def by_break(batches: Iterator[Any], loss: Loss, failing: Failing, optimizer: torch.optim.Optimizer) -> None:
    for index, batch in enumerate(batches):
        loss(batch).backward()
        if index == 1:
            break


def at_once(batches: Iterator[Any], loss: Loss, failing: Failing, optimizer: torch.optim.Optimizer) -> None:
    for _ in batches:
        break


def before_forward(batches: Iterator[Any], loss: Loss, failing: Failing, optimizer: torch.optim.Optimizer) -> None:
    with contextlib.suppress(Wrong):
        for index, batch in enumerate(batches):
            if index == 1:
                raise Wrong
            loss(batch).backward()


def before_backward(batches: Iterator[Any], loss: Loss, failing: Failing, optimizer: torch.optim.Optimizer) -> None:
    with contextlib.suppress(Wrong):
        for index, batch in enumerate(batches):
            value = loss(batch)
            if index == 2:
                raise Wrong
            value.backward()


def in_forward(batches: Iterator[Any], loss: Loss, failing: Failing, optimizer: torch.optim.Optimizer) -> None:
    with contextlib.suppress(Wrong):
        for index, batch in enumerate(batches):
            failing.now = "forward" if index == 1 else ""
            loss(batch).backward()
    failing.now = ""


def skipped(batches: Iterator[Any], loss: Loss, failing: Failing, optimizer: torch.optim.Optimizer) -> None:
    """Inside of the loop: the second micro-batch fails, and the last, after which units would be reduced."""
    for index, batch in enumerate(batches):
        failing.now = "forward" if index else ""
        with contextlib.suppress(Wrong):
            loss(batch).backward()
    failing.now = ""


def one_skipped(batches: Iterator[Any], loss: Loss, failing: Failing, optimizer: torch.optim.Optimizer) -> None:
    for index, batch in enumerate(batches):
        failing.now = "forward" if index == 0 else ""
        with contextlib.suppress(Wrong):
            loss(batch).backward()


def in_backward(batches: Iterator[Any], loss: Loss, failing: Failing, optimizer: torch.optim.Optimizer) -> None:
    """The step is lost: its gradients are dropped, and the next one begins anew."""
    with contextlib.suppress(Wrong):
        for index, batch in enumerate(batches):
            failing.now = "backward" if index == 1 else ""
            loss(batch).backward()
    failing.now = ""
    optimizer.zero_grad()


def zeroed(batches: Iterator[Any], loss: Loss, failing: Failing, optimizer: torch.optim.Optimizer) -> None:
    """The step begins anew after its first micro-batch, whose gradients are not reduced yet."""
    for index, batch in enumerate(batches):
        if index == 1:
            optimizer.zero_grad()
        loss(batch).backward()


WAYS = (zeroed, by_break, at_once, before_forward, before_backward, in_forward, skipped, one_skipped, in_backward)


def train(model: nn.Module, way: Way) -> Trained:
    """Three steps; the second one ends early."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    optimizer, losses, failing = sgd(model.parameters()), [], Failing(model)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        value = model(*batch) / TIMES
        losses.append(value.item())
        return value

    for step in range(STEPS):
        whole = zip(*(t.chunk(TIMES) for t in data(TIMES * EACH, seed=step)), strict=True)
        batches = [(tokens.chunk(ranks)[rank], targets.chunk(ranks)[rank]) for tokens, targets in whole]
        optimizer.zero_grad()
        each: Any = osdp.accumulate(model, batches) if ranks > 1 else iter(batches)
        if step == EARLY:
            way(each, loss, failing, optimizer)
            del each
        else:
            for batch in each:
                loss(batch).backward()
        gradients = whole_gradients(model)
        optimizer.step()
    mean = torch.tensor(losses)
    if ranks > 1:
        dist.all_reduce(mean)
    return Trained((mean / ranks).tolist(), gradients, whole_parameters(model))


def on_ranks(kind: type[nn.Module], plan: Plan, engine: Engine) -> list[Trained]:
    return [train(osdp.parallelize(built(kind), plan, engine=engine), way) for way in WAYS]


PLACES = [
    (Model, "2x2", 2, ASYNC_GLOO),
    (Model, "2x2", 2, STOCK),
    (Model, "2", 0, STOCK),
    (Twice, "3", 1, ASYNC_GLOO),
    (Model, "2", 0, ASYNC_GLOO),
]


@pytest.mark.parametrize(("kind", "world", "shape", "engine"), one_in(2, PLACES))
def test_steps_that_end_early_are_those_of_a_single_process(
    kind: type[nn.Module], world: str, shape: int, engine: Engine
) -> None:
    late = {"reduce_once": (True, False, True), "all_reduce_once": (True,), "gather_once": (True,)}
    plan = three_plans(kind, world, **late, accumulation=TIMES)[shape]
    assert any(unit.all_reduce_once for unit in plan.units) == (world == "2x2")
    assert any(unit.gather_once for unit in plan.units)
    truths = [train(built(kind), way) for way in WAYS]
    for runs in run_ranks(plan.cluster.world_size, on_ranks, kind, plan, engine, timeout_seconds=120):
        for way, run, truth in zip(WAYS, runs, truths, strict=True):
            try:
                same(run, truth)
            except AssertionError as error:
                raise AssertionError(f"{way.__name__}: {error}") from None


def refusals(plan: Plan) -> dict[str, str]:
    """What is said of gradients that are not whole, where they would be used."""
    model = osdp.parallelize(built(Model), plan)
    optimizer, failing, batch = sgd(model.parameters()), Failing(model), data(4, seed=0)
    said: dict[str, str] = {}

    def refused(name: str, action: Callable[[], Any]) -> None:
        with pytest.raises(OsdpError) as refusal:
            action()
        said[name] = str(refusal.value)

    batches = osdp.accumulate(model, [batch, batch])
    model(*next(batches)).backward()
    refused("step inside of the loop", optimizer.step)
    refused("clipping inside of the loop", lambda: osdp.clip_grad_norm_(model.parameters(), 1.0))
    batches.close()
    optimizer.step()
    optimizer.zero_grad()
    failing.now = "backward"
    with pytest.raises(Wrong):
        model(*batch).backward()
    failing.now = ""
    refused("step after a failed backward", optimizer.step)
    refused("forward after a failed backward", lambda: model(*batch))
    refused("forward again", lambda: model(*batch))
    optimizer.zero_grad(set_to_none=False)
    refused("forward after zeros", lambda: model(*batch))
    with torch.no_grad():
        model(*batch)  # evaluation needs no gradients
    optimizer.zero_grad()
    model(*batch).backward()
    optimizer.step()
    return said


def test_gradients_that_are_not_whole_are_refused_until_they_are_cleared() -> None:
    plan = three_plans(Model, "2", reduce_once=(True, False), accumulation=2)[2]
    for said in run_ranks(2, refusals, plan):
        assert "step after the loop" in said.pop("step inside of the loop")
        assert "clip after the loop" in said.pop("clipping inside of the loop")
        assert len(said) == 4
        assert all("the last backward failed" in words and "zero_grad()" in words for words in said.values())


def by_the_model(model: Any, batches: Sequence[tuple[Tensor, Tensor]], *, whole: bool) -> Trained:
    """Gradients of two micro-batches of three are cleared by the model's own zero_grad, or by one of its modules'."""
    optimizer = sgd(model.parameters())
    for _ in range(2):
        for index, batch in enumerate(osdp.accumulate(model, batches) if dist.is_initialized() else batches):
            model(*batch).backward()
            if index == 1:
                (model if whole else model.blocks[0]).zero_grad()
        gradients = whole_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return Trained([], gradients, whole_parameters(model))


def cleared_on_ranks(plans: Sequence[Plan]) -> list[Trained]:
    batches = [tuple(t.chunk(dist.get_world_size())[dist.get_rank()] for t in data(EACH, seed=i)) for i in range(TIMES)]
    return [
        by_the_model(osdp.parallelize(built(Model), plan), batches, whole=whole)  # type: ignore[arg-type]
        for whole, plan in zip((True, False), plans, strict=True)
    ]


def test_zero_grad_inside_of_the_loop_clears_what_is_not_reduced() -> None:
    """What is added up in the node too, and of a module alone."""
    late = {"all_reduce_once": (True,), "gather_once": (True,), "accumulation": TIMES}
    plans = three_plans(Model, "2x2", **late)[0], three_plans(Model, "2x2", reduce_once=(True,), accumulation=TIMES)[0]
    truths = [
        by_the_model(built(Model), [data(EACH, seed=i) for i in range(TIMES)], whole=whole) for whole in (True, False)
    ]
    for runs in run_ranks(4, cleared_on_ranks, plans):
        for run, truth in zip(runs, truths, strict=True):
            same(run, truth)


def cleared_late(plan: Plan | None, clip: Callable[..., Tensor] = nn.utils.clip_grad_norm_) -> Trained:
    """After a forward, when units are gathered: by the model, whose parameters are the copies then."""
    model = built(Model) if plan is None else osdp.parallelize(built(Model), plan)
    optimizer, ranks = sgd(model.parameters()), 1 if plan is None else 2
    for step in range(STEPS):
        loss = model(*(t.chunk(ranks)[dist.get_rank() if ranks > 1 else 0] for t in data(EACH, seed=step)))
        model.zero_grad(set_to_none=step == 1)
        loss.backward()
        model(*data(4, seed=0))  # no backward follows: units stay gathered
        clip(model.parameters(), 0.05)
        optimizer.step()
        gradients = whole_gradients(model)
    return Trained([], gradients, whole_parameters(model))


def made_late(plan: Plan) -> tuple[list[Trained], str]:
    found = [cleared_late(plan, clip) for clip in (osdp.clip_grad_norm_, nn.utils.clip_grad_norm_)]
    model = osdp.parallelize(built(Model), plan)
    loss = model(*data(4, seed=0))
    optimizer = sgd(model.parameters())
    loss.backward()
    with pytest.raises(OsdpError) as refusal:
        optimizer.step()
    return found, str(refusal.value)


def test_what_is_done_to_a_model_whose_units_are_gathered_reaches_its_shards() -> None:
    """Its zero_grad and clipping do; an optimizer that is made then would train gathered copies, and is refused."""
    plan = plan_by_hand(odd_graph(Model), "2", modes=(KEEP, REPLICATE))
    truth = cleared_late(None)
    for found, said in run_ranks(2, made_late, plan):
        for each in found:
            same(each, truth)
        assert "gathered copies" in said and "right after osdp.parallelize" in said


def left_out_alone(plan: Plan, engine: Engine, what: str) -> str:
    """Rank 1 leaves out a micro-batch, or a step, without a failure; all sizes agree with what the others do."""
    model = osdp.parallelize(built(Model), plan, engine=engine)
    optimizer, batches = sgd(model.parameters()), [data(4, seed=index) for index in range(TIMES)]
    with pytest.raises(OsdpError) as refusal:
        for step in range(3):
            odd = dist.get_rank() == 1 and step == 1
            for index, batch in enumerate(batches if what == "plain" else osdp.accumulate(model, batches)):
                if not (odd and ((what == "middle" and index == 1) or (what != "step" and index == TIMES - 1))):
                    model(*batch).backward()
            if not (odd and what == "step"):
                optimizer.step()
            optimizer.zero_grad()
    return str(refusal.value)


@pytest.mark.parametrize(
    ("what", "engine", "modes"),
    [
        ("middle", ASYNC_GLOO, (FREE,)),
        ("last", ASYNC_GLOO, (REPLICATE,)),
        ("plain", ASYNC_GLOO, (FREE, KEEP)),
        ("plain", STOCK, (FREE, KEEP)),
        ("step", STOCK, (REPLICATE, FREE)),
    ],
)
def test_a_rank_that_leaves_out_a_micro_batch_alone_is_refused(
    what: str, engine: Engine, modes: tuple[str, ...]
) -> None:
    once = (what == "last",)  # the last micro-batch is left out, and units are reduced as the loop is left
    plan = plan_by_hand(odd_graph(Model), "2", modes=modes, accumulation=TIMES, reduce_once=once)
    for said in run_ranks(2, left_out_alone, plan, engine, what):
        assert "one of them has left out a micro-batch or a step alone" in said


def alone(plan: Plan, engine: Engine, place: str) -> None:
    """Rank 1 fails alone, catches it and goes on; the other is left in the middle of its collectives."""
    alike.WAIT_SECONDS = 1.0
    model = osdp.parallelize(built(Model), plan, engine=engine)
    failing, batch = Failing(model), data(4, seed=0)
    for step in range(3):
        failing.now = place if dist.get_rank() == 1 and step == 1 else ""
        with contextlib.suppress(Wrong):
            model(*batch).backward()


@pytest.mark.parametrize(("engine", "shape"), [(ASYNC_GLOO, 0), (STOCK, 2)])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_rank_that_fails_alone_is_refused(engine: Engine, shape: int, place: str) -> None:
    sentence = f"a {place} failed on rank 1, and not on rank 0, so that their collectives no longer match; let the"
    with pytest.raises(RankFailed, match=f"rank 1 of 2: (?s:.*)OsdpError: {sentence}"):
        run_ranks(2, alone, three_plans(Model, "2")[shape], engine, place, timeout_seconds=20)
