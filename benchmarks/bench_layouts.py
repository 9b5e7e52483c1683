"""Prices layouts of a model as `osdp plan --layout auto` does, and prints each when it is known.

    python -m benchmarks.bench_layouts gpt3-175b 128x8xH100-80GB 2048 1x1 8x1 8x8
    python -m benchmarks.bench_layouts --sequence-parallel gpt3-175b 128x8xH100-80GB 2048 8x8x3
    python -m benchmarks.bench_layouts mixtral-8x7b 4x8xH100-80GB 128 1x1 1x1x1x8

A layout is tensor x pipeline, tensor x pipeline x chunks of each stage, or with ranks to the experts behind them;
without any, all of the first kind are tried. Nothing is run: these are predictions.
"""

from __future__ import annotations

import sys
import time

from torch import nn

from osdp.batching import Batching
from osdp.cluster import Cluster
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.experts import local_experts
from osdp.layouts import PIPELINE_DEGREES, TENSOR_DEGREES, Asked, Tried, priced
from osdp.model.graph import ModelGraph, TensorOperator
from osdp.model.source import ModelSource, load_model
from osdp.model.tensor_parallel import divide
from osdp.report.layouts_page import layout_rows


def asked_of(
    source: ModelSource, cluster: Cluster, batching: Batching, training: Training, *, by_tokens: bool = False
) -> Asked:
    from osdp.model.capture import capture

    def divided(ranks: int) -> tuple[ModelGraph, tuple[TensorOperator, ...]]:
        model = source.build_on_meta()
        shared = divide(model, ranks, by_tokens=by_tokens) if ranks > 1 else ()
        return captured(model), shared

    def with_experts(ranks: int) -> tuple[ModelGraph, dict[str, int]]:
        model = source.build_on_meta()
        chosen = local_experts(model, ranks)
        graph = captured(model)
        return graph, chosen()

    def captured(model: nn.Module) -> ModelGraph:
        given = {"loss": source.loss, "name": source.name, "seq_len": source.seq_len, "device": cluster.device}
        dtype = training.precision.compute_dtype
        return capture(model, source.inputs, compute_dtype=dtype, compiled=training.compiled, **given)

    return Asked(divided, cluster, training, Rules(), batching, capture_experts=with_experts)


def line(tried: Tried, seconds: float) -> str:
    head = f"tensor {tried.tensor} pipeline {tried.pipeline:2}" + (
        f" × {tried.interleave}" if tried.interleave > 1 else ""
    )
    head += f" expert {tried.expert}" if tried.expert > 1 else ""
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
    flags = ("--sequence-parallel", "--compiled")
    name, word, samples, *layouts = [each for each in sys.argv[1:] if each not in flags]
    batching = Batching(None, None, int(samples))
    training = Training.of("bf16", "adamw", None, compiled="--compiled" in sys.argv)
    by_tokens = "--sequence-parallel" in sys.argv
    asked = asked_of(load_model(name), Cluster.parse(word), batching, training, by_tokens=by_tokens)
    degrees = [tuple(map(int, each.split("x"))) for each in layouts]
    tried = []
    for each in degrees or [(t, p) for t in TENSOR_DEGREES for p in PIPELINE_DEGREES]:
        begun = time.perf_counter()
        tried.append(priced(asked, *each))
        print(line(tried[-1], time.perf_counter() - begun), flush=True)
    if any(each.degrees == (1, 1, 1) for each in tried):
        print(layout_rows(tried).verdict)


if __name__ == "__main__":
    main()
