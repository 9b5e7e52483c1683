"""How many samples a device takes at a time, and how often: the one place that enumerates both."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from osdp.errors import UsageError
from osdp.planfile import MOST_SAMPLES

CLOSE = 0.01  # of the best rate: within it the smallest micro-batch is preferred
LARGEST_MICRO_BATCH = 1 << 16  # that is looked at, where none is asked for


@dataclass(frozen=True)
class Batching:
    """What is asked of a step's samples; None is for planning to choose.

    `batch` is the micro-batch of a device, `accumulation` how many of them make a step, `global_batch` the samples of
    a step over all devices.
    """

    batch: int | None = None
    accumulation: int | None = None
    global_batch: int | None = None

    def __post_init__(self) -> None:
        given = ("batch", self.batch), ("accumulation", self.accumulation), ("global batch", self.global_batch)
        for what, value in given:
            if value is not None and not 1 <= value <= MOST_SAMPLES:
                raise UsageError(f"the {what} is {value} but must be from 1 to {MOST_SAMPLES:,}; give such a number")
        if self.global_batch is not None and (self.batch is not None or self.accumulation is not None):
            other = "batch" if self.batch is not None else "accumulation"
            raise UsageError(f"give the {other} or the global batch, not both: one follows from the other")

    def ways(self, world_size: int) -> list[tuple[int, int | None]]:
        """Accumulations with their micro-batches; None where memory bounds the micro-batch."""
        if self.global_batch is None:
            return [(self.accumulation or 1, self.batch)]
        each, rest = divmod(self.global_batch, world_size)
        if rest:
            raise UsageError(
                f"a global batch of {self.global_batch} does not divide over {world_size} devices; "
                f"{max(each, 1) * world_size} does"
            )
        ways = [(a, each // a) for a in _divisors(each) if each // a <= LARGEST_MICRO_BATCH]
        return [(accumulation, batch) for accumulation, batch in ways]

    def smallest(self, world_size: int) -> list[tuple[int, int]]:
        """The ways that need least memory: accumulated gradients need the same room however often they are."""
        if self.global_batch is None:
            return [(self.accumulation or 1, self.batch or 1)]
        each, rest = divmod(self.global_batch, world_size)
        return [] if rest or not each else list({(1, each), (each, 1)})


def largest_that_fits(fits: Callable[[int], bool]) -> int:
    """The largest micro-batch that fits, by doubling and halving; 0 where none does."""
    low, high = 0, 1
    while high <= LARGEST_MICRO_BATCH and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _divisors(number: int) -> list[int]:
    small = [a for a in range(1, math.isqrt(number) + 1) if number % a == 0]
    return sorted({*small, *(number // a for a in small)})
