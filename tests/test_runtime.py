"""A model may use its parameters in any way: training under a plan is still right.

- Tied, frozen, shared, unused and parent-owned parameters train as in a single process.
- A parameter that only some ranks use is averaged over all of them.
- Both engines train alike; that of backends with streams runs here on gloo, and waits.
- Plans that are applied one after another share their process groups, and models are let go.
- Clipping, accumulation, evaluation, precision and optimizers do what they do in a single process.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from odd_models import (
    Adapters,
    Mixture,
    Model,
    Owning,
    Repeated,
    TiedThrice,
    Twice,
    UnusedBeside,
    UnusedGradients,
    built,
    data,
    odd_graph,
)
from planned import plan_by_hand, plan_of_units, whole_gradients, whole_parameters
from ranks import run_ranks
from selection import one_in
from torch import Tensor, nn
from trained import (
    BATCH,
    COLLECTIVES,
    COURIER,
    EVERY_MODE,
    STEPS,
    TOLERANCE,
    Trained,
    close,
    same,
    sgd,
    three_plans,
    train,
)

import osdp
from osdp.cost.units import OPERATORS
from osdp.engine import ASYNC_GLOO, ENGINES, STOCK, Engine
from osdp.planfile import Plan
from osdp.profiling.trial import peak_above_start
from osdp.runtime.meshes import LANES
from osdp.sharding import FREE, FREE_IN_NODE, KEEP, KEEP_IN_NODE, REPLICATE
from osdp.training.optimizer import Lion

NORMS = (1.0, 2.0, float("inf"))


def on_ranks(kind: type[nn.Module], plans: Sequence[Plan], engine: Engine = ASYNC_GLOO) -> list[Trained]:
    return [train(osdp.parallelize(built(kind), plan, engine=engine), times=plan.accumulation) for plan in plans]


by_both_engines = pytest.mark.parametrize("engine", ENGINES.values(), ids=list(ENGINES))


def decaying(parameters: Any) -> torch.optim.Optimizer:
    """With a large eps, a step is not of full size where a gradient is nothing but rounding."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=0.01, weight_decay=1.0)


def unused_under_adamw(plans: Sequence[Plan], engine: Engine) -> list[Trained]:
    return [
        train(osdp.parallelize(built(UnusedGradients), plan, engine=engine), decaying, times=plan.accumulation)
        for plan in plans
    ]


@by_both_engines
def test_what_no_rank_uses_has_no_gradient_and_does_not_decay(engine: Engine) -> None:
    plans = [
        three_plans(UnusedGradients, "2")[0],
        three_plans(UnusedGradients, "2", accumulation=2, reduce_once=(True, False))[2],
    ]
    truth = train(built(UnusedGradients), decaying)
    before = dict(built(UnusedGradients).named_parameters())
    assert truth.gradients["blocks.0.idle"] is None
    assert torch.equal(truth.weights["blocks.0.idle"], before["blocks.0.idle"])
    for runs in run_ranks(2, unused_under_adamw, plans, engine):
        for run in runs:
            same(run, truth)


ODD_WAYS = [
    (TiedThrice, "2x2"),
    (Adapters, "2x2"),
    (Repeated, "2x2"),
    (Twice, "2"),
    (UnusedGradients, "2"),
    (UnusedBeside, "2"),
    (Owning, "3"),
]


# By both engines, which take turns in being the first.
BY_BOTH = [(*way, (STOCK, ASYNC_GLOO)[(index + turn) % 2]) for index, way in enumerate(ODD_WAYS) for turn in range(2)]


@pytest.mark.parametrize(("kind", "world", "engine"), one_in(2, BY_BOTH))
def test_parameters_may_be_used_in_any_way(kind: type[nn.Module], world: str, engine: Engine) -> None:
    plans = three_plans(kind, world)[slice(None) if engine == ASYNC_GLOO else slice(2)]
    truth = train(built(kind))
    for runs in run_ranks(plans[0].cluster.world_size, on_ranks, kind, plans, engine):
        for run in runs:
            same(run, truth)


@pytest.mark.parametrize("world", ["2", "2x2"])
def test_the_stock_engine_trains_as_a_single_process(world: str) -> None:
    """The engine of backends with streams, here on gloo: FSDP2's own collectives, on meshes of one and two levels."""
    plans = three_plans(Model, world, splits=((3, 2), (1, 1)))
    plans += three_plans(Model, world, accumulation=3, reduce_once=(True, False))[2:]
    assert {unit.mode for plan in plans for unit in plan.units} == set(EVERY_MODE)
    truth = train(built(Model))
    for runs in run_ranks(plans[0].cluster.world_size, on_ranks, Model, plans, STOCK):
        for run in runs:
            same(run, truth)


def on_a_slow_network(kind: type[nn.Module], plans: Sequence[Plan]) -> list[Trained]:
    def late(collective: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name == COURIER:
                time.sleep(0.003)
            return collective(*args, **kwargs)

        return run

    for name in COLLECTIVES:
        setattr(dist, name, late(getattr(dist, name)))
    return on_ranks(kind, plans)


def test_a_block_called_often_is_exact_however_late_reductions_arrive() -> None:
    plans = three_plans(Repeated, "2", accumulation=2)[:2]
    truth = train(built(Repeated))
    for runs in run_ranks(2, on_a_slow_network, Repeated, plans):
        for run in runs:
            same(run, truth)


def is_let_go(plan: Plan) -> bool:
    """Whether a model that has run a plan ends with its last name."""
    model = osdp.parallelize(built(Model), plan)
    model(*data(2, seed=0)).backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    return gone() is None


def test_a_model_is_let_go_when_nobody_names_it() -> None:
    assert all(run_ranks(2, is_let_go, three_plans(Model, "2")[0]))


def groups_and_couriers(plans: Sequence[Plan]) -> list[tuple[int, int]]:
    """How many process groups and couriers there are after each plan has trained."""
    found = []
    for plan in plans:
        train(osdp.parallelize(built(Model), plan))
        couriers = sum(thread.name == "osdp-comm" for thread in threading.enumerate())
        found.append((len(dist.distributed_c10d._world.pg_map), couriers))
    return found


def test_plans_of_one_world_share_its_process_groups() -> None:
    plans = three_plans(Model, "2")
    for _, *later in run_ranks(2, groups_and_couriers, [*plans, *plans]):
        assert len(set(later[1:])) == 1 and later[-1][1] == LANES


MIXTURE = {("tokens",): FREE, ("blocks.0",): KEEP, ("blocks.1",): FREE_IN_NODE, ("head",): REPLICATE}


def mixture(plan: Plan, engine: Engine) -> tuple[dict[str, Tensor | None], float, dict[str, Tensor | None]]:
    """Rank 0 calls experts 0 and 1, the last rank calls 2 alone; of two micro-batches the second leaves that out."""
    model = osdp.parallelize(built(Mixture), plan, engine=engine)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model(*mixture_part(rank, ranks)).backward()
    gradients = whole_gradients(model)
    norm = osdp.clip_grad_norm_(model.parameters(), 1e9).item()
    model.zero_grad()
    for part in osdp.accumulate(model, [mixture_part(rank, ranks), mixture_part(rank, ranks + 1)]):
        model(*part).backward()
    return gradients, norm, whole_gradients(model)


def mixture_part(rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    tokens, targets = data(4, seed=rank)
    return tokens, targets % 36 // 3 * 3 + (2 if rank == ranks - 1 else targets % 2)


@by_both_engines
@pytest.mark.parametrize("world", ["2", "2x2"])
def test_an_expert_that_gets_no_token_on_a_rank_is_averaged_too(world: str, engine: Engine) -> None:
    model = built(Mixture)
    plan = plan_of_units(model, world, MIXTURE)
    units = [replace(unit, all_reduce_once=world == "2x2" and unit.mode == FREE_IN_NODE) for unit in plan.units]
    plan = replace(plan, accumulation=2, units=tuple(units))
    ranks = plan.cluster.world_size
    for rank in range(ranks):
        (model(*mixture_part(rank, ranks)) / ranks).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    first = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    for rank in range(ranks):
        (model(*mixture_part(rank, ranks + 1)) / ranks).backward()
    for gradients, own_norm, of_both in run_ranks(ranks, mixture, plan, engine, timeout_seconds=30):
        for name, parameter in model.named_parameters():
            own, both = gradients[name], of_both[name]
            assert own is not None and both is not None and parameter.grad is not None, name
            close(own, first[name], name)
            close(both, parameter.grad, name)
        assert own_norm == pytest.approx(norm, rel=1e-5)


def in_lone_devices(plan: Plan) -> Trained:
    return train(osdp.parallelize(built(Model), plan))


def test_modes_within_the_node_are_right_where_a_node_has_one_device() -> None:
    plan = plan_by_hand(odd_graph(Model), "2x1", modes=(KEEP_IN_NODE, FREE_IN_NODE, FREE))
    for run in run_ranks(2, in_lone_devices, plan):
        same(run, train(built(Model)))


def evaluated(plan: Plan, engine: Engine) -> tuple[list[float], Trained]:
    """Evaluates after every backward and before the step, when kept copies are at their oldest."""
    model = osdp.parallelize(built(Model), plan, engine=engine)
    optimizer, losses = sgd(model.parameters()), []
    tokens, targets = data(4, seed=9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(tokens, targets).backward()
        with torch.no_grad():
            losses.append(model(tokens, targets).item())
        optimizer.step()
    return losses, Trained([], whole_gradients(model), whole_parameters(model))


@by_both_engines
def test_evaluating_between_backward_and_step_changes_nothing(engine: Engine) -> None:
    model = built(Model)
    optimizer, losses = sgd(model.parameters()), []
    tokens, targets = data(4, seed=9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(tokens, targets)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    plan = plan_by_hand(odd_graph(Model), "2", modes=(KEEP, REPLICATE, FREE, KEEP))
    for own, run in run_ranks(2, evaluated, plan, engine):
        torch.testing.assert_close(own, losses, rtol=TOLERANCE, atol=0)
        same(run, Trained([], whole_gradients(model), whole_parameters(model)))


def clipped(plan: Plan, engine: Engine) -> list[tuple[float, dict[str, Tensor | None]]]:
    model, found = osdp.parallelize(built(Model), plan, engine=engine), []
    assert osdp.clip_grad_norm_(model.parameters(), 1.0).item() == 0.0  # no gradients yet
    tokens, targets = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in data(BATCH, seed=0))
    for norm_type in NORMS:
        model.zero_grad()
        model(tokens, targets).backward()
        norm = osdp.clip_grad_norm_(model.parameters(), 0.01, norm_type=norm_type)
        found.append((norm.item(), whole_gradients(model)))
    return found


@pytest.mark.parametrize(("world", "engine"), [("1", ASYNC_GLOO), ("3", STOCK), ("2x2", ASYNC_GLOO), ("2x2", STOCK)])
def test_clipping_equals_the_single_processes(world: str, engine: Engine) -> None:
    plan = plan_by_hand(odd_graph(Model), world, modes=EVERY_MODE, granularity=OPERATORS, splits=((3, 2), (1, 1)))
    results = run_ranks(plan.cluster.world_size, clipped, plan, engine)
    model = built(Model)
    for index, norm_type in enumerate(NORMS):
        model.zero_grad()
        model(*data(BATCH, seed=0)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=norm_type)
        for result in results:
            assert result[index][0] == pytest.approx(norm.item(), rel=1e-5)
            for name, parameter in model.named_parameters():
                own = result[index][1][name]
                assert own is not None and parameter.grad is not None
                close(own, parameter.grad, name)


def clip_few_rows() -> float:
    model = nn.Linear(4, 1)
    plan = plan_of_units(model, "2", {("",): FREE})
    torch.nn.init.ones_(model.weight)
    osdp.parallelize(model, plan)(torch.ones(2, 4)).sum().backward()
    return osdp.clip_grad_norm_(model.parameters(), 1.0).item()


def test_clipping_includes_ranks_that_hold_no_row() -> None:
    assert run_ranks(2, clip_few_rows, timeout_seconds=20) == pytest.approx([20**0.5] * 2)  # 4 times 2, and the bias


# With a large eps, a step is not of full size where a gradient is nothing but rounding.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=0.01, foreach=True),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=0.01, fused=True),
    "sgd nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01, eps=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=0.01, weight_decay=0.1, foreach=True),
    "lion": lambda parameters: Lion(parameters, lr=1e-3, weight_decay=0.1),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01, eps=0.01, foreach=True),
    "radam": lambda parameters: torch.optim.RAdam(parameters, lr=0.01, eps=0.01, foreach=True),
    "adamax": lambda parameters: torch.optim.Adamax(parameters, lr=0.01, eps=0.01, foreach=True),
    "adadelta": lambda parameters: torch.optim.Adadelta(parameters, lr=0.1, eps=0.01, foreach=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, eps=0.01, foreach=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipping_is_exact_and_allocates_next_to_nothing(dtype: torch.dtype) -> None:
    gradient = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0)).to(dtype)
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.clone()
    allocated = peak_above_start(lambda: osdp.clip_grad_norm_([parameter], 1.0))
    assert allocated < gradient.nbytes / 50
    clipped = gradient.double() / gradient.double().norm()
    # torch's own norm of so many numbers in single precision is off by more
    torch.testing.assert_close(parameter.grad.double(), clipped, rtol=1e-6 if dtype == torch.float32 else 0.01, atol=0)


def optimized(plan: Plan) -> dict[str, Trained]:
    return {name: train(osdp.parallelize(built(Model), plan), make) for name, make in OPTIMIZERS.items()}


def test_optimizers_step_over_all_modes_as_in_a_single_process() -> None:
    plan = plan_by_hand(odd_graph(Model), "2x2", modes=EVERY_MODE, granularity=OPERATORS, splits=((3, 2), (1, 1)))
    results = run_ranks(4, optimized, plan)
    for name, make in OPTIMIZERS.items():
        truth = train(built(Model), make)
        for result in results:
            same(result[name], truth)


def accumulated(plan: Plan) -> tuple[Trained, int]:
    """What was trained, and how many reductions it took."""
    from osdp.runtime.async_comm import Reductions

    started, start = [0], Reductions.start

    def counted(self: Reductions, *args: Any, **kwargs: Any) -> None:
        started[0] += 1
        start(self, *args, **kwargs)

    Reductions.start = counted  # type: ignore[method-assign]
    return train(osdp.parallelize(built(Model), plan), times=plan.accumulation), started[0]


@pytest.mark.parametrize("reduce_once", [(True,), (True, False)])
def test_accumulation_equals_one_large_batch_and_reduces_as_planned(reduce_once: tuple[bool, ...]) -> None:
    plan = plan_by_hand(
        odd_graph(Model), "2", modes=EVERY_MODE, granularity=OPERATORS, accumulation=3, reduce_once=reduce_once
    )
    once = sum(unit.reduce_once for unit in plan.units)
    assert once == (len(plan.units) if reduce_once == (True,) else (len(plan.units) + 1) // 2)
    truth = train(built(Model))
    for run, reductions in run_ranks(2, accumulated, plan):
        same(run, truth)
        assert reductions == STEPS * (once + 3 * (len(plan.units) - once))


def in_bf16(plan: Plan, engine: Engine) -> tuple[dict[str, Tensor | None], set[torch.dtype], set[torch.dtype]]:
    """The first step's gradients, the dtypes that parameters are held in, and those of what is computed."""
    model = built(Model).to(torch.bfloat16 if plan.precision == "pure-bf16" else torch.float32)
    osdp.parallelize(model, plan, engine=engine)
    held, computed = {parameter.dtype for parameter in model.parameters()}, set()
    model.blocks[0].register_forward_hook(lambda _module, _args, out: computed.add(out.dtype))
    model(*(t.chunk(dist.get_world_size())[dist.get_rank()] for t in data(BATCH, seed=0))).backward()
    return whole_gradients(model), held, computed


def mean_of_bf16_runs(ranks: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """A single process that computes in bf16 on each rank's part, and takes the mean in fp32."""
    model = built(Model).to(dtype)
    parts = [t.chunk(ranks) for t in data(BATCH, seed=0)]
    total = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}
    for part in zip(*parts, strict=True):
        cast = {name: p.detach().to(torch.bfloat16).requires_grad_() for name, p in model.named_parameters()}
        torch.func.functional_call(model, cast, part).backward()
        for name, parameter in cast.items():
            assert parameter.grad is not None
            total[name] += parameter.grad.float() / ranks
    return total


@by_both_engines
@pytest.mark.parametrize(
    ("precision", "reduce_dtype", "tolerance"),
    [("bf16", "fp32", 1e-6), ("bf16", "bf16", 2**-5), ("pure-bf16", "bf16", 2**-5)],  # summands cancel
)
def test_bf16_computes_with_the_same_casts(precision: str, reduce_dtype: str, tolerance: float, engine: Engine) -> None:
    # No slices: they round the gradients of their inputs one by one.
    plan = plan_by_hand(
        odd_graph(Model),
        "2x2",
        modes=EVERY_MODE,
        granularity=OPERATORS,
        precision=precision,
        reduce_dtype=reduce_dtype,
    )
    master = torch.bfloat16 if precision == "pure-bf16" else torch.float32
    truth = mean_of_bf16_runs(4, master)
    for gradients, held, computed in run_ranks(4, in_bf16, plan, engine):
        assert (held, computed) == ({master}, {torch.bfloat16})
        for name, true in truth.items():
            own = gradients[name]
            assert own is not None and own.dtype == master
            close(own, true, name, tolerance)
