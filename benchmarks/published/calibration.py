"""Fits the catalogue's figures to published runs, and cross-validates them.

The catalogue has few figures that no data sheet states. Each is a factor with a value known from elsewhere and a range
around it; the fit moves them as far as the runs ask for: Gauss-Newton on logarithms of step seconds, with Huber weights
against single bad runs. What belongs to one chip is a figure for all chips and the chip's deviation from it, so that a
chip without runs gets what the others have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from osdp.cluster import Cluster, Link
from osdp.cost.layout import Layout

from .runs import Run, predicted_seconds, step_of

NOISE = 0.03  # of a run's logarithm: runs of the same kind differ by that
HUBER = 0.05
STEP = 0.005  # of a logarithm, for derivatives
ROUNDS = 6


class Figure(NamedTuple):
    """What is fitted: a value from elsewhere, and how far (as a part of it) it may well be wrong."""

    name: str
    known: float
    spread: float
    source: str


FIGURES = (
    Figure("matmul", 1.0, 0.10, "of the chip's best measured products: MAMF, 86 % of the peak on A100, 80 % on H100"),
    Figure("matmul A100", 1.0, 0.10, "deviation of the chip"),
    Figure("matmul H100", 1.0, 0.10, "deviation of the chip"),
    Figure("attention", 0.30, 0.30, "causal FlashAttention 1 on A100: some 90 of 312 TFLOPS (FlashAttention-2 paper)"),
    Figure("attention A100", 1.0, 0.15, "deviation of the chip"),
    Figure("attention H100", 1.0, 0.15, "deviation; its kernels used Ampere's instructions, 0.62 of an H100's peak"),
    Figure("matmul_traffic", 1.0, 0.50, "operands and result cross the memory bus once"),
    Figure("speed_spread", 0.02, 0.50, "devices of one kind differ by some per cent"),
    Figure("busy_fraction", 0.15, 0.50, "16 of 108 multiprocessors run NCCL's channels"),
    Figure("network", 0.70, 0.20, "part of the ports' rate that rings between nodes reach"),
)
BEST_PRODUCTS = {"A100": 0.86, "H100": 0.80}
OLD_INSTRUCTIONS = {"A100": 1.0, "H100": 0.62}
Values = NDArray[np.float64]  # logarithms, relative to what is known


@dataclass(frozen=True)
class Case:
    run: Run
    layout: Layout


def figures(values: Values) -> dict[str, float]:
    return {figure.name: float(figure.known * np.exp(value)) for figure, value in zip(FIGURES, values, strict=True)}


def catalogue_figures(values: Values) -> dict[str, float]:
    """The same as the catalogue states them."""
    known = figures(values)
    stated = {
        f"{chip} {what}": known[what.split("_")[0]] * known[f"{what.split('_')[0]} {chip}"] * of[chip]
        for what, of in (("matmul_efficiency", BEST_PRODUCTS), ("attention_efficiency", OLD_INSTRUCTIONS))
        for chip in BEST_PRODUCTS
    }
    return stated | {name: known[name] for name in ("matmul_traffic", "speed_spread", "busy_fraction", "network")}


def cluster_with(run: Run, values: Values) -> Cluster:
    """The run's cluster with these figures in place of the catalogue's."""
    cluster, stated = run.cluster, catalogue_figures(values)
    chip = cluster.device.name.partition("-")[0]
    device = replace(
        cluster.device,
        matmul_efficiency=min(1.0, stated[f"{chip} matmul_efficiency"]),
        attention_efficiency=stated[f"{chip} attention_efficiency"],
        matmul_traffic=stated["matmul_traffic"],
        speed_spread=stated["speed_spread"],
        busy_fraction=stated["busy_fraction"],
    )
    network = Link(run.network_bytes_per_second * stated["network"], cluster.network.latency_seconds)
    return replace(cluster, device=device, network=network)


def errors(cases: Iterable[Case], values: Values | None = None) -> Values:
    """Logarithms of predicted over published step seconds; without values, with the catalogue's figures."""
    found = []
    for case in cases:
        cluster = None if values is None else cluster_with(case.run, values)
        found.append(np.log(predicted_seconds(step_of(case.run, case.layout, cluster)) / case.run.step_seconds))
    return np.array(found)


class Fit(NamedTuple):
    """Fitted figures, the errors that remain, and their slopes: one row a run, one column a figure."""

    values: Values
    errors: Values
    slopes: NDArray[np.float64]


def _at(cases: Sequence[Case], values: Values) -> Fit:
    here = errors(cases, values)
    columns = []
    for index in range(len(FIGURES)):
        moved = values.copy()
        moved[index] += STEP
        columns.append((errors(cases, moved) - here) / STEP)
    return Fit(values, here, np.stack(columns, axis=1))


def _step(fit: Fit) -> Values:
    """One Gauss-Newton step: robust least squares of the errors and of the figures' own deviations."""
    weights = np.minimum(1.0, HUBER / np.maximum(np.abs(fit.errors), 1e-9)) / NOISE**2
    prior = 1 / np.array([figure.spread for figure in FIGURES]) ** 2
    normal = (fit.slopes * weights[:, None]).T @ fit.slopes + np.diag(prior)
    return np.linalg.solve(normal, -(fit.slopes * weights[:, None]).T @ fit.errors - prior * fit.values)


def fit(cases: Sequence[Case]) -> Fit:
    found = _at(cases, np.zeros(len(FIGURES)))
    for _ in range(ROUNDS):
        moved = np.clip(_step(found), -0.5, 0.5)
        found = _at(cases, found.values + moved)
        if np.abs(moved).max() < 0.01:
            break
    return found


class Fold(NamedTuple):
    """Runs that were left out, and their errors with figures fitted on all others."""

    left_out: Hashable
    errors: Values


def cross_validate(cases: Sequence[Case], whole: Fit, key: Callable[[Run], Hashable]) -> list[Fold]:
    """Leaves out one value of the key after the other.

    A fold's figures are found on the errors' slopes at the fit of all runs, which are nearly straight lines; the errors
    of what was left out are computed with those figures.
    """
    folds = []
    for value in sorted({key(case.run) for case in cases}, key=str):
        kept = np.array([key(case.run) != value for case in cases])
        values = whole.values
        for _ in range(ROUNDS):
            there = whole.errors[kept] + whole.slopes[kept] @ (values - whole.values)
            values = values + _step(Fit(values, there, whole.slopes[kept]))
        left = [case for case, keep in zip(cases, kept, strict=True) if not keep]
        folds.append(Fold(value, errors(left, values)))
    return folds
