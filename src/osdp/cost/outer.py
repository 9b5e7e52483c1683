"""The local problem of a larger layout: a model and a cluster go in, those of one data-parallel dimension come out.

[Note: Outer layout]
With t tensor-parallel ranks, p stages of a pipeline and d data-parallel copies of each, a plan decides what one rank of
a data-parallel group holds. Everything else is put into the problem, so that costs and search stay as they are:

- Tensor: capture has local shapes; the collectives that the ranks of an operator wait for become kernels of their
  seconds on the compute stream: an all-reduce after every operator that is divided by rows, in forward and again where
  a block is recomputed; in backward one for the input of each group of operators divided by columns. With sequence
  parallelism a group's input is gathered and the output of an operator divided by rows is scattered, and the other way
  round in backward: as many bytes, with twice the latencies.
- Pipeline (1F1B): stage s computes its own blocks, holds the saved activations of p - s micro-batches (at most all),
  and sends a hidden state forth and a gradient back. The first and last p - 1 micro-batches find some stages idle: a
  step of m micro-batches takes the time of m + p - 1, so that the local problem accumulates so many, and the rates it
  gives are multiplied by m / (m + p - 1). A schedule of torch's reduces gradients after the last micro-batch. The
  slowest stage sets the pace of the m, all of them that of the p - 1; of stages between, the mean of both ends counts.
- Interleaved: each rank has v chunks of the blocks, the model's parts s, s + p, s + 2p and so on. Ranks wait for
  (p - 1) / v micro-batches, rounded up to whole ones; m is a multiple of p. Before its first backward, stage s begins
  2 (p - s - 1) + (v - 1) p + 1 chunks of micro-batches, each of a v-th of its blocks; later it has no more. Every block
  is taken to hold the average. What follows the blocks, a head and its loss, holds one micro-batch: the last chunk of
  the last stage goes backward at once. Each chunk has messages of its own.
- Experts over a dimension of their own: see [Note: Expert layout].
- What a profile timed is kept where it holds: stages without divided operators, collectives of groups with the same
  ranks; messages and all else take the rates that gathers had; see osdp.cluster.part.
- Ranks lie on nodes with tensor innermost, then data, then pipeline: tensor groups do not leave a node, and t of them
  share the node's network. The slowest device of all sets the pace, not the slowest of one group.

[Note: Expert layout]
Of E ranks each has a part of the experts; each has samples of its own. So the dimension of experts is a part of the
data-parallel one, and the local cluster has all its ranks. A unit of experts has local shapes and lies on the ranks
with the same ones, of which a node has an E-th, with as much of its network; all other units lie on all ranks. Tokens
are spread evenly, so a rank's experts see as many as its own samples send. Capture has the copies of a dispatch; its
two all-to-alls, and those of backward and of a second forward, become kernels of their seconds on the compute stream,
as nothing of a block can hide them. Every rank sends (E - 1) / E of its tokens to the others, once for each expert that
a token goes to: the traffic of a gather of so many bytes in all, whose seconds are taken. Experts stay inside a node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from osdp.cluster import Cluster
from osdp.cluster.part import node_of, with_measured_links
from osdp.errors import UsageError
from osdp.model.graph import (
    ZERO,
    Affine,
    Mark,
    ModelGraph,
    Operator,
    Parameter,
    Segment,
    Stage,
    TensorOperator,
    Trace,
    column_groups,
)
from osdp.model.kernels import KernelKind

REFERENCE_BATCH = 4  # a collective's seconds grow in a straight line through those of one sample and of these


class Clock:
    """Kernels that take the time of a collective, on a device of the local cluster."""

    def __init__(self, cluster: Cluster, local: Cluster) -> None:
        self._cluster = cluster
        self._links = with_measured_links(cluster)
        scale = local.slowest_factor if local.device.attention_efficiency > 0 else 1.0
        self._bytes_per_second = 1e12 / local.device.memory_seconds(1e12) / scale

    def all_reduce(self, ranks: int, kind: str = "all_reduce") -> Callable[[Affine], Affine]:
        """Of bytes, the bytes that a kernel would move in the time of the collective."""
        group = node_of(self._cluster, ranks)
        return self._as_moved(lambda total: group.collective_seconds(kind, "node", total))

    def sent(self, pipeline: int) -> Callable[[Affine], Affine]:
        """The same for a message to the next stage, which all ranks that a node has of a stage send at once."""
        nodes, each = self._cluster.nodes, self._cluster.devices_per_node
        if nodes == 1:
            link, at_once = self._links.node_link, 1
        else:
            link, at_once = self._links.network, each // max(1, pipeline // nodes)
        return self._as_moved(lambda total: link.latency_seconds + total * at_once / link.bytes_per_second)

    def seconds(self, moved: Affine, batch: int) -> float:
        return moved.at(batch) / self._bytes_per_second

    def _as_moved(self, seconds: Callable[[float], float]) -> Callable[[Affine], Affine]:
        def moved(total: Affine) -> Affine:
            one, more = (seconds(total.at(batch)) for batch in (1, REFERENCE_BATCH))
            slope = (more - one) / (REFERENCE_BATCH - 1)
            rate = self._bytes_per_second
            return Affine(round(max(0.0, one - slope) * rate), round(slope * rate))

        return moved


def with_tensor_collectives(
    graph: ModelGraph, shared: Sequence[TensorOperator], ranks: int, clock: Clock
) -> ModelGraph:
    """The graph with the tensor dimension's collectives as kernels; operators that are shared are not split."""
    by_name = {each.name: each for each in shared}
    stages = []
    for stage in graph.stages:
        own = [by_name[name] for name in stage.operators if name in by_name]
        forward, backward = _tensor_waits(graph, own, stage.is_block, ranks, clock)
        stages.append(_in_every_trace(stage, partial(_with_waits, forward=forward, backward=backward)))
    operators = {
        name: replace(each, split_dim=-1) if name in by_name else each for name, each in graph.operators.items()
    }
    return replace(graph, stages=tuple(stages), operators=operators)


def _tensor_waits(
    graph: ModelGraph, own: Sequence[TensorOperator], is_block: bool, ranks: int, clock: Clock
) -> tuple[dict[str, Affine], dict[str, Affine]]:
    """What ranks wait for when these operators are left, in forward (and again in a second one) and in backward."""
    all_reduce, gather, scatter = (
        clock.all_reduce(ranks, kind) for kind in ("all_reduce", "all_gather", "reduce_scatter")
    )
    forward: dict[str, Affine] = {}
    backward: dict[str, Affine] = {}
    for each in own:
        size = graph.operators[each.name].output_bytes
        if each.gathers_outputs:
            forward[each.name] = gather(_times(size, ranks))
        elif each.adds_outputs and each.by_tokens and is_block:
            forward[each.name], backward[each.name] = scatter(size), gather(size)
        elif each.adds_outputs:
            forward[each.name] = all_reduce(size)
    by_name = {each.name: each for each in own}
    for first, *_ in column_groups(own):
        size = _times(graph.operators[first].output_bytes, by_name[first].input_share)
        if by_name[first].by_tokens:
            forward[first] = forward.get(first, ZERO) + gather(size)
            backward[first] = scatter(size)
        else:
            backward[first] = all_reduce(size)
    return forward, backward


def with_expert_collectives(graph: ModelGraph, chosen: Mapping[str, int], ranks: int, clock: Clock) -> ModelGraph:
    """The graph with the all-to-alls of experts as kernels; by their names, to how many of them a token goes."""
    exchange = clock.all_reduce(ranks, "all_gather")
    both = {name: _times(exchange(_times(graph.operators[name].output_bytes, k)), 2) for name, k in chosen.items()}
    stages = [
        replace(_in_every_trace(stage, lambda trace: _with_exchanges(trace, both)), selective=None)
        if both.keys() & set(stage.operators)
        else stage
        for stage in graph.stages
    ]
    operators = {
        name: replace(each, split_dim=-1, experts=ranks) if name in both else each
        for name, each in graph.operators.items()
    }
    return replace(graph, stages=tuple(stages), operators=operators)


def _with_exchanges(trace: Trace, both: Mapping[str, Affine]) -> Trace:
    """Tokens go to the experts and come back while these run, in either direction."""

    def segments(found: Iterable[Segment]) -> tuple[Segment, ...]:
        return tuple(_also(s, both.get(s.mark.name)) if s.mark.kind == "enter" else s for s in found)

    return Trace(segments(trace.forward), segments(trace.backward))


def _with_waits(trace: Trace, forward: Mapping[str, Affine], backward: Mapping[str, Affine]) -> Trace:
    """Kernels at the marks at which an operator is left; a second forward waits as the first one did."""

    def segments(found: Iterable[Segment], waits: Mapping[str, Affine]) -> tuple[Segment, ...]:
        return tuple(
            _also(s, (forward if s.mark.recomputed else waits).get(s.mark.name)) if _is_left(s.mark) else s
            for s in found
        )

    return Trace(segments(trace.forward, forward), segments(trace.backward, backward))


def _is_left(mark: Mark) -> bool:
    return mark.kind == "leave"


def _also(segment: Segment, moved: Affine | None) -> Segment:
    """The segment with one kernel more, which moves so much."""
    if moved is None:
        return segment
    row = np.array([[moved.constant, moved.per_sample]], dtype=np.int64)
    return replace(
        segment,
        flops=np.concatenate([segment.flops, np.zeros((1, 2), dtype=np.int64)]),
        moved=np.concatenate([segment.moved, row]),
        kinds=np.concatenate([segment.kinds, [KernelKind.COLLECTIVE]]),
    )


def waiting_seconds(graph: ModelGraph, clock: Clock, batch: int) -> float:
    """What a plain micro-batch waits for the collectives and messages that are kernels here."""
    passes = (t for stage in graph.stages for t in (stage.plain.forward, stage.plain.backward))
    rows = [segment.moved[segment.kinds == KernelKind.COLLECTIVE] for segments in passes for segment in segments]
    constant, per_sample = np.concatenate([np.zeros((1, 2), dtype=np.int64), *rows]).sum(axis=0)
    return clock.seconds(Affine(int(constant), int(per_sample)), batch)


def _times(amount: Affine, factor: float) -> Affine:
    return Affine(round(amount.constant * factor), round(amount.per_sample * factor))


def idle_micro_batches(pipeline: int, interleave: int) -> int:
    """For how many micro-batches a rank waits in a step, while pipelines fill and run empty."""
    return -(-(pipeline - 1) // interleave)


def in_flight(pipeline: int, stage: int, micro_batches: int, interleave: int) -> float:
    """Of how many micro-batches a stage holds activations at most; of parts of its blocks the average."""
    if interleave == 1:
        return min(pipeline - stage, micro_batches)
    chunks = 2 * (pipeline - stage - 1) + (interleave - 1) * pipeline + 1
    return min(chunks, micro_batches * interleave) / interleave


def stage_graph(
    graph: ModelGraph, pipeline: int, stage: int, micro_batches: int, clock: Clock | None, interleave: int = 1
) -> ModelGraph:
    """One stage of a pipeline: its blocks, its activations of several micro-batches, its messages to others."""
    if pipeline == 1:
        return graph
    parts = _divided_blocks(graph, pipeline * interleave)
    chunks = range(stage, len(parts), pipeline)
    held, hidden = in_flight(pipeline, stage, micro_batches, interleave), _hidden_bytes(graph)
    sent = clock.sent(pipeline)(hidden) if clock is not None else None
    stages: list[Stage] = []
    ends: set[int] = set()  # of chunks: they may have messages
    for chunk in chunks:
        first = len(stages)
        ends_model = chunk == len(parts) - 1
        stages += [_held_often(each, 1 if ends_model and not each.is_block else held) for each in parts[chunk]]
        last = len(stages) - 1
        ends |= {first, last}
        if sent is not None and chunk < len(parts) - 1:
            stages[last] = _in_every_trace(stages[last], lambda t: _at_end(t, sent, backward=False))
        if sent is not None and chunk > 0:
            stages[first] = _in_every_trace(stages[first], lambda t: _at_end(t, sent, backward=True))
    boundaries = sum((chunk > 0) + (chunk < len(parts) - 1) for chunk in chunks)
    inputs = graph.input_bytes + _times(hidden, (held + 1) * boundaries)
    elements = graph.sample_elements if stage == 0 else 0  # later stages get no samples, but hidden states
    return _only(replace(graph, input_bytes=inputs, sample_elements=elements), stages, ends)


def _divided_blocks(graph: ModelGraph, pipeline: int) -> list[list[Stage]]:
    """Blocks as equal as can be, earlier stages the larger; what is outside goes with the block before it, or first."""
    count = len(graph.blocks)
    if count < pipeline:
        raise UsageError(
            f"{graph.name} has {count} blocks, too few for {pipeline} stages, or chunks of stages; give at most {count}"
        )
    sizes = [count // pipeline + (index < count % pipeline) for index in range(pipeline)]
    ends = np.cumsum(sizes)
    parts: list[list[Stage]] = [[] for _ in sizes]
    seen = 0
    for each in graph.stages:
        seen += each.is_block
        parts[int(np.searchsorted(ends, max(seen, 1)))].append(each)
    return parts


def _hidden_bytes(graph: ModelGraph) -> Affine:
    """What one block hands to the next: the output of the operator that it enters first, a norm or a projection."""
    block = graph.blocks[-1]
    entered = (s.mark.name for s in block.plain.forward if s.mark.kind == "enter" and s.mark.name in graph.operators)
    return graph.operators[next(entered)].output_bytes


def _held_often(stage: Stage, times: float) -> Stage:
    """A stage whose saved activations are there `times`: of micro-batches before this one, which backward awaits."""

    def held(trace: Trace) -> Trace:
        if not trace.forward or not trace.backward:
            return trace
        more = _times(trace.forward_delta, times - 1)
        forward = tuple(_raised(segment, more) for segment in trace.forward)
        last = trace.backward[-1]
        return Trace(forward, (*trace.backward[:-1], replace(last, end=last.end - more)))

    return stage if times == 1 else _in_every_trace(stage, held)


def _raised(segment: Segment, more: Affine) -> Segment:
    def lines(found: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(line + more for line in found)

    return replace(
        segment,
        peak=lines(segment.peak),
        end=segment.end + more,
        products=lines(segment.products),
        worked=lines(segment.worked),
        attended=lines(segment.attended),
        measured=lines(segment.measured),
        begin=lines(segment.begin),
    )


def _at_end(trace: Trace, moved: Affine, *, backward: bool) -> Trace:
    segments = trace.backward if backward else trace.forward
    if not segments:
        return trace
    changed = (*segments[:-1], _also(segments[-1], moved))
    return replace(trace, backward=changed) if backward else replace(trace, forward=changed)


def _in_every_trace(stage: Stage, change: Callable[[Trace], Trace]) -> Stage:
    return replace(
        stage,
        plain=change(stage.plain),
        recomputed=stage.recomputed and change(stage.recomputed),
        selective=stage.selective and change(stage.selective),
        finer={each: finer and _in_every_trace(finer, change) for each, finer in stage.finer.items()},
    )


def _only(graph: ModelGraph, stages: Sequence[Stage], ends: Set[int]) -> ModelGraph:
    """The graph of these stages: a parameter that is tied to another stage's has the name that it has here."""
    names = dict.fromkeys(name for stage in stages for name in stage.operators)
    renamed: dict[str, Parameter] = {}
    for name in names:
        for each in graph.operators[name].parameters:
            parameter = graph.parameters[each]
            here = [n for n in (each, *parameter.aliases) if n.rpartition(".")[0] in names] or [each]
            renamed[each] = replace(parameter, name=here[0], aliases=tuple(here[1:]))
    operators = {name: _renamed(graph.operators[name], renamed) for name in names}
    first = {each: parameter.name for each, parameter in renamed.items() if parameter.name != each}
    changed = [_in_every_trace(stage, lambda trace: _marked(trace, first)) for stage in stages] if first else stages
    return replace(
        graph,
        parameters={parameter.name: parameter for parameter in renamed.values()},
        operators=operators,
        stages=_numbered(changed, ends),
        unused=tuple(name for name in graph.unused if name in renamed),
    )


def _renamed(operator: Operator, renamed: Mapping[str, Parameter]) -> Operator:
    return replace(operator, parameters=tuple(renamed[each].name for each in operator.parameters))


def _marked(trace: Trace, names: Mapping[str, str]) -> Trace:
    def segments(found: tuple[Segment, ...]) -> tuple[Segment, ...]:
        return tuple(
            replace(s, mark=replace(s.mark, name=names.get(s.mark.name, s.mark.name)))
            if s.mark.kind == "gradient"
            else s
            for s in found
        )

    return Trace(segments(trace.forward), segments(trace.backward))


def _numbered(stages: Sequence[Stage], ends: Set[int]) -> tuple[Stage, ...]:
    """Those at the ends of chunks may have messages: they are alike to no other."""
    most = max(stage.alike for stage in stages)
    return tuple(
        replace(stage, alike=most + 1 + index if index in ends else stage.alike) for index, stage in enumerate(stages)
    )
