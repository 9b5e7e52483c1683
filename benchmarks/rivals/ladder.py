"""The largest batch size of a way to train that fits a limit.

Peaks are lines of the batch size, nearly, so that two of them say where the limit is met; what is tried there decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

FIRST = (1, 4)  # batches that say where memory ends
MOST_REFINED = 7  # further tries around the largest batch that fits
STRIDE = 4  # a try is at most so many times larger than the last that fitted: small batches may not show the slope


@dataclass(frozen=True)
class Attempt:
    """What a few steps at a batch size took and held at most, on the slowest and on the fullest rank."""

    batch: int
    samples: int  # of a step, over all ranks
    seconds: float | None  # None where only memory was looked at
    peak_bytes: int

    @property
    def rate(self) -> float:
        assert self.seconds is not None, "this attempt was not timed"
        return self.samples / self.seconds


def largest_batch(
    try_batch: Callable[[int], Attempt], *, limit_bytes: int, most: int, expected: Mapping[int, int] | None = None
) -> tuple[int | None, dict[int, Attempt]]:
    """The largest batch up to `most` whose peak is within the limit, or None, and all that was tried.

    `expected` has peaks of the first batches where they are known without a try, roughly.
    """
    tried: dict[int, Attempt] = {}

    def fits(batch: int) -> bool:
        if batch not in tried:
            tried[batch] = try_batch(batch)
        return tried[batch].peak_bytes <= limit_bytes

    if expected is None and fits(FIRST[0]) and most > 1:
        fits(min(FIRST[1], most))
    if expected or len(tried) > 1:
        _refine(tried, fits, dict(expected or {}), limit_bytes, most)
    fitting = [batch for batch, attempt in tried.items() if attempt.peak_bytes <= limit_bytes]
    return max(fitting, default=None), tried


def _refine(
    tried: dict[int, Attempt], fits: Callable[[int], bool], expected: dict[int, int], limit_bytes: int, most: int
) -> None:
    """Tries the batch at which the limit is expected, and corrects by what is found there."""
    last = max(tried, default=1)
    for _ in range(MOST_REFINED):
        below = max((batch for batch, attempt in tried.items() if attempt.peak_bytes <= limit_bytes), default=0)
        above = min((batch for batch, attempt in tried.items() if attempt.peak_bytes > limit_bytes), default=most + 1)
        points = expected | {batch: attempt.peak_bytes for batch, attempt in tried.items()}
        nearest = dict(sorted(points.items(), key=lambda point: abs(point[0] - last))[:2])
        largest = min(most, _predicted(nearest, limit_bytes))
        if below + 1 >= above or (last == below == largest):
            return
        last = min(max(largest, below + 1), above - 1, STRIDE * max(below, max(expected, default=0)))
        fits(last)


def _predicted(points: Mapping[int, int], limit_bytes: int) -> int:
    """The largest batch on the line through two peaks that is within the limit."""
    (one, one_bytes), (other, other_bytes) = sorted(points.items())[:2]
    slope = (other_bytes - one_bytes) / (other - one)
    if slope <= 0:
        return STRIDE * max(one, other)
    return max(1, int(one + (limit_bytes - one_bytes) / slope))
