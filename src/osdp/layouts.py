"""Plans inside a larger layout: tensor- and pipeline-parallel degrees outside, the optimal plan inside.

See [Note: Outer layout] in osdp.cost.outer: each layout is a local problem, which is planned as any other, and its
answer is put back into the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from osdp.batching import Batching
from osdp.cluster import Cluster, format_bytes
from osdp.cluster.part import local_cluster
from osdp.cost.outer import (
    Clock,
    idle_micro_batches,
    stage_graph,
    waiting_seconds,
    with_expert_collectives,
    with_tensor_collectives,
)
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.cost.units import WHOLE
from osdp.errors import DoesNotFit, OsdpError, UsageError
from osdp.model.graph import ModelGraph, TensorOperator
from osdp.planfile import OuterLayout, Plan
from osdp.planning import SEARCH_SECONDS, Report, plan_graph
from osdp.sharding import FREE_TO_NODE

MOST_PIPELINED = 4  # samples of a micro-batch in a pipeline: more of them leave larger bubbles
TENSOR_DEGREES = (1, 2, 4, 8)
PIPELINE_DEGREES = (1, 2, 4, 8, 16)
EXPERT_DEGREES = (2, 4, 8)
AUTO_SECONDS = 3.0  # of the search for each layout's plan

Capture = Callable[[int], tuple[ModelGraph, tuple[TensorOperator, ...]]]
"""The model as one of so many tensor-parallel ranks holds it, with the operators that they share."""

CaptureExperts = Callable[[int], tuple[ModelGraph, Mapping[str, int]]]
"""The model with the experts of one of so many ranks; by their names, to how many of them a token goes."""


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
    capture_experts: CaptureExperts | None = None
    has_experts: bool = False
    _captured: dict[int, tuple[ModelGraph, tuple[TensorOperator, ...]]] = field(default_factory=dict)
    _experts: dict[int, tuple[ModelGraph, Mapping[str, int]]] = field(default_factory=dict)

    def model(self, tensor: int) -> tuple[ModelGraph, tuple[TensorOperator, ...]]:
        if tensor not in self._captured:
            self._captured[tensor] = self.capture(tensor)
        return self._captured[tensor]

    def with_experts(self, ranks: int, clock: Clock) -> ModelGraph:
        assert self.capture_experts is not None
        if ranks not in self._experts:
            self._experts[ranks] = self.capture_experts(ranks)
        graph, chosen = self._experts[ranks]
        return with_expert_collectives(graph, chosen, ranks, clock)


def plan_inside(
    asked: Asked, tensor: int, pipeline: int, stage: int | None = None, interleave: int = 1, expert: int = 1
) -> Plan:
    """The best plan of one stage of a layout; without a stage, of the slowest of the first and the last."""
    if interleave > 1 and pipeline == 1:
        raise UsageError(f"interleave {interleave} needs the stages of a pipeline; give --pipeline too")
    if stage is not None and not 0 <= stage < pipeline:
        if pipeline == 1:
            raise UsageError(f"stage {stage} needs the stages of a pipeline; give --pipeline too")
        raise UsageError(f"stage {stage} is not one of {pipeline}; give 0 to {pipeline - 1}")
    local = local_cluster(asked.cluster, tensor, pipeline)
    _check_experts(asked, local, tensor, expert)
    stages = {pipeline - 1, 0} if stage is None else {stage}
    layouts = [OuterLayout(tensor, pipeline, each, interleave=interleave, expert=expert) for each in stages]
    best: Plan | None = None
    refused: DoesNotFit | None = None
    for batching, micro_batches in _ways(asked.batching, local, pipeline, interleave):
        try:
            found = _slowest(asked, local, layouts, batching, micro_batches, than=0.0 if best is None else _rate(best))
        except DoesNotFit as error:
            refused = error
            break  # larger micro-batches need more memory
        if best is not None and _rate(found) <= _rate(best):
            break  # larger micro-batches leave larger bubbles
        best = found
    if best is None:
        assert refused is not None
        raise refused
    return best


def _slowest(
    asked: Asked, local: Cluster, layouts: Sequence[OuterLayout], batching: Batching, micro_batches: int, *, than: float
) -> Plan:
    """The plan of the slowest of these stages; of one that is not faster than `than`, as soon as it is found.

    Where the micro-batch is free, all stages take the smallest that one of them chooses.
    """
    if batching.batch is None and micro_batches:
        free = [_stage_plan(asked, local, layout, batching, micro_batches) for layout in layouts]
        batching = replace(batching, batch=min(plan.batch_size for plan in free))
    plans: list[Plan] = []
    for layout in layouts:
        plans.append(_stage_plan(asked, local, layout, batching, micro_batches))
        if _rate(plans[-1]) <= than:
            break
    return _with_shorter_bubble(min(plans, key=_rate), max(plans, key=_rate))


def _with_shorter_bubble(slowest: Plan, fastest: Plan) -> Plan:
    """A pipeline fills and runs empty at the pace of all stages: of those between two, at their mean."""
    bubble, ratio = slowest.layout.bubble_seconds, _rate(slowest) / _rate(fastest)
    if not bubble or ratio == 1:
        return slowest
    others = ratio if slowest.layout.pipeline == 2 else (1 + ratio) / 2
    saved = bubble * (1 - others)
    step, proof = slowest.predicted, slowest.certificate
    share = step.step_seconds / (step.step_seconds - saved)
    return replace(
        slowest,
        predicted=replace(
            step,
            step_seconds=step.step_seconds - saved,
            samples_per_second=step.samples_per_second * share,
            mfu=step.mfu * share,
        ),
        certificate=replace(
            proof, bound=proof.bound * share, fastest_samples_per_second=proof.fastest_samples_per_second * share
        ),
        layout=replace(slowest.layout, bubble_seconds=bubble - saved),
    )


def _check_experts(asked: Asked, local: Cluster, tensor: int, expert: int) -> None:
    if expert == 1:
        return
    if tensor > 1:
        raise UsageError(
            f"{tensor} tensor-parallel ranks and experts over {expert} ranks do not go together: FSDP2 shards what lies"
            " on one other dimension; leave --tensor or --expert out"
        )
    if asked.training.compiled:
        raise UsageError(
            f"blocks with experts over {expert} ranks are not compiled, as tokens leave them in the middle; leave"
            " --compiled or --expert out"
        )
    if local.devices_per_node % expert:
        raise UsageError(
            f"experts over {expert} ranks do not divide the {local.devices_per_node} data-parallel devices of a node;"
            f" give a divisor of {local.devices_per_node}"
        )


def _rate(plan: Plan) -> float:
    return plan.predicted.samples_per_second


def _ways(batching: Batching, local: Cluster, pipeline: int, interleave: int) -> list[tuple[Batching, int]]:
    """How the local problem takes a step's samples, and of how many micro-batches they are; small ones first."""
    if pipeline == 1:
        return [(batching, 0)]
    if batching.global_batch is None and batching.accumulation is None:
        raise UsageError(
            "a pipeline needs several micro-batches in a step; give --global-batch, or --batch with --accumulation"
        )
    ways = [(batch, micro_batches) for micro_batches, batch in batching.ways(local.world_size)]
    if batching.global_batch is not None:
        ways = sorted((batch or 1, often) for batch, often in ways)
        ways = [(each, often) for each, often in ways if each == 1 or (each <= MOST_PIPELINED and often >= pipeline)]
    if interleave > 1:
        ways = [(batch, often) for batch, often in ways if often % pipeline == 0]
        if not ways:
            raise UsageError(
                f"interleaved stages need a multiple of {pipeline} micro-batches in a step, which this batch cannot be"
                " cut into; give another --global-batch, or leave --interleave out"
            )
    idle = idle_micro_batches(pipeline, interleave)
    return [(Batching(batch, often + idle), often) for batch, often in ways]


def _stage_plan(asked: Asked, local: Cluster, layout: OuterLayout, batching: Batching, micro_batches: int) -> Plan:
    clock, rules = Clock(asked.cluster, local), asked.rules
    if layout.expert > 1:
        graph, shared = asked.with_experts(layout.expert, clock), ()
    else:
        graph, shared = asked.model(layout.tensor)
    if layout.tensor > 1:
        graph = with_tensor_collectives(graph, shared, layout.tensor, clock)
        rules = replace(rules, modes=tuple(mode for mode in rules.modes if mode != FREE_TO_NODE))
    if layout.pipeline > 1:
        graph = stage_graph(graph, layout.pipeline, layout.stage, micro_batches, clock, layout.interleave)
        rules = replace(rules, only_reduced_once=True)
    given = {"batch": batching.batch, "accumulation": batching.accumulation, "global_batch": batching.global_batch}
    plan = plan_graph(
        graph, local, asked.training, rules, progress=asked.progress, search_seconds=asked.seconds, join=False, **given
    )
    layout = replace(layout, whole=asked.cluster.word, sequence_parallel=any(each.by_tokens for each in shared))
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
    interleave: int = 1
    expert: int = 1

    @property
    def degrees(self) -> tuple[int, int, int]:
        return self.tensor, self.pipeline, self.expert


def plan_layouts(
    asked: Asked,
    *,
    tried: Callable[[Tried], None] = lambda _: None,
    tensors: Sequence[int] = TENSOR_DEGREES,
    pipelines: Sequence[int] = PIPELINE_DEGREES,
) -> Plan:
    """The plan of the fastest layout; `tried` is told of each.

    Every layout is priced with the best plan that gathers whole blocks, found by a short search; the fastest, and data
    parallelism alone, are then planned in full, and the better of the two is taken. A model that has experts is tried
    with them over a dimension of their own too, where no operator is divided.
    """
    ways = [(tensor, pipeline, 1) for tensor in tensors for pipeline in pipelines]
    if asked.has_experts and not asked.training.compiled:
        ways += [(1, pipeline, expert) for expert in EXPERT_DEGREES for pipeline in pipelines]
    found = [priced(asked, tensor, pipeline, expert=expert) for tensor, pipeline, expert in ways]
    fastest = max(found, key=lambda each: _rate(each.plan) if each.plan else 0.0)
    if fastest.plan is None:
        raise UsageError(f"no layout fits {asked.cluster.word}: {found[0].reason}; give more devices or more memory")
    full = {each: _tried(asked, *each[:2], expert=each[2]) for each in dict.fromkeys([(1, 1, 1), fastest.degrees])}
    best: Plan | None = None
    for each in found:
        again = full.get(each.degrees, each)
        taken = again if again.plan else each
        tried(taken)
        if taken.plan is not None and (best is None or _rate(taken.plan) > _rate(best)):
            best = taken.plan
    assert best is not None
    return best


def priced(asked: Asked, tensor: int, pipeline: int, interleave: int = 1, expert: int = 1) -> Tried:
    """A layout with the best plan that gathers whole blocks, found by a short search."""
    rules = replace(asked.rules, split=False, granularities=(WHOLE,))
    return _tried(replace(asked, rules=rules, seconds=AUTO_SECONDS), tensor, pipeline, interleave, expert)


def _tried(asked: Asked, tensor: int, pipeline: int, interleave: int = 1, expert: int = 1) -> Tried:
    plan, reason = None, ""
    try:
        plan = plan_inside(asked, tensor, pipeline, interleave=interleave, expert=expert)
    except DoesNotFit as error:
        reason = f"needs {format_bytes(error.peak_bytes)}"
    except OsdpError as error:  # degrees that do not divide the cluster, the model or the batch
        reason = str(error).partition(";")[0]
    return Tried(tensor, pipeline, plan, reason, interleave, expert)
