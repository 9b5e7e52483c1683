"""What one device computes while all of them do: matrix products, attention, and work that memory bounds.

A kernel takes `kernel_seconds` and its FLOPs, or its bytes, at a rate. The first is timed on kernels that do nothing
else, in a forward and a backward; the rates are fitted to larger ones, with the first held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from osdp.profiling.bench import Action, Bench
from osdp.profiling.line_fit import Fit, Point, settled

LONGEST_SECONDS = 0.1  # of one call: nothing larger is timed then
_CHAIN = 32
_HEADS, _HEAD_WIDTH = 8, 64
_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Rate:
    """A fitted rate: FLOP/s of products and attention in a dtype, or bytes/s."""

    what: str
    dtype: str
    per_second: float
    fit: Fit


def kernel_seconds(bench: Bench, *, within: float) -> float:
    """What a kernel takes that computes next to nothing, with autograd's bookkeeping."""
    one = torch.ones(16, device=bench.device, requires_grad=True)

    def chain() -> None:
        value = one
        for _ in range(_CHAIN):
            value = value * 1.0
        value.backward(one.detach())
        one.grad = None

    return bench.seconds(chain, within=within) / (2 * _CHAIN)


def product_rates(bench: Bench, kernel: float, *, within: float) -> list[Rate]:
    """Of square matrix products, and of attention in the same dtypes."""
    fast = bench.calls.has_streams
    dtypes = ("fp32", "tf32", "bf16", "fp16") if fast else ("fp32", "bf16")
    sizes = (512, 1024, 2048, 4096, 8192) if fast else (128, 256, 384, 512, 768, 1024)
    lengths = (512, 1024, 2048, 4096) if fast else (128, 256, 512, 1024)
    each = within / (len(dtypes) * (len(sizes) + len(lengths)))
    rates = []
    for dtype in dtypes:
        with _tf32(dtype == "tf32"):
            rates.append(_rate(bench, "products", dtype, sizes, _product, kernel, each))
            rates.append(_rate(bench, "attention", dtype, lengths, _attention, kernel, each))
    return rates


def memory_rate(bench: Bench, kernel: float, *, within: float) -> Rate:
    """Of sums, norms and copies alike: the model has one rate for them all."""
    largest = 1 << (28 if bench.calls.has_streams else 24)
    cases = [(kind, largest >> shift) for shift in (4, 2, 0) for kind in ("sum", "norm", "copy")]
    each = within / len(cases)

    def timed(case: tuple[str, int]) -> Point:
        action, moved = _moving(*case, bench.device)
        return Point((1.0, moved), bench.seconds(action, within=each))

    points: dict[tuple[str, int], Point] = {}
    for case in cases:
        points[case] = timed(case)
        if bench.late and len(points) >= 6:
            break
    line = settled(points, timed, first=kernel, late=lambda: bench.late)
    return Rate("memory", "fp32", 1 / line.second, line)


Make = Callable[[int, torch.dtype, torch.device], tuple[Action, float]]


def _rate(bench: Bench, what: str, dtype: str, sizes: tuple[int, ...], make: Make, kernel: float, each: float) -> Rate:
    """Fitted to the three largest sizes that are quick enough: small ones do not reach the rate."""

    def timed(size: int) -> Point:
        action, flops = make(size, _DTYPES[dtype], bench.device)
        return Point((1.0, flops), bench.seconds(action, within=each))

    points: dict[int, Point] = {}
    for size in sizes:
        points[size] = timed(size)
        if points[size].seconds > LONGEST_SECONDS or (bench.late and len(points) >= 3):
            break
    larger = dict(list(points.items())[-3:])
    shortest = min(point.seconds for point in larger.values())
    line = settled(larger, timed, first=min(kernel, shortest / 2), late=lambda: bench.late)
    return Rate(what, dtype, 1 / line.second, line)


def _product(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Action, float]:
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return lambda: left @ right, 2.0 * size**3


def _attention(length: int, dtype: torch.dtype, device: torch.device) -> tuple[Action, float]:
    """FLOPs as capture counts them: causal attention as if it were whole."""
    heads = torch.ones(1, _HEADS, length, _HEAD_WIDTH, dtype=dtype, device=device)
    flops = 4.0 * _HEADS * length * length * _HEAD_WIDTH
    return lambda: F.scaled_dot_product_attention(heads, heads, heads, is_causal=True), flops


def _moving(kind: str, nbytes: int, device: torch.device) -> tuple[Action, float]:
    width = 1024
    values = torch.ones(nbytes // 4 // width, width, device=device)
    if kind == "sum":
        others = values.clone()
        return lambda: values + others, 3.0 * nbytes
    if kind == "norm":
        return lambda: F.layer_norm(values, (width,)), 2.0 * nbytes
    return values.clone, 2.0 * nbytes


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
