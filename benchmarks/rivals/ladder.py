"""Every feasible batch size of a way to train: a geometric ladder, refined where memory ends it.

Peaks are lines of the batch size, nearly, so that two of them say where the limit is met; what is tried there decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MOST_REFINED = 7  # further tries around the largest batch that fits
STRIDE = 4  # a try is at most so many times larger than the last that fitted: small batches may not show the slope


@dataclass(frozen=True)
class Attempt:
    """What a few steps at a batch size took and held at most, on the slowest and on the fullest rank."""

    batch: int
    samples: int  # of a step, over all ranks
    seconds: float
    peak_bytes: int

    @property
    def rate(self) -> float:
        return self.samples / self.seconds


def climb(try_batch: Callable[[int], Attempt], *, limit_bytes: int, most_samples: int, rungs: bool) -> list[Attempt]:
    """All attempts, those that do not fit too; with `rungs` every power of two, else only 1, 2 and the largest.

    Batches whose peak is sure to pass the limit are not tried, nor steps of more than so many samples.
    """
    tried: dict[int, Attempt] = {}

    def fits(batch: int) -> bool:
        if batch not in tried:
            tried[batch] = try_batch(batch)
        return tried[batch].peak_bytes <= limit_bytes

    fits_one = fits(1)
    most = max(1, most_samples // tried[1].samples)
    if not fits_one or most < 2 or not fits(2):
        return list(tried.values())
    largest = min(most, _predicted(tried[1], tried[2], limit_bytes))
    if rungs:
        rung = 4
        while rung < largest and fits(rung):
            rung *= 2
    _refine(tried, fits, largest, limit_bytes, most)
    return list(tried.values())


def _refine(tried: dict[int, Attempt], fits: Callable[[int], bool], largest: int, limit_bytes: int, most: int) -> None:
    """Tries the batch at which the limit is expected, and corrects by what is found there."""
    for _ in range(MOST_REFINED):
        below = max(batch for batch, attempt in tried.items() if attempt.peak_bytes <= limit_bytes)
        above = min((batch for batch, attempt in tried.items() if attempt.peak_bytes > limit_bytes), default=most + 1)
        if below + 1 >= above:
            return
        batch = min(max(largest, below + 1), above - 1, STRIDE * below)
        before = tried[below]
        if fits(batch) and batch == largest == min(most, _predicted(before, tried[batch], limit_bytes)):
            return
        largest = min(most, _predicted(before, tried[batch], limit_bytes))


def _predicted(one: Attempt, other: Attempt, limit_bytes: int) -> int:
    """The largest batch on the line through two attempts that is within the limit."""
    slope = (other.peak_bytes - one.peak_bytes) / (other.batch - one.batch)
    if slope <= 0:
        return STRIDE * max(one.batch, other.batch)
    return max(1, int(one.batch + (limit_bytes - one.peak_bytes) / slope))


def best(attempts: list[Attempt], *, limit_bytes: int) -> Attempt | None:
    """The fastest that fits."""
    return max((a for a in attempts if a.peak_bytes <= limit_bytes), key=lambda a: a.rate, default=None)
