"""Claim: what people do between and around steps trains as in a single process, or is refused by a sentence.

- Evaluation in inference mode before the first step, between micro-batches, and between forward and backward.
- Two backwards through one graph, and the gradient of an activation, also through blocks that are recomputed.
- Batches of another size on every rank, one of them empty; a block that is left out in one step; layers that are frozen
  in one step and trained in the next; autocast.
- Second derivatives, and gradients of parameters that are not asked for by backward(), are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from odd_models import LENGTH, Model, Twice, built, data
from planned import whole_gradients, whole_parameters
from ranks import run_ranks
from torch import Tensor, nn
from trained import Trained, same, sgd, three_plans

import osdp
from osdp.engine import ASYNC_GLOO, STOCK, Engine
from osdp.errors import UsageError
from osdp.planfile import Plan

STEPS = 2


def part(seed: int) -> list[Tensor]:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return [tensor.chunk(ranks)[rank] for tensor in data(12, seed=seed)]


def evaluate(model: nn.Module) -> float:
    with torch.inference_mode():
        loss = model(*part(99))
    return loss.item()


def evaluated(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """In inference mode at every moment, first of all before the first training step."""
    losses = [evaluate(model), evaluate(model)]
    for step in range(STEPS):
        batches = [part(step), part(step + 10)]
        for batch in osdp.accumulate(model, batches) if dist.is_initialized() else batches:
            loss = model(*batch)
            losses.append(evaluate(model))
            loss.backward()
            losses.append(evaluate(model))
        optimizer.step()
        losses.append(evaluate(model))
        optimizer.zero_grad()
    model(*part(9)).backward()
    return losses


def two_backwards(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*part(step))
        (0.5 * loss).backward(retain_graph=True)
        (0.3 * loss).backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


def gradient_of_an_activation(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    seen: list[Tensor] = []
    model.blocks[0].register_forward_hook(lambda module, args, out: seen.append(out))
    norms = []
    for step in range(STEPS):
        seen.clear()
        optimizer.zero_grad()
        loss = model(*part(step))
        (gradient,) = torch.autograd.grad(loss, seen[0], retain_graph=True)
        norms.append(gradient.abs().sum().item())
        loss.backward()
        optimizer.step()
    return norms


Loss = Callable[[Any, int, int, int], Tensor]


def by_rank(loss: Loss, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: int) -> list[float]:
    """Three steps in which ranks differ: a single process takes the mean of what each of them does, in turn."""
    alone, losses = not dist.is_initialized(), []
    for step in range(3):
        optimizer.zero_grad()
        own = [loss(model, step, rank, ranks) for rank in (range(ranks) if alone else [dist.get_rank()])]
        mean = torch.stack(own).mean()
        mean.backward()
        losses.append(mean.item())
        optimizer.step()
    return losses


def uneven(model: Any, step: int, rank: int, ranks: int) -> Tensor:
    """Rank 0 has no sample, the last one most; each counts alike."""
    edges = [0, *(12 * each**2 // (ranks - 1) ** 2 for each in range(ranks))]
    mine = [tensor[edges[rank] : edges[rank + 1]] for tensor in data(12, seed=step)]
    return model(*mine, total=12 * LENGTH // ranks)


def left_out(model: Any, step: int, rank: int, ranks: int) -> Tensor:
    model.left_out = (1,) if step == 1 else ()
    return model(*(tensor.chunk(ranks)[rank] for tensor in data(12, seed=step)))


def frozen(model: Any, step: int, rank: int, ranks: int) -> Tensor:
    model.blocks[0].requires_grad_(step != 1)
    return model(*(tensor.chunk(ranks)[rank] for tensor in data(12, seed=step)))


def autocast(model: Any, step: int, rank: int, ranks: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(*(tensor.chunk(ranks)[rank] for tensor in data(12, seed=step)))


def ways(ranks: int) -> Iterator[Callable[[nn.Module, torch.optim.Optimizer], list[float]]]:
    yield from (evaluated, two_backwards, gradient_of_an_activation)
    yield from (partial(by_rank, loss, ranks=ranks) for loss in (uneven, left_out, frozen, autocast))


def train(model: nn.Module, way: Callable[[nn.Module, torch.optim.Optimizer], list[float]]) -> Trained:
    values = torch.tensor(way(model, sgd(model.parameters())))
    if dist.is_initialized():
        dist.all_reduce(values)
        values /= dist.get_world_size()
    return Trained(values.tolist(), whole_gradients(model), whole_parameters(model))


def on_ranks(kind: type[nn.Module], plans: list[tuple[Plan, Engine]]) -> list[Trained]:
    return [
        train(osdp.parallelize(built(kind), plan, engine=engine), way)
        for plan, engine in plans
        for way in ways(dist.get_world_size())
    ]


@pytest.mark.parametrize(("kind", "world"), [(Model, "2"), (Twice, "2x2")])
def test_odd_moments_are_those_of_a_single_process(kind: type[nn.Module], world: str) -> None:
    recomputed, _, by_operators = three_plans(kind, world, reduce_once=(True, False), accumulation=2)
    plans = [(recomputed, ASYNC_GLOO), (by_operators, STOCK)] if world == "2" else [(by_operators, ASYNC_GLOO)]
    truths = [train(built(kind), way) for way in ways(recomputed.cluster.world_size)]
    for runs in run_ranks(recomputed.cluster.world_size, on_ranks, kind, plans):
        for index, run in enumerate(runs):
            same(run, truths[index % len(truths)])


def refusals(plan: Plan) -> list[str]:
    model: Any = osdp.parallelize(built(Model), plan)
    optimizer, said, seen = sgd(model.parameters()), [], list[Tensor]()
    model.tokens.register_forward_hook(lambda module, args, out: seen.append(out))

    def refused(action: Callable[[Tensor], Any]) -> None:
        loss = model(*part(0))
        with pytest.raises(UsageError) as refusal:
            action(loss)
        said.append(str(refusal.value))
        optimizer.zero_grad()

    refused(lambda loss: torch.autograd.grad(loss, seen[-1], create_graph=True))
    refused(lambda loss: loss.backward(create_graph=True))
    refused(lambda loss: torch.autograd.grad(loss, list(model.parameters())))
    model(*part(0)).backward()
    optimizer.step()
    return said


def test_second_derivatives_and_gradients_of_parameters_are_refused() -> None:
    for said in run_ranks(2, refusals, three_plans(Model, "2")[0]):
        penalty, backward, parameters = said
        assert penalty == backward and penalty.startswith("create_graph=True")
        assert "call backward() and read .grad" in parameters
