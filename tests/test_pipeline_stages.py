"""Claim: stages of a pipeline that run plans over their data-parallel dimension train as a single process does.

On 2 × 2 and 1 × 2 (dp × pp) and 2 × 2 × 2 (dp × tp × pp) real ranks under 1F1B and GPipe: gradients are reduced once,
after the last micro-batch; losses, gradients, the norm over all stages, clipped steps, and a checkpoint of all stages
that they, and a single process, read back.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from planned import plan_of_units, whole_gradients, whole_parameters
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import osdp
from osdp.engine import ASYNC_GLOO, STOCK, Engine
from osdp.model.gpt import GPT, Block, GPTConfig
from osdp.planfile import OuterLayout, Plan
from osdp.runtime.local import local_tensor
from osdp.sharding import FREE, KEEP, REPLICATE

STEPS, BATCH, LENGTH, MICRO_BATCHES, MAX_NORM = 3, 8, 8, 4, 0.05
TOLERANCE = 1e-5
CONFIG = GPTConfig(64, LENGTH, (4,), (32,), head_width=16, tied=False)
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Case(NamedTuple):
    tensor: int
    engine: Engine
    schedule: str
    data: int = 2


class Run(NamedTuple):
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]


class StageOf(nn.Module):
    """A part of a GPT, its modules under the names that they have there."""

    def __init__(self, whole: GPT, stage: int) -> None:
        super().__init__()
        if stage == 0:
            self.tokens, self.positions = whole.tokens, whole.positions
        self.blocks = nn.ModuleDict({str(i): whole.blocks[i] for i in range(2 * stage, 2 * stage + 2)})
        if stage == 1:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "tokens"):
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def built() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def batch(step: int, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, 64, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step)).chunk(parts)[part]
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def alone(steps: int = STEPS) -> Run:
    model, losses, norms = built(), [], []
    optimizer = optimizer_of(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(*batch(step))
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return Run(losses, norms, gradients, {name: p.detach() for name, p in model.named_parameters()})


def plan_for(model: StageOf, stage: int, data: int) -> Plan:
    modes = ("tokens", "positions") if stage == 0 else ()
    names = [*modes, f"blocks.{2 * stage}", f"blocks.{2 * stage + 1}", *(("norm", "head") if stage else ())]
    local = StageOf(built(), stage).to("meta")
    for name, parameter in model.named_parameters():
        owner, _, key = name.rpartition(".")
        local.get_submodule(owner)._parameters[key] = nn.Parameter(local_tensor(parameter.detach()).to("meta"))
    modes_of = (FREE, KEEP, REPLICATE) if data > 1 else (REPLICATE,)
    units = {(name,): modes_of[index % len(modes_of)] for index, name in enumerate(names)}
    plan = plan_of_units(local, str(data), units, recompute=(f"blocks.{2 * stage}",))
    plan = replace(plan, layout=OuterLayout(1, 2, stage))
    held = [replace(unit, gather_once=unit.mode == KEEP) for unit in plan.units]
    return replace(plan, units=tuple(held), accumulation=MICRO_BATCHES)


def tensor_parallel(model: StageOf, mesh: DeviceMesh) -> None:
    """The feed-forward layers: the fused qkv of this GPT is not a column of heads."""
    for block in model.blocks.values():
        assert isinstance(block, Block)
        parallelize_module(block, mesh, {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})


def train(case: Case, folder: str) -> Run:
    """On a rank of pp × dp × tp: steps, with a checkpoint and a fresh start from it after the second."""
    mesh = init_device_mesh("cpu", (2, case.data, case.tensor), mesh_dim_names=("pp", "dp", "tp"))
    stage, part = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")

    def make() -> tuple[StageOf, torch.optim.Optimizer]:
        model = StageOf(built(), stage)
        if case.tensor > 1:
            tensor_parallel(model, mesh["tp"])
        osdp.parallelize(model, plan_for(model, stage, case.data), mesh=mesh["dp"], engine=case.engine)
        return model, optimizer_of(model)

    def schedule_of(model: StageOf) -> Schedule1F1B | ScheduleGPipe:
        at = PipelineStage(model, stage, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        return SCHEDULES[case.schedule](at, MICRO_BATCHES, loss_fn=loss_of)

    model, optimizer = make()
    schedule, losses, norms = schedule_of(model), [], []
    for step in range(STEPS):
        if step == 2:
            osdp.save_checkpoint(folder, model, optimizer, step=step)
            model, optimizer = make()
            assert osdp.load_checkpoint(folder, model, optimizer) is not None
            schedule = schedule_of(model)
        optimizer.zero_grad()
        inputs, targets = batch(step, part, case.data)
        found: list[Tensor] = []
        if stage == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=found)
        total = torch.stack(found).mean().detach() if found else torch.zeros(())
        dist.all_reduce(total)  # the first stage has none
        losses.append(total.item() / (case.data * case.tensor))
        norms.append(float(osdp.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    return Run(losses, norms, whole_gradients(model), whole_parameters(model))


def difference(found: Run, truth: Run) -> tuple[float, str]:
    pairs = zip((*found.losses, *found.norms), (*truth.losses, *truth.norms), strict=True)
    errors = [(abs(a - b) / b, f"loss or norm {index}") for index, (a, b) in enumerate(pairs)]
    largest = max(float(each.abs().max()) for each in truth.gradients.values() if each is not None)
    for name, own in found.gradients.items():
        true = truth.gradients[name]
        assert true is not None and own is not None, name
        errors.append((float((own - true).abs().max()) / largest, f"gradient of {name}"))
        moved = float((found.parameters[name] - truth.parameters[name]).abs().max())
        errors.append((moved / max(1e-2, float(truth.parameters[name].abs().max())), name))
    return max(errors)


@pytest.mark.parametrize(
    "case",
    [
        Case(1, STOCK, "1f1b"),
        Case(1, ASYNC_GLOO, "gpipe"),
        Case(1, ASYNC_GLOO, "1f1b", data=1),
        pytest.param(Case(2, ASYNC_GLOO, "1f1b"), marks=pytest.mark.slow),
    ],
    ids=["stock-1f1b", "async-gpipe", "one-rank-a-stage", "with-tensor"],
)
def test_stages_train_as_one_process(case: Case, tmp_path: Path) -> None:
    truth = alone()
    runs = run_ranks(2 * case.data * case.tensor, train, case, str(tmp_path), timeout_seconds=180)
    assert {name for run in runs for name in run.gradients} == set(truth.gradients)
    for rank, run in enumerate(runs):
        error, where = difference(run, truth)
        assert error < TOLERANCE, f"rank {rank}: {where} is off by {error:.1e}"
    model = built()
    loaded = osdp.load_checkpoint(tmp_path, model, optimizer_of(model))
    assert loaded is not None and loaded.step == 2
    two = alone(2)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter, two.parameters[name], atol=1e-6), name
