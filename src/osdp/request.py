"""What `osdp.plan` was asked for: it traces the model as each question needs it, and plans.

A request is planned on its own, inside of a larger layout, or again until a dry run agrees; all three trace with the
same inputs, loss and device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from osdp.batching import Batching
from osdp.cluster import Cluster
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.errors import DoesNotFit, UsageError
from osdp.infeasible import Measured, nothing_fits
from osdp.model.capture import capture, scaled_inputs
from osdp.model.graph import ModelGraph, TensorOperator
from osdp.planfile import Plan
from osdp.planning import Progress, Report, plan_graph

if TYPE_CHECKING:
    from torch import Tensor, nn

    from osdp.layouts import Asked, Tried
    from osdp.verify import Verification


@dataclass(frozen=True)
class Example:
    """How a model is called: what capture needs beside it."""

    inputs: Any
    loss: Callable[[Any], Tensor] | None
    name: str | None
    seq_len: int | None


@dataclass(frozen=True)
class Degrees:
    """The larger layout that is asked for: how many ranks or stages to each dimension, or `choose` for the best."""

    tensor: int = 1
    pipeline: int = 1
    stage: int | None = None
    interleave: int = 1
    expert: int = 1
    by_tokens: bool = False
    choose: bool = False

    def __post_init__(self) -> None:
        degrees = self.tensor, self.pipeline, self.interleave, self.expert
        if min(degrees) < 1 or (self.choose and max(degrees) > 1):
            raise UsageError(
                f"tensor {self.tensor}, pipeline {self.pipeline}, interleave {self.interleave} and expert {self.expert}"
                f"{' with layout auto' if self.choose else ''} do not go together; give degrees of at least 1, or"
                " layout 'auto' alone"
            )
        if self.by_tokens and self.tensor == 1 and not self.choose:
            raise UsageError(
                "sequence parallelism is that of tensor-parallel ranks; give --tensor too, or --layout auto"
            )

    @property
    def are_asked(self) -> bool:
        return (
            max(self.tensor, self.pipeline, self.interleave, self.expert) > 1 or self.stage is not None or self.choose
        )


@dataclass(frozen=True)
class Request:
    model: nn.Module
    example: Example
    cluster: Cluster
    training: Training
    rules: Rules
    batching: Batching
    degrees: Degrees
    report: Report
    verify: bool
    may_offload: bool
    on_layout: Callable[[Tried], None]

    def __post_init__(self) -> None:
        if self.verify and self.degrees.are_asked:
            raise UsageError(
                "osdp.plan dry-runs no plan with a tensor, pipeline or expert dimension; leave verify out, or plan"
                " without"
            )
        if any(hasattr(parameter, "device_mesh") for parameter in self.model.parameters()):
            raise UsageError(
                "the model's parameters are DTensors, which cannot be traced; plan the plain model, with tensor= as"
                " many ranks as share it, and divide it before osdp.parallelize"
            )

    def plan(self) -> Plan:
        if self.degrees.are_asked:
            return self._inside_a_layout()
        return self._until_verified() if self.verify else self._search(self.traced(self.model), self.cluster)

    def traced(self, model: nn.Module, *, on_host: bool = False) -> ModelGraph:
        self.report(Progress("capture", 0, 0, 1, 0.0))
        return capture(
            model,
            self.example.inputs,
            loss=self.example.loss,
            name=self.example.name,
            compute_dtype=self.training.precision.compute_dtype,
            held_dtype=self.training.precision.held_dtype,
            seq_len=self.example.seq_len,
            batch=self.batching.batch,
            device=self.cluster.device,
            compiled=self.training.compiled and not self.verify,  # a dry run is of eager code
            on_host=on_host,
        )

    def _search(self, graph: ModelGraph, cluster: Cluster) -> Plan:
        return plan_graph(
            graph,
            cluster,
            self.training,
            self.rules,
            batch=self.batching.batch,
            accumulation=self.batching.accumulation,
            global_batch=self.batching.global_batch,
            progress=self.report,
            else_on_host=self.may_offload and not self.verify,  # a dry run in one memory does not tell the two apart
            host_graph=partial(self.traced, self.model, on_host=True),
        )

    def _until_verified(self) -> Plan:
        from osdp.verify import plan_verified
        from osdp.verify import verify as dry_run

        graph, given = self.traced(self.model), self.example.inputs
        inputs = given if callable(given) else scaled_inputs(given)

        def check(plan: Plan) -> Verification:
            self.report(Progress("dry run", plan.batch_size, 0, 1, plan.predicted.samples_per_second))
            return dry_run(plan, graph, build=lambda: self.model, inputs=inputs, loss=self.example.loss)

        def misfit(truth: Verification) -> DoesNotFit:
            unseen = truth.measured_peak_bytes - truth.predicted_peak_bytes
            least = Measured(truth.measured_peak_bytes, truth.measured_at, truth.measured_parts, unseen)
            return nothing_fits(graph, self.cluster, self.training, self.rules, self.batching, measured=least)

        return plan_verified(self.cluster, partial(self._search, graph), check, misfit)

    def _inside_a_layout(self) -> Plan:
        from osdp.layouts import plan_inside, plan_layouts

        degrees = self.degrees
        if degrees.choose:
            return plan_layouts(self._asked(), tried=self.on_layout)
        return plan_inside(
            self._asked(), degrees.tensor, degrees.pipeline, degrees.stage, degrees.interleave, degrees.expert
        )

    def _asked(self) -> Asked:
        from osdp.layouts import Asked

        asked = Asked(self._divided, self.cluster, self.training, self.rules, self.batching, self.report)
        asked = replace(asked, capture_experts=self._with_experts)
        if self.degrees.choose:
            from osdp.experts import expert_modules

            asked = replace(asked, has_experts=bool(expert_modules(self.model)))
        return asked

    def _divided(self, ranks: int) -> tuple[ModelGraph, tuple[TensorOperator, ...]]:
        if ranks == 1:
            return self.traced(self.model), ()
        from osdp.model.tensor_parallel import divide, on_meta

        local = on_meta(self.model)
        shared = divide(local, ranks, by_tokens=self.degrees.by_tokens)
        return self.traced(local), shared

    def _with_experts(self, ranks: int) -> tuple[ModelGraph, Mapping[str, int]]:
        from osdp.experts import local_experts
        from osdp.model.tensor_parallel import on_meta

        local = on_meta(self.model)
        chosen = local_experts(local, ranks)
        graph = self.traced(local)
        return graph, chosen()
