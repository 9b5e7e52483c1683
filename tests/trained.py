"""Trains one of the odd models under a plan or in a single process, and compares what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from odd_models import data, odd_graph
from planned import plan_by_hand, whole_gradients, whole_parameters
from torch import Tensor, nn

import osdp
from osdp.cost.units import OPERATORS, PARTS, WHOLE
from osdp.planfile import Plan
from osdp.sharding import FREE, FREE_IN_NODE, FREE_TO_NODE, KEEP, KEEP_IN_NODE, REPLICATE

EVERY_MODE = (FREE, KEEP, REPLICATE, FREE_TO_NODE, FREE_IN_NODE, KEEP_IN_NODE)
BATCH, STEPS, TOLERANCE = 12, 3, 1e-5
COURIER = "osdp-comm"
COLLECTIVES = ("all_gather_single", "all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor")
COLLECTIVES += ("all_reduce", "broadcast", "isend", "irecv", "recv")


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


def same(found: Trained, truth: Trained, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(found.losses, truth.losses, rtol=tolerance, atol=0)
    assert found.gradients.keys() == truth.gradients.keys()
    for name, true in truth.gradients.items():
        own = found.gradients[name]
        assert (own is None) == (true is None), name
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
