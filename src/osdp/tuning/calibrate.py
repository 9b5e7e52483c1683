"""What measured steps say about a profile: factors on its figures.

[Note: Factors]
A step's seconds are one number, a profile has many. So four factors stand for it: on compute, on communication, on the
host overhead and on the optimizer. They are those that explain the measured steps best while they stay near 1: with
one step measured it spreads the difference over all, and every further plan, whose mixture differs, tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np

from osdp.cluster import Cluster
from osdp.cluster.link import slower
from osdp.profiling.line_fit import least_squares

_STEP_SIGMA = 0.03  # how far a measured step may lie off by chance, as a part of it
_FACTOR_SIGMA = 0.5  # how far a profile's figure may
_FARTHEST = 3.0  # of a factor's logarithm

Predict = Callable[[Cluster], float]  # seconds of a plan's step on a cluster


@dataclass(frozen=True)
class Factors:
    """How many times longer each part of a step takes than the profile says; see [Note: Factors]."""

    compute: float = 1.0
    communication: float = 1.0
    host: float = 1.0
    optimizer: float = 1.0


@dataclass(frozen=True)
class MeasuredStep:
    predict: Predict
    seconds: float


def corrected(cluster: Cluster, factors: Factors) -> Cluster:
    """The cluster with every figure of a part made slower, or faster, by its factor."""
    device, compute = cluster.device, factors.compute
    return replace(
        cluster,
        device=replace(
            device,
            peak_flops={dtype: rate / compute for dtype, rate in device.peak_flops.items()},
            memory_bytes_per_second=device.memory_bytes_per_second / compute,
            kernel_seconds=device.kernel_seconds * compute,
        ),
        stages=tuple(
            replace(
                stage,
                forward_seconds=tuple(each * compute for each in stage.forward_seconds),
                backward_seconds=tuple(each * compute for each in stage.backward_seconds),
            )
            for stage in cluster.stages
        ),
        node_link=slower(cluster.node_link, factors.communication),
        network=slower(cluster.network, factors.communication),
        measured=tuple(slower(each, factors.communication) for each in cluster.measured),
        unit_overhead_seconds=cluster.unit_overhead_seconds * factors.host,
        collective_overhead_seconds=cluster.collective_overhead_seconds * factors.host,
        tensor_seconds=cluster.tensor_seconds * factors.host,
        copy_byte_seconds=cluster.copy_byte_seconds * factors.host,
        optimizers=tuple(
            replace(
                each,
                tensor_seconds=each.tensor_seconds * factors.optimizer,
                byte_seconds=each.byte_seconds * factors.optimizer,
            )
            for each in cluster.optimizers
        ),
    )


def calibrate(cluster: Cluster, steps: Sequence[MeasuredStep]) -> Factors:
    """The factors that explain the steps best: least squares of logarithms."""
    none = np.zeros(len(fields(Factors)))
    found = least_squares(partial(_errors, cluster, steps), none, none - _FARTHEST, none + _FARTHEST)
    return Factors(*np.exp(found).tolist())


def _errors(cluster: Cluster, steps: Sequence[MeasuredStep], logs: np.ndarray) -> np.ndarray:
    """Of each step, and of each factor, how far it lies off, in what may happen by chance."""
    there = corrected(cluster, Factors(*np.exp(logs).tolist()))
    off = [math.log(step.predict(there) / step.seconds) / _STEP_SIGMA for step in steps]
    return np.array([*off, *(logs / _FACTOR_SIGMA).tolist()])
