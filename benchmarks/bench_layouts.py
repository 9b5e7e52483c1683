"""Prices layouts of a model as `osdp plan --layout auto` does, and prints each when it is known.

    python -m benchmarks.bench_layouts gpt3-175b 128x8xH100-80GB 2048 1x1 8x1 8x8

A layout is tensor x pipeline; without any, all are tried. Nothing is run: these are predictions.
"""

from __future__ import annotations

import sys
import time

from osdp.batching import Batching
from osdp.cluster import Cluster
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.layouts import PIPELINE_DEGREES, TENSOR_DEGREES, Asked, Tried, priced
from osdp.model.graph import ModelGraph, TensorOperator
from osdp.model.source import ModelSource, load_model
from osdp.model.tensor_parallel import divide
from osdp.report.layouts_page import layout_rows


def asked_of(source: ModelSource, cluster: Cluster, global_batch: int) -> Asked:
    from osdp.model.capture import capture

    def divided(ranks: int) -> tuple[ModelGraph, tuple[TensorOperator, ...]]:
        model = source.build_on_meta()
        shared = divide(model, ranks) if ranks > 1 else ()
        given = {"loss": source.loss, "name": source.name, "seq_len": source.seq_len, "device": cluster.device}
        return capture(model, source.inputs, compute_dtype="bf16", **given), shared

    return Asked(divided, cluster, Training.of("bf16", "adamw", None), Rules(), Batching(None, None, global_batch))


def line(tried: Tried, seconds: float) -> str:
    head = f"tensor {tried.tensor} pipeline {tried.pipeline:2}"
    if tried.plan is None:
        return f"{head}: no plan: {tried.reason}  ({seconds:.0f} s)"
    plan, step = tried.plan, tried.plan.predicted
    return (
        f"{head} data {plan.cluster.world_size:4}: {step.samples_per_second:7.2f} samples/s, MFU"
        f" {100 * step.mfu:.1f} %, micro-batch {plan.batch_size} × {plan.accumulation}, peak"
        f" {step.peak_bytes / 2**30:.1f} GiB; of {step.step_seconds:.2f} s tensor"
        f" {plan.layout.tensor_seconds:.2f} s, bubble {plan.layout.bubble_seconds:.2f} s  ({seconds:.0f} s)"
    )


def main() -> None:
    name, word, samples, *layouts = sys.argv[1:]
    asked = asked_of(load_model(name), Cluster.parse(word), int(samples))
    degrees = [tuple(map(int, each.split("x"))) for each in layouts]
    tried = []
    for tensor, pipeline in degrees or [(t, p) for t in TENSOR_DEGREES for p in PIPELINE_DEGREES]:
        begun = time.perf_counter()
        tried.append(priced(asked, tensor, pipeline))
        print(line(tried[-1], time.perf_counter() - begun), flush=True)
    if any((each.tensor, each.pipeline) == (1, 1) for each in tried):
        print(layout_rows(tried).verdict)


if __name__ == "__main__":
    main()
