"""Plans inside a larger layout: tensor- and pipeline-parallel degrees outside, the optimal plan inside.

See [Note: Outer layout] in osdp.cost.outer: each layout is a local problem, which is planned as any other, and its
answer is put back into the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from osdp.api import SEARCH_SECONDS, Report, plan_graph
from osdp.batching import Batching
from osdp.cluster import Cluster, format_bytes
from osdp.cost.outer import Clock, local_cluster, stage_graph, waiting_seconds, with_tensor_collectives
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.cost.units import WHOLE
from osdp.errors import DoesNotFit, OsdpError, UsageError
from osdp.model.graph import ModelGraph, TensorOperator
from osdp.planfile import OuterLayout, Plan
from osdp.sharding import FREE_TO_NODE

MOST_PIPELINED = 4  # samples of a micro-batch in a pipeline: more of them leave larger bubbles
TENSOR_DEGREES = (1, 2, 4, 8)
PIPELINE_DEGREES = (1, 2, 4, 8, 16)
AUTO_SECONDS = 3.0  # of the search for each layout's plan

Capture = Callable[[int], tuple[ModelGraph, tuple[TensorOperator, ...]]]
"""The model as one of so many tensor-parallel ranks holds it, with the operators that they share."""


@dataclass(frozen=True)
class Asked:
    """What is to be planned: everything but the layout."""

    capture: Capture
    cluster: Cluster
    training: Training
    rules: Rules
    batching: Batching
    progress: Report | None = None
    seconds: float = SEARCH_SECONDS
    _captured: dict[int, tuple[ModelGraph, tuple[TensorOperator, ...]]] = field(default_factory=dict)

    def model(self, tensor: int) -> tuple[ModelGraph, tuple[TensorOperator, ...]]:
        if tensor not in self._captured:
            self._captured[tensor] = self.capture(tensor)
        return self._captured[tensor]


def plan_inside(asked: Asked, tensor: int, pipeline: int, stage: int | None = None) -> Plan:
    """The best plan of one stage of a layout; without a stage, of the slowest of the first and the last."""
    if stage is not None and not 0 <= stage < pipeline:
        raise UsageError(f"stage {stage} is not one of {pipeline}; give 0 to {pipeline - 1}")
    local = local_cluster(asked.cluster, tensor, pipeline)
    layouts = [OuterLayout(tensor, pipeline, each) for each in ({pipeline - 1, 0} if stage is None else {stage})]
    best: Plan | None = None
    refused: DoesNotFit | None = None
    for batching, micro_batches in _ways(asked.batching, local, pipeline):
        found: Plan | None = None
        try:
            for layout in layouts:
                plan = _stage_plan(asked, local, layout, batching, micro_batches)
                found = plan if found is None or _rate(plan) < _rate(found) else found
                if best is not None and _rate(found) <= _rate(best):
                    break
        except DoesNotFit as error:
            refused = error
            break  # larger micro-batches need more memory
        assert found is not None
        if best is not None and _rate(found) <= _rate(best):
            break  # larger micro-batches leave larger bubbles
        best = found
    if best is None:
        assert refused is not None
        raise refused
    return best


def _rate(plan: Plan) -> float:
    return plan.predicted.samples_per_second


def _ways(batching: Batching, local: Cluster, pipeline: int) -> list[tuple[Batching, int]]:
    """How the local problem takes a step's samples, and of how many micro-batches they are; small ones first."""
    if pipeline == 1:
        return [(batching, 0)]
    if batching.global_batch is None and batching.accumulation is None:
        raise UsageError(
            "a pipeline needs several micro-batches in a step; give --global-batch, or --batch with --accumulation"
        )
    ways = sorted((batch or 1, micro_batches) for micro_batches, batch in batching.ways(local.world_size))
    if batching.global_batch is not None:
        ways = [
            (batch, often) for batch, often in ways if batch == 1 or (batch <= MOST_PIPELINED and often >= pipeline)
        ]
    return [(Batching(batch, often + pipeline - 1), often) for batch, often in ways]


def _stage_plan(asked: Asked, local: Cluster, layout: OuterLayout, batching: Batching, micro_batches: int) -> Plan:
    graph, shared = asked.model(layout.tensor)
    clock, rules = Clock(asked.cluster, local), asked.rules
    if layout.tensor > 1:
        graph = with_tensor_collectives(graph, shared, layout.tensor, clock)
        rules = replace(rules, modes=tuple(mode for mode in rules.modes if mode != FREE_TO_NODE))
    if layout.pipeline > 1:
        graph = stage_graph(graph, layout.pipeline, layout.stage, micro_batches, clock)
        rules = replace(rules, only_reduced_once=True)
    given = {"batch": batching.batch, "accumulation": batching.accumulation, "global_batch": batching.global_batch}
    plan = plan_graph(
        graph, local, asked.training, rules, progress=asked.progress, search_seconds=asked.seconds, **given
    )
    layout = replace(layout, whole=asked.cluster.word)
    return _of_whole(plan, layout, micro_batches, waiting_seconds(graph, clock, plan.batch_size))


def _of_whole(plan: Plan, layout: OuterLayout, micro_batches: int, waiting: float) -> Plan:
    """The local answer, put back: a step has so many micro-batches, in the time of more; 0 for no pipeline."""
    if layout.pipeline == 1:
        return replace(plan, layout=replace(layout, tensor_seconds=waiting * plan.accumulation))
    share = micro_batches / plan.accumulation
    step, proof = plan.predicted, plan.certificate
    rate = step.samples_per_second * share
    return replace(
        plan,
        accumulation=micro_batches,
        predicted=replace(step, samples_per_second=rate, mfu=step.mfu * share),
        certificate=replace(
            proof, bound=proof.bound * share, fastest_samples_per_second=proof.fastest_samples_per_second * share
        ),
        baselines=(),  # they reduce in every micro-batch, which a schedule does not
        layout=replace(layout, tensor_seconds=waiting * micro_batches, bubble_seconds=step.step_seconds * (1 - share)),
    )


@dataclass(frozen=True)
class Tried:
    """One layout of several: its plan, or why there is none."""

    tensor: int
    pipeline: int
    plan: Plan | None
    reason: str = ""


def plan_layouts(
    asked: Asked,
    *,
    tried: Callable[[Tried], None] = lambda _: None,
    tensors: Sequence[int] = TENSOR_DEGREES,
    pipelines: Sequence[int] = PIPELINE_DEGREES,
) -> Plan:
    """The plan of the fastest layout; `tried` is told of each.

    Every layout is priced with the best plan that gathers whole blocks, found by a short search; the fastest, and data
    parallelism alone, are then planned in full, and the better of the two is taken.
    """
    found = [priced(asked, tensor, pipeline) for tensor in tensors for pipeline in pipelines]
    fastest = max(found, key=lambda each: _rate(each.plan) if each.plan else 0.0)
    if fastest.plan is None:
        raise UsageError(f"no layout fits {asked.cluster.word}: {found[0].reason}; give more devices or more memory")
    full = {each: _tried(asked, *each) for each in dict.fromkeys([(1, 1), (fastest.tensor, fastest.pipeline)])}
    best: Plan | None = None
    for each in found:
        again = full.get((each.tensor, each.pipeline), each)
        taken = again if again.plan else each
        tried(taken)
        if taken.plan is not None and (best is None or _rate(taken.plan) > _rate(best)):
            best = taken.plan
    assert best is not None
    return best


def priced(asked: Asked, tensor: int, pipeline: int) -> Tried:
    """A layout with the best plan that gathers whole blocks, found by a short search."""
    rules = replace(asked.rules, split=False, granularities=(WHOLE,))
    return _tried(replace(asked, rules=rules, seconds=AUTO_SECONDS), tensor, pipeline)


def _tried(asked: Asked, tensor: int, pipeline: int) -> Tried:
    try:
        return Tried(tensor, pipeline, plan_inside(asked, tensor, pipeline))
    except DoesNotFit as error:
        return Tried(tensor, pipeline, None, f"needs {format_bytes(error.peak_bytes)}")
    except OsdpError as error:  # degrees that do not divide the cluster, the model or the batch
        return Tried(tensor, pipeline, None, str(error).partition(";")[0])
