"""Straight lines through timings with their errors, and least squares of anything else; no torch.

[Note: Fit]
Seconds are modelled as first · amounts[0] + second · amounts[1], both at least a tiny positive number. What counts is
the factor by which a prediction is off, as a timing of 50 µs deserves the same say as one of 0.5 s, and twice too much
is as bad as half. The line has the least sum of those factors' logarithms, not of their squares, so that bad points do
not turn it while most are good. A point that is off by more than a factor of two, an outlier, is timed again. Errors
are those of all points, outliers too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

TINY = 1e-15
OUTLIER = 2.0  # a point that is off its line by more than this factor is timed again
REPEATS = 2
_CLOSENESS = (0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4, 1e-6)  # below which points count alike, ever smaller

_NUDGE, _ENOUGH, _MOST_STEPS = 1e-3, 1e-4, 20

T = TypeVar("T")
Array = NDArray[Any]


@dataclass(frozen=True)
class Point:
    """What one timing was of, in two amounts, and what it took."""

    amounts: tuple[float, float]
    seconds: float


@dataclass(frozen=True)
class Fit:
    """The line of [Note: Fit]; errors are |predicted / measured - 1|."""

    first: float
    second: float
    median_error: float
    worst_error: float
    points: int
    outliers: int

    def at(self, amounts: tuple[float, float]) -> float:
        return self.first * amounts[0] + self.second * amounts[1]

    def off(self, point: Point) -> float:
        """The factor by which a point is off."""
        ratio = self.at(point.amounts) / point.seconds
        return max(ratio, 1 / ratio) if ratio > 0 else math.inf

    def to_dict(self) -> dict[str, Any]:
        keys = ("median_error", "worst_error", "points", "outliers")
        return {key: getattr(self, key) for key in keys}


def fit(points: Sequence[Point], *, first: float | None = None) -> Fit:
    """The line through the points; `first` holds that coefficient. See [Note: Fit]."""
    line = _line(points, first)
    errors = [abs(line.at(point.amounts) / point.seconds - 1) for point in points]
    outliers = sum(line.off(point) > OUTLIER for point in points)
    return replace(line, median_error=statistics.median(errors), worst_error=max(errors), outliers=outliers)


def settled(
    points: dict[T, Point], again: Callable[[T], Point], *, first: float | None = None, late: Callable[[], bool]
) -> Fit:
    """The fit once its outliers were timed again, while there is time; `points` has the new timings then."""
    for _ in range(REPEATS):
        line = fit(list(points.values()), first=first)
        outliers = [case for case, point in points.items() if line.off(point) > OUTLIER]
        if not outliers or late():
            break
        for case in outliers:
            points[case] = again(case)
    return fit(list(points.values()), first=first)


def _line(points: Sequence[Point], first: float | None) -> Fit:
    """Least absolute logarithms of predicted / measured, by least squares that are weighted anew in every round."""
    amounts = np.array([point.amounts for point in points])
    seconds = np.array([point.seconds for point in points])
    found = _solved(amounts / seconds[:, None], np.ones(len(points)), np.ones(len(points)), first)
    best = found, _logs(amounts, seconds, found)
    for close in (close for close in _CLOSENESS for _ in range(6)):
        predicted, logs = amounts @ np.array(found), _logs(amounts, seconds, found)
        # log(predicted) is a line around the coefficients that were found last
        rows = amounts / predicted[:, None]
        found = _solved(rows, 1 - logs, 1 / np.maximum(np.abs(logs), close), first)
        logs = _logs(amounts, seconds, found)
        if np.abs(logs).sum() < np.abs(best[1]).sum():
            best = found, logs
    return Fit(*best[0], 0.0, 0.0, len(points), 0)


def _logs(amounts: Array, seconds: Array, found: tuple[float, float]) -> Array:
    return np.log(amounts @ np.array(found) / seconds)


def _solved(rows: Array, targets: Array, weights: Array, first: float | None) -> tuple[float, float]:
    """The coefficients with the least weighted square error, neither below TINY."""
    if first is None and np.linalg.matrix_rank(rows) == 2:
        root = np.sqrt(weights)
        both = np.linalg.lstsq(rows * root[:, None], targets * root, rcond=None)[0]
        if both.min() >= TINY:
            return float(both[0]), float(both[1])
        if both[1] < TINY:
            return max(TINY, _slope(rows[:, 0], targets, weights)), TINY
        first = TINY
    held = TINY if first is None else first
    return held, max(TINY, _slope(rows[:, 1], targets - held * rows[:, 0], weights))


def _slope(amounts: Array, targets: Array, weights: Array) -> float:
    square = float((weights * amounts * amounts).sum())
    return float((weights * amounts * targets).sum()) / square if square else TINY


def least_squares(errors: Callable[[Array], Array], start: Array, low: Array, high: Array) -> Array:
    """The values, within their bounds, with the least sum of squared errors: by Gauss and Newton.

    Values that would pass a bound are held there; slopes are taken with a nudge of a thousandth, so values should be
    about 1.
    """
    found, here = start, errors(start)
    for _ in range(_MOST_STEPS):
        nudges = np.where(found + _NUDGE > high, -_NUDGE, _NUDGE)
        slopes = np.stack([(errors(found + nudge) - here) / nudge.sum() for nudge in np.diag(nudges)], axis=1)
        uphill = slopes.T @ here
        free = ~(((found <= low) & (uphill > 0)) | ((found >= high) & (uphill < 0)))
        step = np.zeros(len(found))
        step[free] = np.linalg.lstsq(slopes[:, free], -here, rcond=None)[0]
        before = here @ here
        for shorter in (1.0, 0.5, 0.25, 0.1, 0.01):
            there = np.clip(found + shorter * step, low, high)
            off = errors(there)
            if off @ off < before:
                found, here = there, off
                break
        if before - here @ here <= _ENOUGH * before:
            break
    return found
