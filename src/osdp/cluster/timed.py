"""What was timed on the machines themselves: a model's stages, and the optimizer's step.

A `TimedStage` belongs to every stage with the same kernels, by their signature, whatever the model is called; it
replaces the roofline there. All ranks computed at the same time when it was taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from osdp.cluster.link import require_positive
from osdp.errors import UsageError


@dataclass(frozen=True)
class TimedStage:
    """Seconds of a stage's passes at a few batch sizes; `name` only tells people which stage it was."""

    signature: str
    name: str
    batches: tuple[int, ...]
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.batches or list(self.batches) != sorted(set(self.batches)) or self.batches[0] < 1:
            raise UsageError(f"the batches of {self.name!r} are {self.batches} but must rise from 1; profile again")
        for key in ("forward_seconds", "backward_seconds"):
            values = getattr(self, key)
            if len(values) != len(self.batches) or any(value < 0 for value in values):
                raise UsageError(f"{key} of {self.name!r} needs one time for each of its batches; profile again")

    def to_dict(self) -> dict[str, Any]:
        lists = {key: list(getattr(self, key)) for key in ("batches", "forward_seconds", "backward_seconds")}
        return {"signature": self.signature, "name": self.name, **lists}


@dataclass(frozen=True)
class TimedOptimizer:
    """Seconds of an optimizer's step: for every tensor that a rank holds a part of, and for every byte of those."""

    name: str
    tensor_seconds: float
    byte_seconds: float

    def __post_init__(self) -> None:
        require_positive("byte_seconds", self.byte_seconds, f"profile optimizer {self.name!r} again")
        if self.tensor_seconds != 0:
            require_positive("tensor_seconds", self.tensor_seconds, f"profile optimizer {self.name!r} again")

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "tensor_seconds": self.tensor_seconds, "byte_seconds": self.byte_seconds}


def between(batches: tuple[int, ...], seconds: tuple[float, ...], batch: int) -> float:
    """Seconds at a batch size: on the line between its neighbours, or on that of the last two beyond them.

    More samples take no less: where noise says so, the longer time of fewer ones counts.
    """
    if len(batches) == 1:
        return seconds[0] * batch / batches[0]
    rising = list(accumulate(seconds, max))
    upper = next((i for i, size in enumerate(batches) if size >= batch), len(batches) - 1)
    high, low = max(upper, 1), max(upper, 1) - 1
    slope = (rising[high] - rising[low]) / (batches[high] - batches[low])
    return max(0.0, rising[low] + slope * (batch - batches[low]))


def at_least(batches: tuple[int, ...], seconds: tuple[float, ...], low: int, high: int) -> float:
    """Seconds of batch `high` at the best rate per sample from `low` to `high`: what a bound over them needs."""
    sizes = {low, high, *(size for size in batches if low < size < high)}
    return high * min(between(batches, seconds, size) / size for size in sizes)
