"""Claims about optimizers:

- what the planner says of each (states, temporaries, passes, counters) is what a dry run of its step finds;
- on real ranks those beside AdamW and SGD (see test_runtime.py) step over all modes as in a single process;
- one that needs whole matrices, or more than a step has, is refused with the reason.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from odd_models import Model, built, odd_graph
from planned import plan_by_hand
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from trained import EVERY_MODE, Trained, same, train

import osdp
from osdp.cost.training import OPTIMIZERS, REFUSED_OPTIMIZERS, Training
from osdp.cost.units import OPERATORS
from osdp.errors import UsageError
from osdp.model.optimizer_step import measured_step
from osdp.planfile import Plan
from osdp.training.optimizer import optimizer_of


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_declared_costs_are_those_of_a_dry_run(name: str) -> None:
    measured = measured_step(name, partial(optimizer_of, name, lr=1e-3))
    if name == "adamw-fused":  # torch says that it changes gradients: it does only where it unscales them itself
        measured = replace(measured, passes=measured.passes - 1)
    assert measured == OPTIMIZERS[name]


STEPPED = ("nadam", "radam", "adagrad", "rmsprop")


def made(name: str, parameters: Any) -> torch.optim.Optimizer:
    """With a large eps, so that a step is not of full size where a gradient is nothing but rounding."""
    optimizer = optimizer_of(name, parameters, lr=0.01)
    for group in optimizer.param_groups:
        group["eps"] = 0.01
    return optimizer


def after_lion(parameter: nn.Parameter, gradients: list[Tensor]) -> Tensor:
    """The parameter after a step for each of these gradients: signs leave no room for rounding."""
    optimizer = optimizer_of("lion", [parameter], lr=0.01)
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
    return parameter.detach()


def draws() -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    first, *gradients = (torch.randn(7, 5, generator=generator) for _ in range(4))
    return first, gradients


def on_ranks(plan: Plan) -> tuple[dict[str, Trained], Tensor]:
    found = {name: train(osdp.parallelize(built(Model), plan), partial(made, name)) for name in STEPPED}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    first, *gradients = (distribute_tensor(each, mesh, [Shard(0)]) for each in (draws()[0], *draws()[1]))
    lion = after_lion(nn.Parameter(first), list(gradients))
    assert isinstance(lion, DTensor)
    return found, lion.full_tensor()


def test_ranks_step_as_a_single_process_does() -> None:
    plan = plan_by_hand(odd_graph(Model), "2", modes=EVERY_MODE, granularity=OPERATORS, splits=((3, 2), (1, 1)))
    first, gradients = draws()
    signs = after_lion(nn.Parameter(first.clone()), gradients)
    assert not torch.equal(signs, first)
    truths = {name: train(built(Model), partial(made, name)) for name in STEPPED}
    for found, lion in run_ranks(2, on_ranks, plan):
        assert torch.equal(lion, signs)
        for name in STEPPED:
            same(found[name], truths[name])


@pytest.mark.parametrize("name", REFUSED_OPTIMIZERS)
def test_what_cannot_run_under_a_plan_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UsageError, match=rf"optimizer '{name}' cannot run under a plan: .*; choose ad"):
        Training.of(optimizer=name)
