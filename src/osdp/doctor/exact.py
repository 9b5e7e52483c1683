"""Trains a small model in every mode on the ranks that run, and beside it in this process alone, on the whole batch.

[Note: Change]
The error is that of the weights' change: the largest difference of a parameter to the single process's, by the largest
change of a parameter that training made. Equal weights that were never trained would otherwise count as exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import osdp
from osdp.doctor.report import Check
from osdp.doctor.subject import Subject
from osdp.planfile import Plan
from osdp.recompute import Recompute
from osdp.runtime.split import held_parameters
from osdp.sharding import FREE, FREE_TO_NODE, MODES, REPLICATE
from osdp.training.world import World

STEPS, LEARNING_RATE = 2, 0.5
LIMIT = 1e-4
_REMEDY = "send the report: gradients on these machines are not those of a single process"


def variants(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Plans of one mode each, then with recompute, with slices, and with accumulation."""
    for mode in MODES:
        if mode == FREE_TO_NODE and plan.cluster.devices_per_node == 1:
            continue  # the node is the rank itself, and torch warns of it
        yield mode, _changed(plan, mode=mode)
    yield f"{FREE}, recomputed", _changed(plan, mode=FREE, recompute=Recompute.FULL)
    yield f"{FREE}, recomputed selectively", _changed(plan, mode=FREE, recompute=Recompute.SELECTIVE)
    yield f"{FREE}, in slices", _changed(plan, mode=FREE, splits=2)
    yield f"{REPLICATE}, two micro-batches", replace(_changed(plan, mode=REPLICATE), accumulation=2)


def _changed(plan: Plan, *, mode: str, recompute: Recompute = Recompute.NONE, splits: int = 1) -> Plan:
    units = [
        replace(
            unit,
            mode=mode,
            recompute=Recompute.NONE if unit.block is None else recompute,
            splits=splits if unit.name in ("tokens", "head") and len(unit.modules) == 1 else 1,
            sharded_splits=splits if unit.name in ("tokens", "head") and len(unit.modules) == 1 else 1,
            two_levels=False,
            reduce_once=False,
            all_reduce_once=False,
            offload=False,
            gather_once=False,
        )
        for unit in plan.units
    ]
    return replace(plan, units=tuple(units), accumulation=1)


class Exactness:
    """Compares plans with this process alone, whose run is made once."""

    def __init__(self, subject: Subject, world: World) -> None:
        self._subject, self._world = subject, world
        model = osdp.initialize(subject.source.build_on_meta(), seed=0, device=world.device)
        self._before = _weights(model)
        self._after = self._trained(model, [subject.batch(world, step) for step in range(STEPS)])

    def check(self, name: str, plan: Plan) -> Check:
        subject, world = self._subject, self._world
        model = osdp.parallelize(subject.source.build_on_meta(), plan, device=world.device)
        osdp.initialize(model, seed=0)
        parts = [tuple(t.chunk(world.size)[world.rank] for t in subject.batch(world, step)) for step in range(STEPS)]
        found = self._trained(model, parts, plan.accumulation)
        change = max(float((self._after[key] - self._before[key]).abs().max()) for key in self._after)
        errors = {key: float((found[key] - self._after[key]).abs().max()) / change for key in self._after}
        worst = max(errors, key=lambda key: errors[key] if errors[key] == errors[key] else float("inf"))
        (highest,) = (max(column) for column in zip(*world.all_numbers(_finite(errors[worst])), strict=True))
        return Check(f"exact: {name}", highest, LIMIT, _REMEDY, f"worst at {worst}")

    def _trained(self, model: nn.Module, batches: list[tuple[Tensor, ...]], times: int = 1) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        for batch in batches:
            micro = list(zip(*(t.chunk(times) for t in batch), strict=True))
            for tokens, targets in osdp.accumulate(model, micro) if times > 1 else micro:
                (self._subject.source.loss(model(tokens, targets)) / times).backward()
            optimizer.step()
            optimizer.zero_grad()
        return _weights(model)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """In the plain model's names and shapes; a collective for each that is sharded."""
    return {
        name: torch.cat([_whole(part.detach()) for part in parts], dim).clone()
        for name, (parts, dim) in held_parameters(model).items()
    }


def _whole(part: Tensor) -> Tensor:
    return part.full_tensor() if isinstance(part, DTensor) else part


def _finite(value: float) -> float:
    return value if value == value else float("inf")
