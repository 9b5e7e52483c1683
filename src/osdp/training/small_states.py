"""AdamW whose states take 2 bytes or 1 for each element, where torch's take as many as the parameter.

[Note: Chunks]
A step computes in fp32. It takes CHUNK_NUMEL elements of a rank's part of a parameter at a time, so that what it needs
beside the states does not grow with the model. The update takes the moments before they are rounded.

[Note: Blocks]
Of 256 elements in a row, 8-bit states hold the largest magnitude, and for each element the number of the nearest of
256 values between -1 and 1, or between 0 and 1 for squares: the dynamic values of Dettmers et al., "8-bit Optimizers
via Block-wise Quantization" (2021). Blocks lie within rows, so that they are the same however many ranks share the
rows. Vectors, and matrices of whose rows a rank's part is no multiple of 256, have states in full precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from osdp.cost.training import BLOCK_NUMEL, CHUNK_NUMEL, StateFormat
from osdp.errors import UsageError
from osdp.runtime.local import local_tensor
from osdp.runtime.state_tensors import state_zeros

MOMENTS = ("exp_avg", "exp_avg_sq")
_DECADES = 7  # between the smallest of the values of 8 bits and 1


class SmallStateAdamW(torch.optim.Optimizer):
    """See [Note: Chunks]; `states` is StateFormat.BF16 or StateFormat.BLOCKS."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        states: StateFormat,
    ) -> None:
        self.format = states
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        books: dict[tuple[str, torch.device], _Book] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group, books)
        return loss

    def _step(
        self, parameter: nn.Parameter, group: dict[str, Any], books: dict[tuple[str, torch.device], _Book]
    ) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for moment in MOMENTS:
                state |= _zero_moment(parameter, moment, self.format)
        state["step"] += 1
        step, (first, second) = int(state["step"]), group["betas"]
        assert parameter.grad is not None
        own, gradient = _flat(parameter), _flat(parameter.grad)
        moments = [_Moment(state, name, books) for name in MOMENTS]
        for chunk in _chunks(own.numel()):
            part = gradient[chunk].float()
            mean, square = (each.read(chunk) for each in moments)
            mean.lerp_(part, 1 - first)
            square.mul_(second).addcmul_(part, part, value=1 - second)
            moments[0].write(chunk, mean)
            moments[1].write(chunk, square)
            root = square.sqrt_().div_((1 - second**step) ** 0.5).add_(group["eps"])
            own[chunk].mul_(1 - group["lr"] * group["weight_decay"])
            own[chunk].addcdiv_(mean, root, value=-group["lr"] / (1 - first**step))


class _Moment:
    """A rank's part of a moment as fp32 numbers, a chunk at a time."""

    def __init__(self, state: dict[str, Any], name: str, books: dict[tuple[str, torch.device], _Book]) -> None:
        self.values = _flat(state[name])
        self.scales = None
        if f"{name}_scales" in state:
            self.scales, key = _flat(state[f"{name}_scales"]), (name, self.values.device)
            if self.scales.numel() * BLOCK_NUMEL != self.values.numel():
                raise UsageError(
                    f"a rank has {self.values.numel()} elements of a parameter and {self.scales.numel()} scales of"
                    f" {BLOCK_NUMEL}: ranks share its rows, and its 8-bit states were saved where they did not; load"
                    " them on fewer ranks"
                )
            if key not in books:
                books[key] = _book(name, self.values.device)
            self.book = books[key]

    def read(self, chunk: slice) -> Tensor:
        if self.scales is None:
            return self.values[chunk].to(torch.float32, copy=True)
        found = self.book.values[self.values[chunk].int()].view(-1, BLOCK_NUMEL)
        return found.mul_(self.scales[_blocks(chunk)].unsqueeze(1)).view(-1)

    def write(self, chunk: slice, moment: Tensor) -> None:
        if self.scales is None:
            self.values[chunk] = moment
            return
        rows = moment.view(-1, BLOCK_NUMEL)
        largest = torch.linalg.vector_norm(rows, torch.inf, dim=1)
        self.scales[_blocks(chunk)] = largest
        scaled = rows / largest.clamp_(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
        self.values[chunk] = torch.bucketize(scaled.view(-1), self.book.borders, out_int32=True)


def _zero_moment(parameter: nn.Parameter, name: str, how: StateFormat) -> dict[str, Tensor]:
    shape = parameter.shape
    if how is StateFormat.BF16:
        return {name: torch.zeros_like(parameter, dtype=torch.bfloat16)}
    if len(shape) < 2 or local_tensor(parameter).shape[-1] % BLOCK_NUMEL:
        return {name: torch.zeros_like(parameter)}
    codes = torch.zeros_like(parameter, dtype=torch.uint8)
    local_tensor(codes).fill_(_dynamic_values(name).index(0.0))
    scales = state_zeros(parameter, (*shape[:-1], shape[-1] // BLOCK_NUMEL), torch.float32)
    return {name: codes, f"{name}_scales": scales}


def _flat(tensor: Tensor) -> Tensor:
    return local_tensor(tensor).view(-1)


def _chunks(numel: int) -> Iterator[slice]:
    return (slice(begin, min(begin + CHUNK_NUMEL, numel)) for begin in range(0, numel, CHUNK_NUMEL))


def _blocks(chunk: slice) -> slice:
    return slice(chunk.start // BLOCK_NUMEL, chunk.stop // BLOCK_NUMEL)


def _dynamic_values(moment: str) -> list[float]:
    return dynamic_values(is_signed=moment == "exp_avg")


def dynamic_values(*, is_signed: bool) -> list[float]:
    """256 values in order: 0, 1, and in every decade twice as many as in the one below, at middles of equal steps."""
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        steps = 2**decade * (1 if is_signed else 2)
        middles = [0.1 + 0.9 * (step + 0.5) / steps for step in range(steps)]
        found = [middle * 10.0 ** (decade + 1 - _DECADES) for middle in middles]
        values += [*found, *(-value for value in found)] if is_signed else found
    return sorted(values)


class _Book(NamedTuple):
    """The values of 8 bits, and the borders between neighbours."""

    values: Tensor
    borders: Tensor


def _book(moment: str, device: torch.device) -> _Book:
    values = torch.tensor(_dynamic_values(moment), device=device)
    return _Book(values, (values[1:] + values[:-1]) / 2)
