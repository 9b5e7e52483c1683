"""A captured model for the benchmarks; apart from `common`, because it imports torch."""

from __future__ import annotations

from osdp.cost.training import Training
from osdp.model.graph import ModelGraph
from osdp.model.source import load_model


def captured(name: str, training: Training) -> ModelGraph:
    return load_model(name).capture(training.precision.compute_dtype)
