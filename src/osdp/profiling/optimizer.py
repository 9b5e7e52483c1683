"""The optimizer's step on parameters as the runtime holds them: DTensors, sharded over the mesh of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from osdp.cluster import TimedOptimizer
from osdp.cost.training import OPTIMIZERS
from osdp.profiling.bench import Bench
from osdp.profiling.fit import Fit, Point, settled
from osdp.training.optimizer import make_optimizer

_WIDTH = 256
CASES = ((4, 1 << 12), (64, 1 << 12), (4, 1 << 20), (12, 1 << 20), (24, 1 << 14), (4, 1 << 18))
"""Tensors, and bytes of each that a rank holds."""


@dataclass(frozen=True)
class FittedOptimizer:
    timed: TimedOptimizer
    fit: Fit


def time_optimizers(bench: Bench, mesh: DeviceMesh, *, master: torch.dtype, within: float) -> list[FittedOptimizer]:
    """Every optimizer of `osdp plan --optimizer`; `master` is the dtype in which parameters are updated."""
    each = within / (len(OPTIMIZERS) * len(CASES))
    found = []
    for name in OPTIMIZERS:
        bench.watch(f"the step of {name}")

        def timed(case: tuple[int, int], name: str = name) -> Point:
            tensors, nbytes = case
            model = _held(tensors, nbytes, mesh, master)
            optimizer = make_optimizer(model, name, lr=1e-3, weight_decay=0.1)
            return Point((tensors, tensors * nbytes), bench.seconds(optimizer.step, within=each))

        points: dict[tuple[int, int], Point] = {}
        for case in CASES:
            points[case] = timed(case)
            if bench.late and len(points) >= 4:
                break
        line = settled(points, timed, late=lambda: bench.late)
        found.append(FittedOptimizer(TimedOptimizer(name, line.first, line.second), line))
    return found


def _held(tensors: int, nbytes: int, mesh: DeviceMesh, dtype: torch.dtype) -> nn.Module:
    """A module with this many matrices, of each of which this rank holds so many bytes, and their gradients."""
    rows = max(1, nbytes // dtype.itemsize // _WIDTH) * mesh.size()
    module = nn.Module()
    for index in range(tensors):
        matrix = torch.zeros(rows, _WIDTH, dtype=dtype, device=mesh.device_type)
        module.register_parameter(f"matrix{index}", nn.Parameter(matrix))
    fully_shard(module, mesh=mesh)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    return module
