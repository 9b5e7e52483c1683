"""The rivals: how each is built, which of its own switches are tried, and where it does not exist."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import data_parallel, external
from .job import NONE, RECOMPUTES, Job, Trainer
from .layouts import Layout, train

OSDP, TUNED, PAPER = "osdp", "osdp tune", "paper's space"
AUTO = "osdp, layout auto"
ENGINE, ALONE = "FSDP2's plan on our engine", "compute alone"
PLANNED = (OSDP, AUTO, TUNED, PAPER, ENGINE)
FSDP2, DDP = "FSDP2", "DDP"
SCHEDULES = ("GPipe", "1F1B", "interleaved")
# These send activations instead of the whole model's gradients over all ranks: an all-reduce does not bound them.
MOVE_ACTIVATIONS = ("TP", *(f"PP {schedule}" for schedule in SCHEDULES), "TP × DP", "PP × DP", "3D")


@dataclass(frozen=True)
class Rival:
    """One way to train. `others` are switches that are tried once its best batch and recompute are known."""

    name: str
    build: Callable[[Job], Trainer]
    switches: Mapping[str, Any]
    others: tuple[Mapping[str, Any], ...] = ()
    recomputes: tuple[str, ...] = RECOMPUTES


_BUCKETS = {"bucket_mb": 2}
_MICRO = {"micro_batches": 4}
_FEWER = ({"micro_batches": 2}, {"micro_batches": 1})


def rivals_for(hosts: int, ranks_per_host: int) -> tuple[Rival, ...]:
    """All of them; those that do not exist here raise `NotHere` when they are built."""
    ranks = hosts * ranks_per_host
    found = [  # in the order of trials: the fastest first, so that fewer choices of others are worth a trial
        *(_layout(f"PP {schedule}", Layout(ranks, 1, 1, schedule), _MICRO, _FEWER) for schedule in reversed(SCHEDULES)),
        _layout("PP × DP", Layout(2, ranks // 2, 1), {"data": "keep", **_MICRO}, ({"data": "free"}, *_FEWER)),
        Rival(DDP, data_parallel.ddp, _BUCKETS, ({"bucket_mb": 25},)),
        Rival("DDP, ZeRO-1", data_parallel.zero1, _BUCKETS, ({"bucket_mb": 25},)),
        Rival("ZeRO-2", data_parallel.zero2, {}, ({"prefetch": True},)),
        Rival(FSDP2, data_parallel.fsdp2, {}, ({"prefetch": True},)),
        Rival("HSDP", data_parallel.hsdp, {}, ({"prefetch": True}, {"reshard": False})),
        _layout("TP", Layout(1, 1, ranks), {}),
        _layout("TP × DP", Layout(1, ranks // 2, 2), {"data": "free"}, ({"data": "keep"},)),
    ]
    if ranks >= 8:
        found.append(_layout("3D", Layout(2, ranks // 4, 2), {"data": "keep"}, ({"data": "free"},)))
    found += [
        Rival(f"DeepSpeed ZeRO-{stage}", partial(external.deepspeed_zero, stage), {}, recomputes=RECOMPUTES)
        for stage in (1, 2, 3)
    ]
    found.append(Rival("Megatron-FSDP", external.megatron_fsdp, {}, recomputes=(NONE,)))
    return tuple(found)


def _layout(
    name: str, layout: Layout, switches: Mapping[str, Any], others: tuple[Mapping[str, Any], ...] = ()
) -> Rival:
    return Rival(name, partial(train, layout=layout), switches, others)
