"""`osdp.plan`: a model and a cluster in, the provably fastest plan out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from osdp.batching import Batching
from osdp.cluster import Cluster, parse_bytes
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.cost.units import WHOLE
from osdp.errors import DoesNotFit, UsageError
from osdp.infeasible import Measured, nothing_fits
from osdp.model.graph import ModelGraph, TensorOperator
from osdp.planfile import Plan
from osdp.planning import Progress, Report, plan_graph
from osdp.recompute import AUTO, read_recompute
from osdp.sharding import MODES

if TYPE_CHECKING:
    from torch import Tensor, nn

    from osdp.layouts import Tried
    from osdp.verify import Verification


def plan(
    model: nn.Module,
    example_inputs: Any,
    cluster: Cluster | str | None = None,
    *,
    memory: str | int | None = None,
    precision: str = "bf16",
    optimizer: str = "adamw",
    reduce_dtype: str | None = None,
    batch: int | None = None,
    accumulation: int | None = None,
    global_batch: int | None = None,
    pin: Mapping[str, str] | Iterable[str] | None = None,
    modes: Iterable[str] | None = None,
    split: bool = True,
    recompute: bool | str = AUTO,
    compiled: bool = False,
    loss_chunks: int | str = 1,
    loss: Callable[[Any], Tensor] | None = None,
    name: str | None = None,
    seq_len: int | None = None,
    progress: Report | None = None,
    verify: bool = False,
    offload: str = AUTO,
    tensor: int = 1,
    pipeline: int = 1,
    stage: int | None = None,
    interleave: int = 1,
    expert: int = 1,
    sequence_parallel: bool = False,
    layout: str | None = None,
    on_layout: Callable[[Tried], None] | None = None,
) -> Plan:
    """Finds the plan with the most samples per second that fits the memory, and proves it.

    `cluster` is one, a word such as 8xA100-80GB or a file; without it the ranks that run are planned for.
    `example_inputs` is a tuple, a dict, or a function of the batch size that returns both. `batch` fixes the
    micro-batch of a device, `accumulation` how many of them make a step, `global_batch` the samples of a step over all
    devices. `pin` holds units to modes by name pattern, `modes` restricts all. `recompute` is none, selective or full
    for every block, or auto for the best of each. With `compiled`, `osdp.parallelize` compiles every block, which is
    one unit then, with the memory that it has compiled. With `loss_chunks`, the model computes its loss in so many
    chunks from now on; auto takes 8 where that is faster; see `osdp.losses.chunk_loss`. With `verify` the peak is that
    of a dry run, of eager code: where it differs from the prediction, the search's limit is corrected and the model
    planned again. With `offload` auto, units and inputs of recomputed blocks may be on the host where nothing fits
    otherwise, if `verify` is not asked for; with none they never are. Raises `DoesNotFit` with the smallest peak and
    what would help. Where a process group runs, call it on every rank: rank 0 plans, all get its plan.

    With `tensor` ranks to every operator and `pipeline` stages, the plan is for the data-parallel dimension that is
    left of the cluster, of the `stage` that is asked for, or of the slowest; with `interleave` each stage has so many
    chunks of the blocks, which take turns. With `expert` ranks to the experts, each of the data-parallel ranks has some
    of them. With `sequence_parallel` each tensor-parallel rank has a part of the tokens between the operators that they
    share. See [Note: Outer layout] and [Note: Expert layout] in osdp.cost.outer.
    With `layout="auto"` the degrees are chosen; `on_layout` is told of each that was tried.
    """
    asked: dict[str, Any] = dict(locals())
    if loss_chunks == AUTO:
        from osdp.loss_choice import plan_either

        asked |= {"modes": modes and tuple(modes), "pin": read_pins(pin)}

        def with_chunks(model: nn.Module, chunks: int) -> Plan:
            changed: dict[str, Any] = {"model": model, "loss_chunks": chunks}
            return plan(**(asked | changed))

        return plan_either(model, with_chunks)
    if not isinstance(loss_chunks, int):
        raise UsageError(f"loss_chunks is {loss_chunks!r}, but must be a whole number or auto")
    from osdp.model.capture import capture
    from osdp.runtime.consistency import by_rank_0

    training = Training.of(precision, optimizer, reduce_dtype, compiled=compiled, loss_chunks=loss_chunks)
    report = progress or (lambda _: None)
    rules = Rules(modes=tuple(modes or MODES), split=split, pins=read_pins(pin) or None)
    rules = replace(rules, recompute=read_recompute(recompute))
    if loss_chunks > 1:
        from osdp.losses import chunk_loss

        chunk_loss(model, loss_chunks)
    if compiled:
        rules = replace(rules, granularities=(WHOLE,))
    devices = resolve(cluster, memory)
    batching = Batching(batch, accumulation, global_batch)

    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        raise UsageError(
            "the model's parameters are DTensors, which cannot be traced; plan the plain model, with tensor= as many"
            " ranks as share it, and divide it before osdp.parallelize"
        )
    if offload not in (AUTO, "none"):
        raise UsageError(f"offload is {offload!r}, but must be {AUTO} or none")
    larger = tensor * pipeline * interleave * expert > 1 or stage is not None or layout is not None
    if larger and verify:
        raise UsageError(
            "osdp.plan dry-runs no plan with a tensor, pipeline or expert dimension; leave verify out, or plan without"
        )
    degrees = tensor, pipeline, interleave, expert
    if layout not in (None, "auto") or min(degrees) < 1 or (layout and max(degrees) > 1):
        raise UsageError(
            f"layout {layout!r}, tensor {tensor}, pipeline {pipeline}, interleave {interleave} and expert {expert} do"
            " not go together; give degrees of at least 1, or layout 'auto' alone"
        )

    if sequence_parallel and tensor == 1 and layout is None:
        raise UsageError("sequence parallelism is that of tensor-parallel ranks; give --tensor too, or --layout auto")

    def divided(ranks: int) -> tuple[ModelGraph, tuple[TensorOperator, ...]]:
        if ranks == 1:
            return traced(model), ()
        from osdp.model.tensor_parallel import divide, on_meta

        local = on_meta(model)
        shared = divide(local, ranks, by_tokens=sequence_parallel)
        return traced(local), shared

    def with_experts(ranks: int) -> tuple[ModelGraph, Mapping[str, int]]:
        from osdp.experts import local_experts
        from osdp.model.tensor_parallel import on_meta

        local = on_meta(model)
        chosen = local_experts(local, ranks)
        graph = traced(local)
        return graph, chosen()

    def traced(model: nn.Module, *, on_host: bool = False) -> ModelGraph:
        report(Progress("capture", 0, 0, 1, 0.0))
        return capture(
            model,
            example_inputs,
            loss=loss,
            name=name,
            compute_dtype=training.precision.compute_dtype,
            held_dtype=training.precision.held_dtype,
            seq_len=seq_len,
            batch=batch,
            device=devices.device,
            compiled=compiled and not verify,  # a dry run is of eager code
            on_host=on_host,
        )

    def make() -> Plan:
        if larger:
            from osdp.layouts import Asked, plan_inside, plan_layouts

            asked = Asked(divided, devices, training, rules, batching, report, capture_experts=with_experts)
            if layout is not None:
                from osdp.experts import expert_modules

                asked = replace(asked, has_experts=bool(expert_modules(model)))
            if layout is None:
                return plan_inside(asked, tensor, pipeline, stage, interleave, expert)
            return plan_layouts(asked, tried=on_layout or (lambda _: None))
        graph = traced(model)

        def search(cluster: Cluster) -> Plan:
            samples = {"batch": batch, "accumulation": accumulation, "global_batch": global_batch}
            on_host = offload == AUTO and not verify  # a dry run in one memory does not tell the two apart
            more = {"else_on_host": on_host, "host_graph": partial(traced, model, on_host=True)}
            return plan_graph(graph, cluster, training, rules, progress=report, **more, **samples)

        if not verify:
            return search(devices)
        from osdp.model.capture import scaled_inputs
        from osdp.verify import plan_verified
        from osdp.verify import verify as dry_run

        inputs = example_inputs if callable(example_inputs) else scaled_inputs(example_inputs)

        def check(plan: Plan) -> Verification:
            report(Progress("dry run", plan.batch_size, 0, 1, plan.predicted.samples_per_second))
            return dry_run(plan, graph, build=lambda: model, inputs=inputs, loss=loss)

        def misfit(truth: Verification) -> DoesNotFit:
            unseen = truth.measured_peak_bytes - truth.predicted_peak_bytes
            least = Measured(truth.measured_peak_bytes, truth.measured_at, truth.measured_parts, unseen)
            return nothing_fits(graph, devices, training, rules, batching, measured=least)

        return plan_verified(devices, search, check, misfit)

    return by_rank_0(make)


def resolve(cluster: Cluster | str | None, memory: str | int | None) -> Cluster:
    if cluster is None:
        from osdp.runtime.here import this_cluster

        return this_cluster(memory_bytes=None if memory is None else parse_bytes(memory))
    found = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    return found if memory is None else replace(found, memory_bytes=parse_bytes(memory))


def read_pins(pin: Mapping[str, str] | Iterable[str] | None) -> dict[str, str]:
    """Pins as a mapping; each text is 'name pattern=mode'."""
    if pin is None or isinstance(pin, Mapping):
        return dict(pin or {})
    pins: dict[str, str] = {}
    for text in pin:
        pattern, equals, mode = text.partition("=")
        if not equals or not pattern or mode not in MODES:
            raise UsageError(f"pin {text!r} is not 'name=mode'; the modes are {', '.join(MODES)}")
        if pins.get(pattern, mode) != mode:
            raise UsageError(f"{pattern!r} is pinned to both {pins[pattern]} and {mode}; keep one")
        pins[pattern] = mode
    return pins
