"""Claim: a loop with torch's gradient scaler trains as in a single process, whichever rank overflows.

One element of one parameter's gradient is infinite on one rank alone, in one step: all ranks skip that step and lower
the scale, as one process on the whole batch does. For plans of every mode, on two and 2 x 2 ranks, with optimizers that
the scaler unscales for and that unscale themselves, with and without clipping.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from odd_models import WIDTH, Model, built, data, odd_graph
from planned import plan_by_hand, whole_gradients, whole_parameters
from ranks import run_ranks
from torch import Tensor, nn
from trained import EVERY_MODE, Trained, same

import osdp
from osdp.planfile import Plan
from osdp.sharding import FREE, FREE_IN_NODE, REPLICATE

STEPS, OVERFLOWS, BATCH = 3, 1, 12


class Probe(nn.Module):
    """A parameter of which one element gets an infinite gradient, while `overflows`; nothing else does."""

    overflows = False

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        shift = self.shift * 1.0
        if self.overflows:
            shift.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), float("inf")))
        return x + shift


class Probed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.probe = Probe()

    def body(self, x: Tensor) -> Tensor:
        return self.probe(super().body(x))


def optimizer_of(model: nn.Module, fused: bool) -> torch.optim.Optimizer:
    if fused:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: Any, parts: int, *, fused: bool, clip: bool) -> tuple[Trained, list[float]]:
    """Steps with a scaler, in which the last of `parts` of a batch overflows once; the scale after every step."""
    own = [dist.get_rank()] if dist.is_initialized() else range(parts)
    optimizer, scaler = optimizer_of(model, fused), torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    losses, scales = [], []
    for step in range(STEPS):
        tokens, targets = data(BATCH, seed=step)
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in own:
            model.probe.overflows = step == OVERFLOWS and part == parts - 1
            loss = model(tokens.chunk(parts)[part], targets.chunk(parts)[part]) / len(own)
            scaler.scale(loss).backward()
            total += loss.detach()
        if dist.is_initialized():
            dist.all_reduce(total)
        losses.append(total.item() * len(own) / parts)
        gradients = whole_gradients(model)
        if clip:
            scaler.unscale_(optimizer)
            osdp.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return Trained(losses, gradients, whole_parameters(model)), scales


CASES = [{"fused": fused, "clip": clip} for fused in (False, True) for clip in (False, True)]


def on_ranks(plan: Plan) -> list[tuple[Trained, list[float]]]:
    return [train(osdp.parallelize(built(Probed), plan), dist.get_world_size(), **case) for case in CASES]


@pytest.mark.parametrize(
    ("world", "modes"),
    [("2", (REPLICATE, FREE, FREE, FREE, FREE)), ("2x2", (FREE_IN_NODE, FREE, FREE, FREE, FREE)), ("2x2", EVERY_MODE)],
)
def test_all_ranks_skip_the_step_in_which_one_of_them_overflows(world: str, modes: Sequence[str]) -> None:
    """The first gradient is not sharded over all ranks, the one that overflows is."""
    plan = plan_by_hand(odd_graph(Probed), world, modes=modes)
    ranks = plan.cluster.world_size
    truths = [train(built(Probed), ranks, **case) for case in CASES]
    assert all(scales == [64.0, 32.0, 32.0] for _, scales in truths)
    for runs in run_ranks(ranks, on_ranks, plan):
        for (run, scales), (truth, true_scales) in zip(runs, truths, strict=True):
            assert scales == true_scales
            same(run, truth)
