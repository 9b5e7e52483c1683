"""How far the slowest of many devices lies from the mean."""

from __future__ import annotations

import functools


@functools.cache
def expected_largest(count: int) -> float:
    """The expected largest of `count` normal numbers, in standard deviations (Blom's approximation); 0 for one."""
    from statistics import NormalDist  # here, because it costs more to import than the rest of the package

    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0
