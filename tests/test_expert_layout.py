"""Claim: a model whose experts lie over a mesh dimension of their own trains as a single process does.

On 2 × 2 real ranks, each with samples of its own, with units and experts in every mode, on both engines: losses,
gradients, their norm, the clipped step, and a checkpoint that is read back, by the same layout and by a single process.
Tokens that all go to one rank's experts change nothing. What does not go together is refused with a sentence.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from architectures import tiny
from planned import plan_of_units, whole_gradients, whole_parameters
from ranks import run_ranks
from runs import Run, difference
from selection import one_in
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import osdp
from osdp.cluster import Cluster
from osdp.engine import ASYNC_GLOO, STOCK, Engine
from osdp.errors import UsageError
from osdp.experts import divide_experts, expert_modules, local_experts
from osdp.planfile import OuterLayout, Plan
from osdp.sharding import FREE, FREE_IN_NODE, KEEP, KEEP_IN_NODE, REPLICATE

STEPS, BATCH, LENGTH, MAX_NORM = 3, 16, 8, 0.05
TOLERANCE = 1e-5
EXPERTS = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")


class Case(NamedTuple):
    """Nodes × devices, ranks to the experts, the modes of experts and of the other units, and how they train."""

    world: str
    ranks: int
    experts: tuple[str, ...]
    modes: tuple[str, ...]
    engine: Engine
    one_sided: bool = False
    micro_batches: int = 1
    across_once: bool = False


def batch(step: int) -> Tensor:
    return torch.randint(0, 64, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def built(*, one_sided: bool = False) -> nn.Module:
    """A Mixtral of four experts; `one_sided`, the router of its first block chooses the first two for every token."""
    torch.manual_seed(0)
    model = tiny("mixtral").build()
    if one_sided:
        first = model.get_submodule("model.layers.0.mlp")
        first.gate.register_forward_hook(_first_two)  # type: ignore[union-attr, arg-type]
    return model


def _first_two(router: nn.Module, inputs: object, outputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    logits, weights, chosen = outputs
    return logits, weights, torch.arange(2).expand_as(chosen)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)  # of gradients near 0, rounding decides the step


def step_of(model: nn.Module, parts: Sequence[Tensor]) -> float:
    total = 0.0
    for tokens in parts:
        loss = model(input_ids=tokens, labels=tokens).loss / len(parts)
        loss.backward()
        total += loss.item()
    return total


def alone(steps: int = STEPS, *, one_sided: bool = False) -> Run:
    """A single process on the whole batch; the last step's gradients are left as they were clipped."""
    model, losses, norms = built(one_sided=one_sided), [], []
    optimizer = optimizer_of(model)
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(step_of(model, [batch(step)]))
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return Run(losses, norms, gradients, {name: p.detach() for name, p in model.named_parameters()})


def plan_for(case: Case) -> Plan:
    """Units of experts, and one each for the embedding, the blocks, of which one is recomputed, the norm, the head."""
    local = tiny("mixtral").build_on_meta()
    local_experts(local, case.ranks)
    others = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head")
    modes = {(name,): case.modes[index % len(case.modes)] for index, name in enumerate(others)}
    modes |= {(name,): case.experts[index % len(case.experts)] for index, name in enumerate(EXPERTS)}
    order = sorted(modes, key=lambda names: (names[0] != "model.embed_tokens", "layers" not in names[0], names))
    plan = plan_of_units(local, case.world, {name: modes[name] for name in order}, recompute=("model.layers.1",))
    units = tuple(
        replace(
            unit,
            experts=unit.name in EXPERTS,
            reduce_once=case.micro_batches > 1 and index % 2 == 1 and not case.across_once,
            all_reduce_once=case.across_once and unit.sharding.is_reduced_across,
            two_levels=case.engine == ASYNC_GLOO and plan.cluster.has_two_levels and unit.mode == FREE,
        )
        for index, unit in enumerate(plan.units)
    )
    return replace(plan, units=units, layout=OuterLayout(expert=case.ranks), accumulation=case.micro_batches)


def train(case: Case, folder: str) -> Run:
    """On a rank of dp × ep: steps with a checkpoint and a fresh start from it after the second."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // case.ranks, case.ranks), mesh_dim_names=("dp", "ep"))

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = divide_experts(built(one_sided=case.one_sided), mesh["ep"])
        osdp.parallelize(model, plan_for(case), mesh=mesh["dp", "ep"], engine=case.engine)
        return model, optimizer_of(model)

    (model, optimizer), losses, norms = make(), [], []
    for step in range(STEPS):
        if step == 2:
            osdp.save_checkpoint(folder, model, optimizer, step=step)
            model, optimizer = make()
            assert osdp.load_checkpoint(folder, model, optimizer) is not None
        optimizer.zero_grad()
        own = batch(step).chunk(world)[dist.get_rank()].chunk(case.micro_batches)
        total = torch.zeros(())
        for tokens in osdp.accumulate(model, own):
            loss = model(input_ids=tokens, labels=tokens).loss / len(own)
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / world)
        norms.append(float(osdp.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    return Run(losses, norms, whole_gradients(model), whole_parameters(model))


def train_planned(plan: Plan) -> Run:
    """One step of a plan that was searched for."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = divide_experts(built(), mesh["ep"])
    osdp.parallelize(model, plan, mesh=mesh)
    loss = step_of(model, [batch(0).chunk(4)[dist.get_rank()]])
    total = torch.tensor(loss)
    dist.all_reduce(total)
    norm = float(osdp.clip_grad_norm_(model.parameters(), MAX_NORM))
    optimizer_of(model).step()
    return Run([total.item() / 4], [norm], whole_gradients(model), whole_parameters(model))


CASES = {
    "stock": Case("4", 2, (FREE, KEEP), (FREE, KEEP, REPLICATE), STOCK),
    "async": Case("4", 2, (KEEP, REPLICATE), (KEEP, REPLICATE, FREE), ASYNC_GLOO),
    "nodes": Case("2x2", 2, (FREE_IN_NODE, REPLICATE), (KEEP_IN_NODE, FREE_IN_NODE, FREE), STOCK, micro_batches=2),
    "async nodes": Case("2x2", 2, (FREE, KEEP), (FREE_IN_NODE, FREE, KEEP_IN_NODE), ASYNC_GLOO, micro_batches=2),
    "one-sided": Case("4", 2, (FREE, REPLICATE), (FREE,), ASYNC_GLOO, one_sided=True),
    "four of two": Case("2x4", 2, (FREE_IN_NODE, FREE), (FREE,), STOCK, micro_batches=2, across_once=True),
    "four of two async": Case("2x4", 2, (KEEP_IN_NODE, FREE), (FREE,), ASYNC_GLOO, micro_batches=2, across_once=True),
    "all": Case("4", 4, (REPLICATE,), (FREE, REPLICATE), STOCK, one_sided=True),
    "all async": Case("4", 4, (REPLICATE,), (FREE, REPLICATE), ASYNC_GLOO),
}


@pytest.mark.parametrize("case", one_in(3, CASES.values(), ids=[*CASES]))
def test_ranks_with_experts_of_their_own_train_as_one_process(case: Case, tmp_path: Path) -> None:
    truth = alone(one_sided=case.one_sided)
    ranks = Cluster.parse(f"{case.world}xCPU").world_size
    for rank, run in enumerate(run_ranks(ranks, train, case, str(tmp_path), timeout_seconds=120)):
        error, where = difference(run, truth)
        assert error < TOLERANCE, f"rank {rank}: {where} is off by {error:.1e}"
    model = built()
    optimizer = optimizer_of(model)
    loaded = osdp.load_checkpoint(tmp_path, model, optimizer)
    assert loaded is not None and loaded.step == 2
    two = alone(2, one_sided=case.one_sided)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter, two.parameters[name], atol=1e-6), name


def test_a_plan_that_was_searched_for_trains_as_one_process() -> None:
    found = tiny("mixtral")
    asked: dict[str, Any] = {"batch": 4, "expert": 2, "modes": [FREE, KEEP], "split": False}
    made = osdp.plan(found.build_on_meta(), found.inputs, "4xCPU", loss=found.loss, **asked)
    assert {unit.name for unit in made.units if unit.experts} == set(EXPERTS)
    plan = replace(made, precision="fp32")  # on fake tensors these experts run in 16 bits alone
    truth = alone(1)
    for run in run_ranks(4, train_planned, plan):
        error, where = difference(run, truth)
        assert error < TOLERANCE, f"{where} is off by {error:.1e}"


def beside_others() -> dict[str, Tensor | None]:
    """The gradients of one half of eight ranks: the other half has another first dimension, as stages have."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "ep"))
    model = divide_experts(built(), mesh["ep"])
    osdp.parallelize(model, plan_for(CASES["async"]), mesh=mesh["dp", "ep"], engine=ASYNC_GLOO)
    step_of(model, [batch(0).chunk(4)[dist.get_rank() % 4]])
    return whole_gradients(model)


def test_two_of_three_dimensions_of_a_mesh_go_too() -> None:
    model = built()
    step_of(model, [batch(0)])
    truth = {name: p.grad for name, p in model.named_parameters()}
    largest = max(float(each.abs().max()) for each in truth.values() if each is not None)
    for found in run_ranks(8, beside_others):
        for name, true in truth.items():
            own = found[name]
            assert true is not None and own is not None, name
            assert float((own - true).abs().max()) < TOLERANCE * largest, name


def refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    plan = plan_for(CASES["stock"])

    def said(model: nn.Module, given: DeviceMesh | None, plan: Plan = plan) -> str:
        with pytest.raises(UsageError) as error:
            osdp.parallelize(model, plan, mesh=given)
        return str(error.value)

    divided = divide_experts(built(), mesh["ep"])
    whole = replace(plan, units=tuple(replace(unit, experts=False) for unit in plan.units))
    heads = {"lm_head": ColwiseParallel(), "model.layers.0.self_attn.q_proj": ColwiseParallel()}
    on_others = {"lm_head": ColwiseParallel()}
    return [
        said(divided, None),
        said(divided, mesh["dp"]),
        said(built(), mesh),
        said(divided, mesh, replace(plan, layout=OuterLayout(expert=4))),
        said(divided, mesh, whole),
        said(parallelize_module(built(), mesh["ep"], heads), mesh),
        said(parallelize_module(divide_experts(built(), mesh["ep"]), mesh["dp"], on_others), mesh),
        said(divided, mesh["dp"], replace(plan, layout=OuterLayout())),
    ]


def test_what_does_not_go_together_is_refused() -> None:
    none, one, plain, four, units, tensor, other, outside = run_ranks(4, refusals)[0]
    assert "no mesh was given" in none and "mesh=mesh['dp', 'ep']" in none
    assert "1 dimensions, dp" in one
    assert "every parameter is whole; call osdp.experts.divide_experts(model, mesh['ep'])" in plain
    assert "experts over 4 ranks, but ep has 2" in four
    assert "in no unit of experts of the plan" in units
    assert "in no unit of experts of the plan" in tensor
    assert "lm_head.weight lies on dp" in other
    assert "mlp.experts is divided over a dimension of experts" in outside and "plan again with expert=" in outside


def test_only_experts_that_divide_are_divided() -> None:
    assert set(expert_modules(tiny("mixtral").build_on_meta())) == set(EXPERTS)  # and no router
    with pytest.raises(UsageError, match=r"the 4 experts of .* do not divide over 3 ranks"):
        local_experts(tiny("mixtral").build_on_meta(), 3)
    with pytest.raises(UsageError, match="LlamaForCausalLM has no experts"):
        local_experts(tiny("llama").build_on_meta(), 2)
    odd = copy.deepcopy(tiny("mixtral").build_on_meta())
    odd.get_submodule(EXPERTS[0]).__class__ = Dense
    with pytest.raises(UsageError, match="is called with hidden, and experts that osdp divides with"):
        local_experts(odd, 2)


class Dense(nn.Module):
    """Experts that see every token, as Llama 4 calls them."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden
