"""The optimizer's step on parameters as the runtime holds them: DTensors, sharded over the mesh of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from osdp.cluster import TimedOptimizer
from osdp.cost.training import TIMED_OPTIMIZERS
from osdp.profiling.bench import Bench
from osdp.profiling.line_fit import Fit
from osdp.profiling.rounds import TimedLine
from osdp.training.optimizer import make_optimizer

_WIDTH = 256
CASES = ((4, 1 << 12), (64, 1 << 12), (4, 1 << 20), (12, 1 << 20), (24, 1 << 14), (4, 1 << 18))
"""Tensors, and bytes of each that a rank holds."""


@dataclass(frozen=True)
class FittedOptimizer:
    timed: TimedOptimizer
    fit: Fit


class OptimizerRounds:
    """The usual optimizers of `osdp plan --optimizer`; `master` is the dtype in which parameters are updated."""

    def __init__(self, bench: Bench, mesh: DeviceMesh, *, master: torch.dtype) -> None:
        self._lines = {name: TimedLine[tuple[int, int]](bench) for name in TIMED_OPTIMIZERS}
        for tensors, nbytes in CASES:
            model = _held(tensors, nbytes, mesh, master)
            for name, line in self._lines.items():
                bench.watch(f"the step of {name}")
                optimizer = make_optimizer(model, name, lr=1e-3, weight_decay=0.1)
                line.admit((tensors, nbytes), optimizer.step, (tensors, tensors * nbytes))

    def round(self) -> None:
        for line in self._lines.values():
            line.round()

    def timed(self) -> list[FittedOptimizer]:
        """By all rounds so far."""
        found = {name: line.fit() for name, line in self._lines.items()}
        return [FittedOptimizer(TimedOptimizer(name, line.first, line.second), line) for name, line in found.items()]


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
