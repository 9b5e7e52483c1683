"""A model may use its parameters in any way: training under a plan is still right, or it is refused with a reason.

- Tied, frozen, shared, unused and parent-owned parameters train as in a single process.
- What differs between ranks (the plan, the model, its weights, which parameters are used) is averaged or refused.
- Clipping, accumulation, precision and optimizers do what they do in a single process.
- Collectives run in the courier, and what fails there is raised where the model is trained.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import batch_of, graph_of, tiny
from odd_models import (
    Adapters,
    Mixture,
    Model,
    Owning,
    Repeated,
    TiedThrice,
    Unused,
    UnusedBeside,
    built,
    data,
    odd_graph,
)
from planned import plan_by_hand, plan_of_units, whole_gradients, whole_parameters
from ranks import RankFailed, run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

import osdp
from osdp._torch import TorchDispatchMode, tree_leaves
from osdp.cost.units import OPERATORS, PARTS, WHOLE
from osdp.errors import DoesNotFit, UsageError
from osdp.planfile import FREE, FREE_IN_NODE, FREE_TO_NODE, KEEP, KEEP_IN_NODE, REPLICATE, Plan

EVERY_MODE = (FREE, KEEP, REPLICATE, FREE_TO_NODE, FREE_IN_NODE, KEEP_IN_NODE)
BATCH, STEPS, TOLERANCE = 12, 3, 1e-5
COURIER = "osdp-courier"
COLLECTIVES = ("all_gather_single", "all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor")
COLLECTIVES += ("all_reduce", "broadcast", "isend", "irecv", "recv")
NORMS = (1.0, 2.0, float("inf"))


@dataclass(frozen=True)
class Trained:
    """Losses of all steps, gradients of the last, and the weights after it."""

    losses: list[float]
    gradients: dict[str, Tensor | None]
    weights: dict[str, Tensor]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1, momentum=0.9)


def train(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer] = sgd, *, times: int = 1) -> Trained:
    """Trains on this rank's part of every batch, in `times` micro-batches; without ranks, on all of it."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    optimizer, losses = make(model.parameters()), []
    for step in range(STEPS):
        parts = [t.chunk(ranks)[rank].chunk(times) for t in data(BATCH, seed=step)]
        micro_batches: Any = list(zip(*parts, strict=True))
        optimizer.zero_grad()
        total = torch.zeros(())
        for tokens, targets in osdp.accumulate(model, micro_batches) if times > 1 else micro_batches:
            loss = model(tokens, targets) / times
            loss.backward()
            total += loss.detach()
        if ranks > 1:
            dist.all_reduce(total)
        losses.append(total.item() / ranks)
        gradients = whole_gradients(model)
        optimizer.step()
    return Trained(losses, gradients, whole_parameters(model))


def on_ranks(kind: type[nn.Module], plans: Sequence[Plan]) -> list[Trained]:
    return [train(osdp.parallelize(built(kind), plan), times=plan.accumulation) for plan in plans]


def same(found: Trained, truth: Trained, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(found.losses, truth.losses, rtol=tolerance, atol=0)
    assert found.gradients.keys() == truth.gradients.keys()
    for name, true in truth.gradients.items():
        own = found.gradients[name]
        assert (own is None or not own.any()) if true is None else own is not None, name
        if own is not None and true is not None:
            close(own, true, name, tolerance)
    for name, true in truth.weights.items():
        close(found.weights[name], true, name, tolerance)


def close(own: Tensor, true: Tensor, name: str, tolerance: float = TOLERANCE) -> None:
    scale = float(true.abs().max()) if true.any() else 1.0
    error = float((own.float() - true.float()).abs().max()) / scale
    assert error <= tolerance, f"{name} is off by {error:.1e}"


def three_plans(kind: type[nn.Module], world: str, **changes: Any) -> list[Plan]:
    graph = odd_graph(kind)
    return [
        plan_by_hand(
            graph,
            world,
            modes=EVERY_MODE[2 * index :] + EVERY_MODE[: 2 * index],
            granularity=granularity,
            recompute=((True, False), (False,), (False, True))[index],
            **changes,
        )
        for index, granularity in enumerate((WHOLE, PARTS, OPERATORS))
    ]


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        (TiedThrice, "2x2"),
        (Adapters, "2x2"),
        (Repeated, "2x2"),
        (Unused, "2"),
        (UnusedBeside, "2"),
        (Owning, "3"),
    ],
)
def test_parameters_may_be_used_in_any_way(kind: type[nn.Module], world: str) -> None:
    plans = three_plans(kind, world)
    truth = train(built(kind))
    for runs in run_ranks(plans[0].cluster.world_size, on_ranks, kind, plans):
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


MIXTURE = {("tokens",): FREE, ("blocks.0",): KEEP, ("blocks.1",): FREE_IN_NODE, ("head",): REPLICATE}


def mixture(plan: Plan) -> tuple[dict[str, Tensor | None], float]:
    """Rank 0 calls experts 0 and 1, the last rank calls 2 alone."""
    model = osdp.parallelize(built(Mixture), plan)
    loss = model(*mixture_part(dist.get_rank(), dist.get_world_size()))
    loss.backward()
    gradients = whole_gradients(model)
    return gradients, osdp.clip_grad_norm_(model.parameters(), 1e9).item()


def mixture_part(rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    tokens, targets = data(4, seed=rank)
    return tokens, targets % 36 // 3 * 3 + (2 if rank == ranks - 1 else targets % 2)


@pytest.mark.parametrize("world", ["2", "2x2"])
def test_an_expert_that_gets_no_token_on_a_rank_is_averaged_too(world: str) -> None:
    model = built(Mixture)
    plan = plan_of_units(model, world, MIXTURE)
    ranks = plan.cluster.world_size
    for rank in range(ranks):
        (model(*mixture_part(rank, ranks)) / ranks).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    for gradients, own_norm in run_ranks(ranks, mixture, plan, timeout_seconds=30):
        for name, parameter in model.named_parameters():
            own = gradients[name]
            assert own is not None and parameter.grad is not None, name
            close(own, parameter.grad, name)
        assert own_norm == pytest.approx(norm, rel=1e-5)


def in_lone_devices(plan: Plan) -> Trained:
    return train(osdp.parallelize(built(Model), plan))


def test_modes_within_the_node_are_right_where_a_node_has_one_device() -> None:
    plan = plan_by_hand(odd_graph(Model), "2x1", modes=(KEEP_IN_NODE, FREE_IN_NODE, FREE))
    for run in run_ranks(2, in_lone_devices, plan):
        same(run, train(built(Model)))


def evaluated(plan: Plan) -> tuple[list[float], Trained]:
    """Evaluates after every backward and before the step, when kept copies are at their oldest."""
    model = osdp.parallelize(built(Model), plan)
    optimizer, losses = sgd(model.parameters()), []
    tokens, targets = data(4, seed=9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(tokens, targets).backward()
        with torch.no_grad():
            losses.append(model(tokens, targets).item())
        optimizer.step()
    return losses, Trained([], whole_gradients(model), whole_parameters(model))


def test_evaluating_between_backward_and_step_changes_nothing() -> None:
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
    for own, run in run_ranks(2, evaluated, plan):
        torch.testing.assert_close(own, losses, rtol=TOLERANCE, atol=0)
        same(run, Trained([], whole_gradients(model), whole_parameters(model)))


def clipped(plan: Plan) -> list[tuple[float, dict[str, Tensor | None]]]:
    model, found = osdp.parallelize(built(Model), plan), []
    assert osdp.clip_grad_norm_(model.parameters(), 1.0).item() == 0.0  # no gradients yet
    tokens, targets = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in data(BATCH, seed=0))
    for norm_type in NORMS:
        model.zero_grad()
        model(tokens, targets).backward()
        norm = osdp.clip_grad_norm_(model.parameters(), 0.01, norm_type=norm_type)
        found.append((norm.item(), whole_gradients(model)))
    return found


@pytest.mark.parametrize("world", ["1", "3", "2x2"])
def test_clipping_equals_the_single_processes(world: str) -> None:
    plan = plan_by_hand(odd_graph(Model), world, modes=EVERY_MODE, granularity=OPERATORS, splits=((3, 2), (1, 1)))
    results = run_ranks(plan.cluster.world_size, clipped, plan)
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
}


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
    from osdp.runtime.courier import Reductions

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


def in_bf16(plan: Plan) -> tuple[dict[str, Tensor | None], set[torch.dtype], set[torch.dtype]]:
    """The first step's gradients, the dtypes that parameters are held in, and those of what is computed."""
    model = built(Model).to(torch.bfloat16 if plan.precision == "pure-bf16" else torch.float32)
    osdp.parallelize(model, plan)
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


@pytest.mark.parametrize(
    ("precision", "reduce_dtype", "tolerance"),
    [("bf16", "fp32", 1e-6), ("bf16", "bf16", 2**-5), ("pure-bf16", "bf16", 2**-5)],  # summands cancel
)
def test_bf16_computes_with_the_same_casts(precision: str, reduce_dtype: str, tolerance: float) -> None:
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
    for gradients, held, computed in run_ranks(4, in_bf16, plan):
        assert (held, computed) == ({master}, {torch.bfloat16})
        for name, true in truth.items():
            own = gradients[name]
            assert own is not None and own.dtype == master
            close(own, true, name, tolerance)


def from_meta(name: str, plans: Sequence[Plan]) -> list[dict[str, Tensor]]:
    torch.use_deterministic_algorithms(True)  # fills what is not initialised with NaN
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
    found = []
    for plan in plans:
        model = osdp.parallelize(tiny(name).build_on_meta(), plan)
        osdp.initialize(model, seed=3)
        args, kwargs = batch_of(name, 2, seed=0)
        tiny(name).loss(model(*args, **kwargs)).backward()
        found.append({**whole_parameters(model), **dict(model.named_buffers())})
    return found


@pytest.mark.parametrize(("name", "world"), [("gpt", "2x2"), ("llama", "2"), ("t5", "2"), ("vit", "2"), ("bert", "3")])
def test_weights_from_the_meta_device_are_the_same_under_every_plan(name: str, world: str) -> None:
    plans = [
        plan_by_hand(graph_of(name), world, modes=EVERY_MODE, granularity=WHOLE),
        plan_by_hand(graph_of(name), world, modes=(REPLICATE, FREE), granularity=OPERATORS, splits=((3, 1), (2, 2))),
    ]
    alone = osdp.initialize(tiny(name).build_on_meta(), seed=3)
    truth = {**dict(alone.named_parameters()), **dict(alone.named_buffers())}
    other = dict(osdp.initialize(tiny(name).build_on_meta(), seed=4).named_parameters())
    assert not any(t.isnan().any() for t in truth.values())
    assert any(not torch.equal(tensor, truth[key]) for key, tensor in other.items())
    for runs in run_ranks(plans[0].cluster.world_size, from_meta, name, plans):
        for found in runs:
            assert found.keys() == truth.keys()
            unequal = [key for key, tensor in truth.items() if not torch.equal(found[key], tensor)]
            assert not unequal, unequal


class Deep(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(24))


class LiveBytes(TorchDispatchMode):
    """The most bytes of memory alive at once, of what is made within it."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._alive = 0, dict[Any, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if isinstance(local, Tensor) and not local.is_meta:
                self._alive[StorageWeakRef(local.untyped_storage())] = local.untyped_storage().nbytes()
        self._alive = {storage: size for storage, size in self._alive.items() if not storage.expired()}
        self.peak = max(self.peak, sum(self._alive.values()))
        return out


def deep_plan(world: str) -> Plan:
    with torch.device("meta"):
        return plan_of_units(Deep(), world, {(f"blocks.{index}",): FREE for index in range(24)})


def live_bytes(plan: Plan) -> int:
    with torch.device("meta"):
        model = Deep()
    osdp.parallelize(model, plan)
    with LiveBytes() as live:
        osdp.initialize(model)
    return live.peak


def test_no_rank_ever_holds_the_whole_model() -> None:
    block = 64 * 64 * 4
    for peak in run_ranks(4, live_bytes, deep_plan("4")):
        assert 24 * block / 4 < peak < 24 * block / 4 + 4 * block


def after_a_failure(plan: Plan) -> Trained | str:
    """A backward fails halfway on all ranks, as it does when memory runs out; then training goes on."""
    model, failing = osdp.parallelize(built(Model), plan), [True]
    optimizer = sgd(model.parameters())  # before the failure: afterwards FSDP2's modules show gathered parameters

    def fail(*_: Any) -> None:
        if failing[0]:
            raise MemoryError("out of memory")

    model.blocks[0].up.register_full_backward_hook(fail)
    with pytest.raises(MemoryError):
        model(*data(2, seed=0)).backward()
    failing[0] = False
    try:
        return train(model, lambda _: optimizer)
    except RuntimeError as error:
        return str(error)


def test_after_a_failed_backward_training_is_right_or_refused() -> None:
    plan = plan_by_hand(odd_graph(Model), "2", modes=(FREE, KEEP, REPLICATE, FREE))
    for run in run_ranks(2, after_a_failure, plan, timeout_seconds=30):
        if isinstance(run, Trained):
            same(run, train(built(Model)))
        else:
            assert run


def state_of(plan: Plan) -> dict[str, torch.Size]:
    model = osdp.parallelize(built(TiedThrice), plan)
    state = model.state_dict()
    before = {name: tensor.clone() for name, tensor in whole_parameters(model).items()}
    kept = {name: tensor.clone() for name, tensor in state.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert not any(tensor.any() for tensor in whole_parameters(model).values())
    model.load_state_dict(kept)
    assert all(torch.equal(tensor, before[name]) for name, tensor in whole_parameters(model).items())
    model(*data(2, seed=0)).backward()  # what was loaded is what is computed with
    return {name: tensor.shape for name, tensor in state.items()}


def test_the_state_has_the_plain_models_names_and_shapes_and_loads_again() -> None:
    plan = plan_by_hand(odd_graph(TiedThrice), "2x2", modes=EVERY_MODE, granularity=OPERATORS, splits=((3, 2), (2, 2)))
    plain = {name: tensor.shape for name, tensor in built(TiedThrice).state_dict().items()}
    assert run_ranks(4, state_of, plan) == [plain] * 4


def refused(plan: Plan, change: Callable[[int, nn.Module, Plan], tuple[nn.Module, Plan]]) -> str:
    model, own = change(dist.get_rank(), built(Model), plan)
    with pytest.raises(UsageError) as refusal:
        osdp.parallelize(model, own)
    return str(refusal.value)


def as_planned(rank: int, model: nn.Module, plan: Plan) -> tuple[nn.Module, Plan]:
    return model, plan


def other_plan(rank: int, model: nn.Module, plan: Plan) -> tuple[nn.Module, Plan]:
    first = replace(plan.units[0], mode=REPLICATE)
    return model, replace(plan, units=(first, *plan.units[1:])) if rank == 1 else plan


def wider(rank: int, model: nn.Module, plan: Plan) -> tuple[nn.Module, Plan]:
    model.blocks[1].up = nn.Linear(16, 48)
    return model, plan


def without_a_block(rank: int, model: nn.Module, plan: Plan) -> tuple[nn.Module, Plan]:
    model.blocks = model.blocks[:1]
    return model, plan


def other_weights(rank: int, model: nn.Module, plan: Plan) -> tuple[nn.Module, Plan]:
    with torch.no_grad():
        model.head.weight += rank
    return model, plan


@pytest.mark.parametrize(
    ("change", "world", "words"),
    [
        (as_planned, "3", ("for 3 ranks", "2 run")),
        (other_plan, "2", ("rank 1 has another plan",)),
        (wider, "2", ("blocks.1 has", "planned with")),
        (without_a_block, "2", ("'blocks.1'", "lacks")),
        (other_weights, "2", ("rank 1", "head.weight")),
    ],
)
def test_what_differs_is_refused_on_every_rank_and_named(
    change: Callable[..., Any], world: str, words: tuple[str, ...]
) -> None:
    plan = plan_by_hand(odd_graph(Model), world, modes=(FREE, KEEP, FREE, REPLICATE))
    for message in run_ranks(2, refused, plan, change, timeout_seconds=20):
        assert all(word in message for word in words), message


def planned(memory: str) -> str:
    tokens = torch.zeros(2, 6, dtype=torch.long)
    model = built(Model)
    if dist.get_rank() != 0:
        model.forward = None  # type: ignore[method-assign]  # rank 0 plans for all
    try:
        return osdp.plan(model, (tokens, tokens), "2xCPU", memory=memory, precision="fp32", batch=2).digest
    except DoesNotFit as error:
        return f"{error.peak_bytes > error.limit_bytes} {error}"


def test_all_ranks_get_rank_0s_plan_or_its_error() -> None:
    first, second = run_ranks(2, planned, "4GiB")
    assert first == second and len(first) == 64
    first, second = run_ranks(2, planned, "1KiB")
    assert first == second and first.startswith("True ")


def threads_of_collectives(plan: Plan) -> set[tuple[str, str]]:
    model, seen = osdp.parallelize(built(Model), plan), set()

    def watched(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            seen.add((name, threading.current_thread().name))
            return collective(*args, **kwargs)

        return run

    for name in COLLECTIVES:
        setattr(dist, name, watched(name, getattr(dist, name)))
    model(*data(2, seed=0)).backward()
    return seen


def test_collectives_run_in_the_courier() -> None:
    plan = plan_by_hand(odd_graph(Model), "2x2", modes=EVERY_MODE, granularity=OPERATORS)
    for seen in run_ranks(4, threads_of_collectives, plan):
        assert {thread for _, thread in seen} == {COURIER}
        assert {"isend", "irecv", "all_reduce"} <= {name for name, _ in seen}


def disconnected(plan: Plan, folder: Path) -> None:
    """Rank 1 loses its connections after a step; rank 0 writes down what it then meets, and how soon."""
    model, told = osdp.parallelize(built(Model), plan), folder / "told"
    model(*data(2, seed=0)).backward()
    dist.barrier()  # the step is over on both
    if dist.get_rank() == 1:
        time.sleep(0.5)
        for file in Path("/proc/self/fd").iterdir():
            if file.is_socket():
                with socket.socket(fileno=os.dup(int(file.name))) as connection, contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        until = time.monotonic() + 20
        while not told.exists() and time.monotonic() < until:
            time.sleep(0.05)
        return
    start = time.monotonic()
    try:
        for _ in range(100):
            model(*data(2, seed=0)).backward()
    except RuntimeError as error:
        (folder / "partial").write_text(f"{time.monotonic() - start:.1f} {error}")
        (folder / "partial").rename(told)


def test_a_lost_connection_is_raised_where_the_model_is_trained(tmp_path: Path) -> None:
    plan = plan_by_hand(odd_graph(Model), "2", modes=(FREE, KEEP, REPLICATE))
    with pytest.raises(RankFailed):  # the ranks' last barrier fails too
        run_ranks(2, disconnected, plan, tmp_path, timeout_seconds=40)
    seconds, _, message = (tmp_path / "told").read_text().partition(" ")
    assert float(seconds) < 15 and message
