"""What was timed on the machines themselves: a model's stages, and the optimizer's step.

A `TimedStage` belongs to every stage with the same kernels, by their signature, whatever the model is called; it
replaces the roofline there. All ranks computed at the same time when it was taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated

from msgspec import Meta

from osdp.cluster.schema import Seconds
from osdp.errors import UsageError
from osdp.files import check_fields

Batch = Annotated[int, Meta(ge=1, le=1 << 24)]


@dataclass(frozen=True)
class TimedStage:
    """Seconds of a stage's passes at a few batch sizes; `name` only tells people which stage it was."""

    signature: str
    name: str
    batches: tuple[Batch, ...]
    forward_seconds: tuple[Seconds, ...]
    backward_seconds: tuple[Seconds, ...]

    def __post_init__(self) -> None:
        check_fields(self, remedy="profile again")
        if not self.batches or list(self.batches) != sorted(set(self.batches)):
            raise UsageError(f"the batches of {self.name!r} are {self.batches} but must rise from 1; profile again")
        for key in ("forward_seconds", "backward_seconds"):
            if len(getattr(self, key)) != len(self.batches):
                raise UsageError(f"{key} of {self.name!r} needs one time for each of its batches; profile again")


@dataclass(frozen=True)
class TimedOptimizer:
    """Seconds of an optimizer's step: for every tensor that a rank holds a part of, and for every byte of those."""

    name: str
    tensor_seconds: Seconds
    byte_seconds: Annotated[float, Meta(gt=0, le=1e9)]

    def __post_init__(self) -> None:
        check_fields(self, remedy=f"profile optimizer {self.name!r} again")


def between(batches: tuple[int, ...], seconds: tuple[float, ...], batch: int) -> float:
    """Seconds at a batch size: on the line between its neighbours, or on that of the last two beyond them.

    More samples take no less: where noise says so, the longer time of fewer ones counts. And beyond the largest that
    was timed a sample takes no longer than there: the error of two times would grow with the distance.
    """
    if len(batches) == 1:
        return seconds[0] * batch / batches[0]
    rising = list(accumulate(seconds, max))
    upper = next((i for i, size in enumerate(batches) if size >= batch), len(batches) - 1)
    high, low = max(upper, 1), max(upper, 1) - 1
    slope = (rising[high] - rising[low]) / (batches[high] - batches[low])
    found = max(0.0, rising[low] + slope * (batch - batches[low]))
    return min(found, rising[-1] * batch / batches[-1]) if batch > batches[-1] else found


def at_least(batches: tuple[int, ...], seconds: tuple[float, ...], low: int, high: int) -> float:
    """Seconds of batch `high` at the best rate per sample from `low` to `high`: what a bound over them needs."""
    sizes = {low, high, *(size for size in batches if low < size < high)}
    return high * min(between(batches, seconds, size) / size for size in sizes)
