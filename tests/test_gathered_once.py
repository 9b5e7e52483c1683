"""Claim: units that are gathered once for all micro-batches of a step train as in a single process.

On 2 and 2 x 2 real ranks and both engines: evaluation between micro-batches and between steps, clipping, a checkpoint
that is saved, read back by a fresh model and trained on, and micro-batches outside of `osdp.accumulate`. Behind a step
nothing is left gathered, so that no copy is older than the weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from odd_models import Model, built, data, odd_graph
from planned import plan_by_hand, whole_gradients, whole_parameters
from ranks import run_ranks
from torch import nn
from trained import Trained, same, sgd

import osdp
from osdp._torch.fsdp import param_groups
from osdp.engine import ASYNC_GLOO, STOCK, Engine
from osdp.planfile import Plan
from osdp.runtime.apply import applied_to
from osdp.sharding import FREE, KEEP, KEEP_IN_NODE, REPLICATE

STEPS, TIMES, EACH, MAX_NORM = 4, 3, 8, 0.05


def clipped(model: nn.Module, ranks: int) -> None:
    clip: Any = osdp.clip_grad_norm_ if ranks > 1 else nn.utils.clip_grad_norm_
    clip(model.parameters(), MAX_NORM)


def evaluated(model: nn.Module, seed: int) -> float:
    """On the same samples everywhere."""
    model.eval()
    with torch.no_grad():
        loss = model(*data(4, seed=100 + seed)).item()
    model.train()
    return loss


def held_gathered(model: nn.Module) -> list[str]:
    pieces = applied_to(model).pieces
    return [p.unit.name for p in pieces for group in param_groups(p.modules[0]) if not group.is_sharded]


def train(plan: Plan | None, engine: Engine | None, folder: str) -> Trained:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def fresh() -> tuple[Any, torch.optim.Optimizer]:
        model = built(Model)
        if plan is not None:
            osdp.parallelize(model, plan, engine=engine)
        return model, sgd(model.parameters())

    (model, optimizer), losses = fresh(), []
    for step in range(STEPS):
        whole = zip(*(t.chunk(TIMES) for t in data(TIMES * EACH, seed=step)), strict=True)
        batches = [(tokens.chunk(ranks)[rank], targets.chunk(ranks)[rank]) for tokens, targets in whole]
        optimizer.zero_grad()
        inside = plan is not None and step != STEPS - 1  # the last step's micro-batches each gather for themselves
        for index, batch in enumerate(osdp.accumulate(model, batches) if inside else batches):
            (model(*batch) / TIMES).backward()
            if inside:
                once = {unit.name for unit in plan.units if unit.gather_once}  # type: ignore[union-attr]
                assert set(held_gathered(model)) == (once if index < TIMES - 1 else set())
            if step == 1 and index == 0:
                losses.append(evaluated(model, step))
        gradients = whole_gradients(model)
        clipped(model, ranks)
        optimizer.step()
        assert plan is None or not held_gathered(model)
        losses.append(evaluated(model, step))
        if step == 1 and plan is not None:
            osdp.save_checkpoint(folder, model, optimizer, step=step)
            model, optimizer = fresh()
            osdp.load_checkpoint(folder, model, optimizer)
    return Trained(losses, gradients, whole_parameters(model))


@pytest.mark.parametrize("engine", [ASYNC_GLOO, STOCK], ids=lambda engine: engine.name)
@pytest.mark.parametrize("world", ["2", "2x2"])
def test_what_stays_gathered_over_a_step_is_exact_whatever_is_between(
    world: str, engine: Engine, tmp_path: Path
) -> None:
    modes = (KEEP, FREE, KEEP, REPLICATE) if world == "2" else (KEEP, KEEP_IN_NODE, FREE)
    late = {"reduce_once": (False, True), "all_reduce_once": (True,), "gather_once": (True,)}
    plan = plan_by_hand(odd_graph(Model), world, modes=modes, recompute=(True, False), accumulation=TIMES, **late)
    truth = train(None, None, "")
    for found in run_ranks(plan.cluster.world_size, train, plan, engine, str(tmp_path), timeout_seconds=60):
        same(found, truth)
