"""Batch norms under a plan: statistics over all ranks, and running statistics that count a recomputed block once.

torch's own SyncBatchNorm runs on accelerators only. This one is made of plain operators and two small all-reduces in
forward, so that a plan's trace has its kernels; the all-reduces, of a few bytes a channel, are in no plan.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from osdp._torch import without_modes
from osdp._torch.fsdp import is_in_backward

_FAKE = "fake"  # the process group of a dry run


class SyncBatchNorm(_BatchNorm):
    """A batch norm whose mean and variance in training are those of the batches of all ranks of `group`."""

    group: dist.ProcessGroup | None = None  # all ranks

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, not {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        values = input.float()
        over = [dim for dim in range(input.dim()) if dim != 1]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        number = values.new_full((1,), input.numel() // max(1, input.shape[1]))
        sums = self._over_ranks(torch.cat([values.sum(over), number]))
        count = sums[-1].detach().clamp(min=1)
        mean = sums[:-1] / count
        centred = values - mean.view(shape)
        variance = self._over_ranks(centred.square().sum(over)) / count
        self._average(mean, variance, count)
        out = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out.to(input.dtype)

    def _over_ranks(self, tensor: Tensor) -> Tensor:
        if not dist.is_initialized() or dist.get_backend() == _FAKE or dist.get_world_size(self.group) == 1:
            return tensor
        return _Sum.apply(tensor, self.group)

    @torch.no_grad()
    def _average(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Moves the running statistics, as torch does: their variance is the unbiased one."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share: Any = 1.0 / self.num_batches_tracked if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        unbiased = variance * count / (count - 1).clamp(min=1)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


class _Sum(torch.autograd.Function):
    """The sum over ranks; what every rank's loss says of it comes back to all of them."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        out = tensor.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        out = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=ctx.group)
        return out, None


def sync_batch_norm(model: nn.Module) -> nn.Module:
    """Makes every batch norm of a model take its statistics over all ranks; call it before `osdp.plan`.

    Parameters, buffers and their names stay. The model is changed in place, and returned: itself may be a batch norm.
    """
    made: dict[nn.Module, nn.Module] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _BatchNorm) and not isinstance(child, SyncBatchNorm):
                made[child] = made.get(child) or _synchronized(child)
                setattr(parent, name, made[child])
    return _synchronized(model) if isinstance(model, _BatchNorm) and not isinstance(model, SyncBatchNorm) else model


def _synchronized(norm: _BatchNorm) -> SyncBatchNorm:
    settings = {"momentum": norm.momentum, "affine": norm.affine, "track_running_stats": norm.track_running_stats}
    made = SyncBatchNorm(norm.num_features, norm.eps, device="meta", **settings)
    made._parameters, made._buffers = norm._parameters, norm._buffers
    return made.train(norm.training)


def sync_over(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """The ranks that a model's synchronized batch norms take their statistics over."""
    for module in model.modules():
        if isinstance(module, SyncBatchNorm):
            module.group = group


def average_once(block: nn.Module) -> None:
    """Lets the batch norms of a recomputed block move their running statistics in its first forward only.

    In the second one their momentum is 0: a checkpoint wants the same tensors saved, the running statistics among them.
    """
    for module in block.modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            once = _Once(module.momentum)
            module.register_forward_pre_hook(once.before)
            module.register_forward_hook(once.after, always_call=True)


class _Once:
    def __init__(self, momentum: float | None) -> None:
        self._momentum = momentum

    def before(self, norm: _BatchNorm, inputs: object) -> None:
        if is_in_backward():
            norm.momentum = 0.0

    def after(self, norm: _BatchNorm, inputs: object, output: object) -> None:
        if is_in_backward():
            norm.momentum = self._momentum
            if norm.training and norm.num_batches_tracked is not None:
                with without_modes():  # a selective checkpoint knows the first forward's operators only
                    norm.num_batches_tracked.sub_(1)
