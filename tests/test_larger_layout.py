"""Claim: a plan over the data-parallel dimension of a larger layout trains as a single process does.

On 2 × 2 real ranks, a model that is tensor-parallel and whose units are held in every mode, on both engines: losses,
gradients, their norm, the clipped step, and a checkpoint that is read back, by the same layout and by a single process.
A model or a mesh that does not go with it is refused with a sentence.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from planned import plan_of_units, whole_gradients, whole_parameters
from ranks import run_ranks
from runs import Run, difference
from selection import one_in
from small_models import source
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import osdp
from osdp.cluster import Cluster
from osdp.engine import ASYNC_GLOO, STOCK, Engine
from osdp.errors import UsageError
from osdp.planfile import Plan
from osdp.sharding import FREE, FREE_IN_NODE, KEEP, KEEP_IN_NODE, REPLICATE

STEPS, BATCH, LENGTH, MAX_NORM = 3, 8, 16, 0.05
TOLERANCE = 1e-5
MODES = (FREE, KEEP, REPLICATE)
TP_PLAN, BY_HAND, BY_TOKENS = "by its tp_plan", "by hand", "by hand, with sequence parallelism"
NODE_MODES = (KEEP_IN_NODE, FREE_IN_NODE, FREE)


class Case(NamedTuple):
    """Ranks of the data-parallel dimension, the others of four being tensor-parallel, and how they train."""

    world: str
    modes: tuple[str, ...]
    engine: Engine
    divided: str


def batch(step: int, part: int = 0, parts: int = 1) -> Tensor:
    tokens = torch.randint(0, 96, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
    return tokens.chunk(parts)[part]


def built() -> nn.Module:
    torch.manual_seed(0)
    return source("llama").build()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def alone(steps: int = STEPS) -> Run:
    """A single process on the whole batch; the last step's gradients are left as they were clipped."""
    model, losses, norms = built(), [], []
    optimizer = optimizer_of(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return Run(losses, norms, gradients, {name: p.detach() for name, p in model.named_parameters()})


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, divided: str = BY_HAND) -> nn.Module:
    """As Hugging Face does it by its `tp_plan`, or by hand, the embedding too."""
    if divided == TP_PLAN:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        apply_tensor_parallelism(model, mesh, model.tp_plan)
        return model
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for index in range(3):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"model.layers.{index}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"model.layers.{index}.{name}"] = RowwiseParallel()
    return parallelize_module(model, mesh, plan | (by_tokens() if divided == BY_TOKENS else {}))


def by_tokens() -> dict[str, ParallelStyle]:
    """Norms and additions of a rank's tokens alone: these are scattered as the first block is entered."""
    scattered, whole = Shard(1), Replicate()

    def exchanged(before: Placement, after: Placement) -> ParallelStyle:
        return PrepareModuleInput(input_layouts=(before,), desired_input_layouts=(after,), use_local_output=True)

    plan: dict[str, ParallelStyle] = {
        "model.layers.0": exchanged(whole, scattered),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=scattered, output_layouts=whole),
    }
    for index in range(3):
        block = f"model.layers.{index}"
        plan |= {f"{block}.{norm}": SequenceParallel() for norm in ("input_layernorm", "post_attention_layernorm")}
        rows = "self_attn.o_proj", "mlp.down_proj"
        plan |= {f"{block}.{name}": RowwiseParallel(output_layouts=scattered) for name in rows}
        plan[f"{block}.self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": scattered},
            desired_input_kwarg_layouts={"hidden_states": whole},
            use_local_output=True,
        )
        plan[f"{block}.mlp"] = exchanged(scattered, whole)
    return plan


def plan_for(model: nn.Module, world: str, modes: tuple[str, ...]) -> Plan:
    """A unit each for the embedding, the blocks, one of which is recomputed, the norm and the head."""
    from osdp.runtime.local import local_tensor

    local = copy.deepcopy(model).to("meta")
    for module in local.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[key] = nn.Parameter(local_tensor(parameter.detach()))
    names = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm", "lm_head")
    units = {(name,): modes[index % len(modes)] for index, name in enumerate(names)}
    return plan_of_units(local, world, units, recompute=("model.layers.1",))


def train(case: Case, folder: str) -> Run:
    """On a rank of dp × tp: steps with a checkpoint and a fresh start from it after the second."""
    world, modes, engine, divided = case
    parts = Cluster.parse(f"{world}xCPU").world_size
    mesh = init_device_mesh("cpu", (parts, 4 // parts), mesh_dim_names=("dp", "tp"))

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = tensor_parallel(built(), mesh["tp"], divided=divided)
        osdp.parallelize(model, plan_for(model, world, modes), mesh=mesh["dp"], engine=engine)
        return model, optimizer_of(model)

    (model, optimizer), losses, norms = make(), [], []
    for step in range(STEPS):
        if step == 2:
            osdp.save_checkpoint(folder, model, optimizer, step=step)
            model, optimizer = make()
            assert osdp.load_checkpoint(folder, model, optimizer) is not None
        optimizer.zero_grad()
        own = batch(step, mesh.get_local_rank("dp"), parts)
        loss = model(input_ids=own, labels=own).loss
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total, group=mesh.get_group("dp"))
        losses.append(total.item() / parts)
        norms.append(float(osdp.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    return Run(losses, norms, whole_gradients(model), whole_parameters(model))


CASES = {
    "async-by-tp-plan": Case("2", MODES, ASYNC_GLOO, TP_PLAN),
    "stock": Case("2", MODES, STOCK, BY_HAND),
    "by-tokens": Case("2", MODES, STOCK, BY_TOKENS),
    "nodes": Case("2x2", NODE_MODES, STOCK, BY_HAND),
}


@pytest.mark.parametrize("case", one_in(2, CASES.values(), ids=[*CASES]))
def test_tensor_parallel_ranks_train_as_one_process(case: Case, tmp_path: Path) -> None:
    truth = alone()
    for rank, run in enumerate(run_ranks(4, train, case, str(tmp_path), timeout_seconds=120)):
        error, where = difference(run, truth)
        assert error < TOLERANCE, f"rank {rank}: {where} is off by {error:.1e}"
    model = built()
    optimizer = optimizer_of(model)
    loaded = osdp.load_checkpoint(tmp_path, model, optimizer)
    assert loaded is not None and loaded.step == 2
    two = alone(2)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter, two.parameters[name], atol=1e-6), name


def refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    said = []
    for given in (None, mesh, mesh["tp"]):
        model = tensor_parallel(built(), mesh["tp"])
        with pytest.raises(UsageError) as error:
            osdp.parallelize(model, plan_for(model, "2", MODES), mesh=given)
        said.append(str(error.value))
    with pytest.raises(UsageError, match="are DTensors, which cannot be traced; plan the plain model"):
        osdp.plan(tensor_parallel(built(), mesh["tp"]), {"input_ids": batch(0)}, "2xCPU")
    return said


def test_a_mesh_that_is_not_the_data_parallel_dimension_is_refused() -> None:
    without, whole, other = run_ranks(4, refusals)[0]
    assert "tensor-parallel over tp" in without and "mesh=mesh['dp']" in without
    assert "2 dimensions, dp × tp" in whole
    assert "[0, 1] are not data-parallel copies" in other
