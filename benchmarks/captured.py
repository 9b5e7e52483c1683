"""A captured model for the benchmarks; apart from `common`, because it imports torch."""

from __future__ import annotations

from osdp.cost.training import Training
from osdp.model.capture import capture
from osdp.model.graph import ModelGraph
from osdp.model.source import load_model


def captured(name: str, training: Training) -> ModelGraph:
    source = load_model(name)
    return capture(
        source.build_on_meta(),
        source.inputs,
        loss=source.loss,
        name=name,
        compute_dtype=training.precision.compute_dtype,
        seq_len=source.seq_len,
    )
