"""A training run in our own loop, and what the tests of frameworks share with it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from architectures import LENGTH, VOCAB, graph_of, tiny
from planned import plan_by_hand
from torch import Tensor, nn

import osdp
from osdp.planfile import Plan
from osdp.sharding import FREE, KEEP, REPLICATE

RATE, CLIP, STEPS, BATCH, ACCUMULATION, RANKS = 1e-2, 0.5, 4, 2, 2, 2
NAME = "llama"


def mixed_plan(**changes: Any) -> Plan:
    """Modes that lie on different meshes, slices, recompute, and units that are reduced once a step."""
    fields: dict[str, Any] = {"modes": (FREE, REPLICATE, KEEP), "splits": ((1, 1), (2, 2)), "recompute": (True, False)}
    fields |= {"granularity": "operators", "batch_size": BATCH, "accumulation": ACCUMULATION}
    return plan_by_hand(graph_of(NAME), str(RANKS), reduce_once=(True, False), **{**fields, **changes})


def samples(count: int = STEPS * ACCUMULATION * BATCH * RANKS) -> list[dict[str, Tensor]]:
    tokens = torch.randint(3, VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": each, "labels": each.clone()} for each in tokens]


def micro_batch(index: int) -> dict[str, Tensor]:
    """The micro-batch of this rank: batches go round over the ranks."""
    start = (index * dist.get_world_size() + dist.get_rank()) * BATCH
    found = samples()[start : start + BATCH]
    return {key: torch.stack([each[key] for each in found]) for key in found[0]}


def planned_model(plan: Plan, folder: Path) -> nn.Module:
    model = osdp.parallelize(tiny(NAME).build_on_meta(), plan)
    return osdp.load_pretrained(model, folder)


def adamw(model: nn.Module, eps: float = 1e-8) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, eps=eps)


def own_loop(plan: Plan, folder: Path, eps: float = 1e-8) -> tuple[nn.Module, list[float]]:
    """The model after training, and the loss of every step over all ranks."""
    model = planned_model(plan, folder)
    optimizer = adamw(model, eps)
    losses = []
    for step in range(STEPS):
        total = torch.zeros(())
        for index in osdp.accumulate(model, range(step * ACCUMULATION, (step + 1) * ACCUMULATION)):
            loss = model(**micro_batch(index)).loss / ACCUMULATION
            loss.backward()
            total += loss.detach()
        osdp.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return model, losses


def as_torchrun_starts_it() -> None:
    """What torchrun tells a rank; and the frameworks' own warnings are not ours to mend."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "test"}
    warnings.simplefilter("ignore")
