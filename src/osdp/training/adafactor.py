"""Adafactor over shards: `torch.optim.Adafactor` itself refuses DTensors (in-place steps on norms that are partial).

[Note: Factors]
Of a matrix's squared gradients Adafactor holds means over each row and over each column. Ranks share rows, or columns
(see [Note: Shard dimension] in osdp.cost.sharding): means along the dimension that is shared are added up over the
ranks, and so are the norms of parameter and update: two all-reduces a step for all parameters on one mesh. The mean of
the row factors is that of the column factors, as both are means of all squares: the one that every rank has is taken.
A step takes CHUNK_NUMEL elements at a time; what an update is made of is computed twice, for its norm and for the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from osdp.cost.training import CHUNK_NUMEL
from osdp.errors import UsageError
from osdp.runtime.local import local_tensor
from osdp.runtime.state_tensors import state_zeros


class ShardedAdafactor(torch.optim.Optimizer):
    """The steps of `torch.optim.Adafactor`, with shards as with whole parameters; see [Note: Factors]."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: float = 1e-3,
        d: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        settings = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay}
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [
            _Factored(parameter, self.state[parameter], group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        _add_up([(each.group, each.own_sums()) for each in work])
        _add_up([(each.group, [each.follow()]) for each in work])
        for each in work:
            each.move()
        return loss


def _add_up(sums: Sequence[tuple[dist.ProcessGroup | None, Sequence[Tensor]]]) -> None:
    """Adds up tensors over the ranks of their groups, in place: one all-reduce for each group."""
    groups: dict[dist.ProcessGroup, list[Tensor]] = {}
    for group, tensors in sums:
        if group is not None:
            groups.setdefault(group, []).extend(tensors)
    for group, tensors in groups.items():
        joined = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(joined, group=group)
        for tensor, total in zip(tensors, joined.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(total.view_as(tensor))


class _Factored:
    """One step of one parameter."""

    def __init__(self, parameter: nn.Parameter, state: dict[str, Any], settings: dict[str, Any]) -> None:
        assert parameter.grad is not None
        self.state, self.settings, self.shape = state, settings, parameter.shape
        self.group, self.dim = _shared(parameter)
        self.is_matrix = len(self.shape) > 1
        if not state:
            self._begin(parameter)
        state["step"] += 1
        step = float(state["step"])
        self.share, self.rate = step ** settings["beta2_decay"], min(settings["lr"], step**-0.5)
        self.least = torch.finfo(parameter.dtype).eps
        self.parameter, self.gradient = (_as_matrices(local_tensor(t)) for t in (parameter, parameter.grad))

    def _begin(self, parameter: nn.Parameter) -> None:
        self.state["step"] = torch.zeros((), dtype=torch.float32)
        if self.is_matrix:
            *lead, rows, columns = self.shape
            self.state["row_var"] = state_zeros(parameter, (*lead, rows, 1), parameter.dtype)
            self.state["col_var"] = state_zeros(parameter, (*lead, 1, columns), parameter.dtype)
        else:
            self.state["variance"] = torch.zeros_like(parameter)

    def own_sums(self) -> list[Tensor]:
        """What this rank adds to sums over ranks: squares of the parameter, and of gradients along what is shared."""
        self.parameter_squares = _square_norm(self.parameter)
        shared = [self.parameter_squares]
        if self.is_matrix:
            rank = len(self.shape)
            self.row_squares = torch.linalg.vector_norm(self.gradient, dim=-1, keepdim=True).square_()
            self.column_squares = torch.linalg.vector_norm(self.gradient, dim=-2, keepdim=True).square_()
            shared += [self.row_squares] if self.dim == rank - 1 else []
            shared += [self.column_squares] if self.dim == rank - 2 else []
        return shared

    def follow(self) -> Tensor:
        """The states follow the gradient; this rank's part of the squares of the update."""
        if self.is_matrix:
            self.rows, self.columns = (_as_matrices(local_tensor(self.state[k])) for k in ("row_var", "col_var"))
            self.rows.lerp_(self.row_squares.div_(self.shape[-1]), self.share)
            self.columns.lerp_(self.column_squares.div_(self.shape[-2]), self.share)
            by_columns = self.dim == len(self.shape) - 2
            mean = self.columns.mean(dim=-1, keepdim=True) if by_columns else self.rows.mean(dim=-2, keepdim=True)
            self.mean = mean.clamp_(min=self.least)
        else:
            self.variance = _as_matrices(local_tensor(self.state["variance"]))
            self.variance.mul_(1 - self.share).addcmul_(self.gradient, self.gradient, value=self.share)
        self.update_squares = torch.zeros_like(self.parameter_squares)
        for matrices, rows in _chunks(self.gradient.shape):
            self.update_squares += _square_norm(self._update(matrices, rows))
        return self.update_squares

    def move(self) -> None:
        """The step itself: no larger than the parameter's own size allows."""
        numel, settings = self.shape.numel(), self.settings
        size = max(settings["eps"], (float(self.parameter_squares) / numel) ** 0.5)
        excess = max(1.0, (float(self.update_squares) / numel) ** 0.5 / settings["d"])
        if settings["weight_decay"]:
            self.parameter.mul_(1 - settings["lr"] * settings["weight_decay"])
        for matrices, rows in _chunks(self.gradient.shape):
            self.parameter[matrices, rows].add_(self._update(matrices, rows), alpha=-size * self.rate / excess)

    def _update(self, matrices: slice, rows: slice) -> Tensor:
        if self.is_matrix:
            update = self.rows[matrices, rows] * self.columns[matrices]
            update.div_(self.mean[matrices])
        else:
            update = self.variance[matrices, rows].clone()
        return update.clamp_(min=self.least**2).rsqrt_().mul_(self.gradient[matrices, rows])


def _shared(parameter: nn.Parameter) -> tuple[dist.ProcessGroup | None, int]:
    """The ranks that share a parameter, and the dimension along which they do; None where each has all of it."""
    if not isinstance(parameter, DTensor):
        return None, -1
    found = [(n, placed) for n, placed in enumerate(parameter.placements) if not placed.is_replicate()]
    if len(found) > 1:
        raise UsageError("adafactor cannot step a parameter sharded over two dimensions of a mesh; choose adamw")
    for number, placed in found:
        return parameter.device_mesh.get_group(number), placed.dim  # type: ignore[attr-defined]
    return None, -1


def _as_matrices(tensor: Tensor) -> Tensor:
    """With three dimensions: matrices, rows, columns; a vector is one matrix of one column."""
    if tensor.dim() < 2:
        return tensor.view(1, -1, 1)
    return tensor.view(-1, *tensor.shape[-2:]) if tensor.numel() else tensor.new_empty(0, *tensor.shape[-2:])


def _chunks(shape: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Matrices and rows of at most CHUNK_NUMEL elements, or of one row."""
    matrices, rows, columns = shape
    if not matrices * rows * columns:
        return
    height = max(1, min(rows, CHUNK_NUMEL // columns))
    depth = max(1, CHUNK_NUMEL // (rows * columns)) if height == rows else 1
    for first in range(0, matrices, depth):
        for row in range(0, rows, height):
            yield slice(first, first + depth), slice(row, row + height)


def _square_norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dtype=torch.float32).square_().view(1)
