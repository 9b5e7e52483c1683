"""Published against predicted, as rows: every run, summaries, what fits, weak scaling."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .calibration import FIGURES, Case, Fold, Values, catalogue_figures, figures
from .runs import ATTENTION, Run, predicted_seconds, step_of

Row = dict[str, Any]
GIB = 1 << 30
SCALES = (8, 16, 32, 64, 128, 256, 512)


class Priced(NamedTuple):
    """A run, and what the catalogue predicts of it."""

    run: Run
    seconds: float
    peak_bytes: int
    limit_bytes: int

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.run.tokens_per_second_per_gpu * self.run.step_seconds / self.seconds

    @property
    def error(self) -> float:
        """Of the throughput: above 0 it was predicted too high."""
        return self.run.step_seconds / self.seconds - 1

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes


def price(case: Case) -> Priced:
    step = step_of(case.run, case.layout)
    return Priced(case.run, predicted_seconds(step), step.timeline().peak_bytes, step.cluster.limit_bytes)


def by_kernel(cases: Sequence[Case]) -> list[Row]:
    """Errors of throughput with the attention kernel that ran, with the catalogue's default, and between the two."""

    def errors(kernel: str) -> list[float]:
        clusters = [case.run.cluster.with_attention(kernel) for case in cases]
        steps = [step_of(case.run, case.layout, cluster) for case, cluster in zip(cases, clusters, strict=True)]
        return [case.run.step_seconds / predicted_seconds(step) - 1 for case, step in zip(cases, steps, strict=True)]

    return [summary(kernel, errors(kernel)) for kernel in (ATTENTION, "flash-2", "either")]


def every_run(priced: Sequence[Priced]) -> list[Row]:
    return [
        {
            "model": each.run.model,
            "tokens": each.run.seq_len,
            "devices": f"{each.run.gpus} {each.run.cluster.device.name}",
            "batch": f"{each.run.micro_batch}x{each.run.accumulation}",
            "mode": each.run.mode,
            "recompute": each.run.full_recompute,
            "published": round(each.run.tokens_per_second_per_gpu),
            "predicted": round(each.tokens_per_second_per_gpu),
            "error %": round(100 * each.error, 1),
            "peak GiB": round(each.peak_bytes / GIB, 1),
            "limit GiB": round(each.limit_bytes / GIB, 1),
            "fits": each.fits,
        }
        for each in priced
    ]


def summary(name: Hashable, found: Sequence[float]) -> Row:
    """Errors of throughput: median and nine in ten of their sizes, the worst, and the middle with its sign."""
    sizes = np.abs(np.asarray(found))
    return {
        "runs of": str(name),
        "count": len(sizes),
        "median %": round(100 * float(np.median(sizes)), 1),
        "90th %": round(100 * float(np.quantile(sizes, 0.9)), 1),
        "worst %": round(100 * float(sizes.max()), 1),
        "middle %": round(100 * float(np.median(found)), 1),
    }


def summaries(priced: Sequence[Priced], key: Callable[[Run], Any]) -> list[Row]:
    values = sorted({key(each.run) for each in priced})
    return [summary(value, [each.error for each in priced if key(each.run) == value]) for value in values]


def folds(found: Sequence[Fold]) -> list[Row]:
    """Errors of runs that the figures were not fitted on."""
    every = [(fold.left_out, np.exp(-fold.errors) - 1) for fold in found]
    return [*(summary(name, errors) for name, errors in every), summary("all", np.concatenate([e for _, e in every]))]


def fitted_figures(values: Values) -> list[Row]:
    known = figures(values)
    return [
        {
            "figure": each.name,
            "known": each.known,
            "may be off %": 100 * each.spread,
            "fitted": known[each.name],
            "source": each.source,
        }
        for each in FIGURES
    ] + [{"figure": f"catalogue: {name}", "fitted": value} for name, value in catalogue_figures(values).items()]


def weak_scaling(case: Case, scales: Sequence[int] = SCALES) -> list[tuple[int, float]]:
    """Tokens per second of a device at every scale, for the run's own micro-batch without accumulation."""
    found = []
    for gpus in scales:
        run = replace(case.run, gpus=gpus, accumulation=1)
        found.append((gpus, run.micro_batch * run.seq_len / predicted_seconds(step_of(run, case.layout))))
    return found
