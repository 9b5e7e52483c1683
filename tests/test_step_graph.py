"""Claims: the step graph has the collectives that each mode means, of the right bytes, and its seconds add up."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from planned import how
from small_models import captured

from osdp.api import resolve
from osdp.cluster import Cluster
from osdp.cost.graph import COMMUNICATION, COMPUTE, Node, StepGraph, step_graph, step_graph_of
from osdp.cost.layout import Variant, Variants
from osdp.cost.tables import Rules
from osdp.cost.time_model import ALL_GATHER, ALL_REDUCE, BACKWARD, FORWARD, REDUCE_SCATTER
from osdp.cost.training import Training
from osdp.cost.units import OPERATORS, WHOLE, Option
from osdp.errors import UsageError
from osdp.planning import plan_graph
from osdp.sharding import FREE, FREE_IN_NODE, FREE_TO_NODE, KEEP, KEEP_IN_NODE, MODES, REPLICATE

BATCH = 2
CLUSTER = "2x2xA100-40GB"
COMPUTE_BYTES, REDUCE_BYTES = 2, 4  # bf16 on the wire, gradients in fp32


def built(
    *modes: str,
    cluster: str = CLUSTER,
    model: str = "gpt",
    granularity: str = WHOLE,
    recompute: bool = False,
    accumulation: int = 1,
    once: bool = False,
    two_levels: bool = False,
    overlap: float = 1.0,
    stays: bool = False,
) -> StepGraph:
    graph = captured(model)
    variants = Variants(graph)
    chosen = [Variant(granularity if s.is_block else OPERATORS, how(recompute and s.is_block)) for s in graph.stages]
    layout = variants.layout(chosen)
    held = {"reduce_once": once, "two_levels": two_levels, "gather_once": stays}
    options = [Option(modes[i % len(modes)], **held) for i in range(len(layout.units))]
    training = replace(Training.of(), accumulation=accumulation)
    return step_graph(layout, options, BATCH, training, replace(Cluster.parse(cluster), overlap=overlap))


def collectives(graph: StepGraph, unit: str) -> list[Node]:
    return [node for node in graph.nodes if node.name == unit and node.stream == COMMUNICATION]


def padded(graph: StepGraph, index: int, ranks: int) -> int:
    """Elements of a unit whose parameters' first dimensions are rounded up to the ranks."""
    shapes = [parameter.shape for parameter in graph.layout.units[index].parameters]
    return sum(-(-shape[0] // ranks) * ranks * (shape[1] if len(shape) > 1 else 1) for shape in shapes)


# ---- order


@pytest.mark.parametrize("granularity", [WHOLE, OPERATORS])
def test_nodes_are_in_topological_order(granularity: str) -> None:
    graph = built(*MODES, granularity=granularity, recompute=True)
    for index, node in enumerate(graph.nodes):
        assert node.id == index
        assert all(0 <= other < index for other in node.depends)
    assert graph.nodes[-1].kind == "optimizer"


def before(graph: StepGraph, node: Node) -> set[int]:
    """All nodes that a node comes after."""
    found: set[int] = set()
    for number in range(node.id, -1, -1):
        if number == node.id or number in found:
            found.update(graph.nodes[number].depends)
    return found


@pytest.mark.parametrize("granularity", [WHOLE, OPERATORS])
def test_compute_waits_for_its_own_gather_and_a_reduction_for_the_compute(granularity: str) -> None:
    graph = built(FREE, granularity=granularity)
    copies = [n for n in graph.nodes if n.kind == "copy"]
    for gather in (n for n in graph.nodes if n.kind == ALL_GATHER and n.name != "positions"):
        entered = next(n for n in copies if gather.id in n.depends)
        assert (entered.name, entered.phase) == (gather.name, gather.phase)
        ahead = [n for n in graph.nodes[gather.id : entered.id] if n.kind == COMPUTE]
        assert all(gather.id not in before(graph, n) for n in ahead)
    for reduction in (n for n in graph.nodes if n.kind == REDUCE_SCATTER):
        computed = [n.id for n in graph.nodes[: reduction.id] if n.kind == COMPUTE]
        assert computed[-1] in before(graph, reduction)


def test_a_block_gathered_by_operators_computes_between_its_gathers() -> None:
    graph = built(FREE, granularity=OPERATORS)
    kinds = [n.kind for n in graph.nodes if (n.phase, n.stage) == (FORWARD, "blocks.1") and n.kind != "copy"]
    assert kinds.count(COMPUTE) >= 3 and kinds.count(ALL_GATHER) >= 3
    assert all(pair != (COMPUTE, COMPUTE) for pair in pairwise(kinds))


def test_a_gather_is_issued_one_unit_ahead_in_both_directions() -> None:
    graph = built(FREE)
    wires = [(n.kind, n.name) for n in graph.nodes if n.stream == COMMUNICATION]
    forward = ["tokens", "positions", "blocks.0", "blocks.1", "blocks.2", "norm"]
    assert wires[: len(forward)] == [(ALL_GATHER, name) for name in forward]
    gather, reduce = ALL_GATHER, REDUCE_SCATTER
    assert wires[len(forward) :] == [
        *((gather, "tokens"), (gather, "norm"), (gather, "blocks.2"), (reduce, "norm"), (gather, "blocks.1")),
        *((reduce, "blocks.2"), (gather, "blocks.0"), (reduce, "blocks.1"), (gather, "positions")),
        *((reduce, "blocks.0"), (reduce, "tokens"), (reduce, "positions")),
    ]
    computed = {n.stage: n.id for n in graph.nodes if n.kind == COMPUTE and n.phase == FORWARD}
    issued = {n.name: n.id for n in reversed(graph.nodes) if n.kind == ALL_GATHER and n.phase == FORWARD}
    assert issued["blocks.1"] < computed["blocks.0"] < issued["blocks.2"] < computed["blocks.1"]


def test_micro_batches_follow_each_other_and_the_last_one_does_what_is_done_once() -> None:
    graph = built(KEEP, REPLICATE, accumulation=3, once=True)
    step, alone = graph.collectives(), graph.collectives(1)
    gathers = [each for each in alone if each.kind == ALL_GATHER]
    assert gathers and step == [*gathers, *gathers, *alone]
    assert {each.unit for each in alone} == {unit.name for unit in graph.layout.units}


def test_a_group_of_one_rank_sends_nothing_and_one_node_is_the_world() -> None:
    graph = built(KEEP_IN_NODE, cluster="4xA100-40GB")
    assert {(each.kind, each.group) for each in graph.collectives()} == {
        (ALL_GATHER, "world"),
        (REDUCE_SCATTER, "world"),
    }


def test_stages_run_forward_then_backward() -> None:
    graph = built(KEEP)
    names = [staged.stage.name for staged in graph.layout.staged]
    computed = list(dict.fromkeys((n.phase, n.stage) for n in graph.nodes if n.kind == COMPUTE))
    assert computed == [(FORWARD, name) for name in names] + [(BACKWARD, name) for name in reversed(names)]


# ---- the table of modes: (kind, group, phase) of every collective of a unit, and the ranks that share it

TABLE = {
    REPLICATE: [(ALL_REDUCE, "world", BACKWARD)],
    KEEP: [(ALL_GATHER, "world", FORWARD), (REDUCE_SCATTER, "world", BACKWARD)],
    FREE: [(ALL_GATHER, "world", FORWARD), (ALL_GATHER, "world", BACKWARD), (REDUCE_SCATTER, "world", BACKWARD)],
    FREE_TO_NODE: [
        (ALL_GATHER, "world", FORWARD),
        (ALL_GATHER, "node", BACKWARD),
        (REDUCE_SCATTER, "world", BACKWARD),
    ],
    KEEP_IN_NODE: [
        (ALL_GATHER, "node", FORWARD),
        (REDUCE_SCATTER, "node", BACKWARD),
        (ALL_REDUCE, "across", BACKWARD),
    ],
    FREE_IN_NODE: [
        (ALL_GATHER, "node", FORWARD),
        (ALL_GATHER, "node", BACKWARD),
        (REDUCE_SCATTER, "node", BACKWARD),
        (ALL_REDUCE, "across", BACKWARD),
    ],
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("granularity", [WHOLE, OPERATORS])
@pytest.mark.parametrize("mode", MODES)
def test_collectives_of_a_mode(mode: str, granularity: str, recompute: bool) -> None:
    graph = built(mode, granularity=granularity, recompute=recompute)
    for unit in graph.layout.units:
        found = [(n.kind, n.group, n.phase) for n in collectives(graph, unit.name)]
        assert Counter(found) == Counter(TABLE[mode]), unit.name


@pytest.mark.parametrize(("cluster", "nodes", "devices"), [("2x2xL4", 2, 2), ("2x3xL4", 2, 3), ("4x2xCPU", 4, 2)])
@pytest.mark.parametrize("mode", MODES)
def test_bytes_of_the_collectives(mode: str, cluster: str, nodes: int, devices: int) -> None:
    graph = built(mode, cluster=cluster, model="gpt-uneven", granularity=OPERATORS)
    in_node = mode in (KEEP_IN_NODE, FREE_IN_NODE)
    ranks = 1 if mode == REPLICATE else devices if in_node else nodes * devices
    for index, unit in enumerate(graph.layout.units):
        size = padded(graph, index, ranks)
        for node in collectives(graph, unit.name):
            across = node.kind == ALL_REDUCE and in_node
            elements = size // devices if across else size
            assert node.nbytes == elements * (COMPUTE_BYTES if node.kind == ALL_GATHER else REDUCE_BYTES), node


@pytest.mark.parametrize(("nodes", "devices"), [(2, 2), (2, 3)])
def test_on_two_levels_each_level_carries_its_part(nodes: int, devices: int) -> None:
    graph = built(FREE, cluster=f"{nodes}x{devices}xCPU", model="gpt-uneven", granularity=OPERATORS, two_levels=True)
    for index, unit in enumerate(graph.layout.units):
        size = padded(graph, index, nodes * devices)
        found = Counter((n.kind, n.group, n.nbytes) for n in collectives(graph, unit.name))
        gathers, column, inside = 2, size // devices, size // nodes
        assert found == {
            (ALL_GATHER, "across", column * COMPUTE_BYTES): gathers,
            (ALL_GATHER, "node", inside * COMPUTE_BYTES): gathers * nodes,
            (REDUCE_SCATTER, "node", inside * REDUCE_BYTES): nodes,
            (REDUCE_SCATTER, "across", column * REDUCE_BYTES): 1,
        }


def test_seconds_of_the_collectives_are_the_clusters() -> None:
    graph = built(*MODES)
    for node in graph.nodes:
        if node.stream == COMMUNICATION:
            expected = graph.cluster.collective_seconds(node.kind, node.group or "", node.nbytes)
            assert node.seconds == pytest.approx(expected + graph.cluster.device.kernel_seconds, rel=1e-12)


def test_flops_are_those_of_the_model() -> None:
    graph, model = built(FREE), captured("gpt")
    flops = sum(n.flops for n in graph.nodes)
    rows = [s.flops for stage in model.stages for s in (*stage.plain.forward, *stage.plain.backward)]
    assert flops == sum(int((row @ [1, BATCH]).sum()) for row in rows)
    assert sum(n.flops for n in built(FREE, recompute=True).nodes) > flops


# ---- seconds


@pytest.mark.parametrize("modes", [(FREE,), (KEEP, REPLICATE), MODES])
def test_without_overlap_a_step_is_the_sum_of_its_nodes(modes: tuple[str, ...]) -> None:
    graph = built(*modes, cluster="2x2xCPU", overlap=0.0)
    time = graph.time()
    assert time.total == pytest.approx(sum(node.seconds for node in graph.nodes), rel=1e-12)
    assert time.hidden_communication == pytest.approx(0.0, abs=1e-15)


def simulated(graph: StepGraph, *, first: bool = True, last: bool = True) -> float:
    """One micro-batch, node by node: a plain account of two streams, beside the one that the search has."""
    done: dict[int, float] = {}
    streams = {COMPUTE: 0.0, COMMUNICATION: 0.0}
    reduced = 0.0
    early = graph.cluster.engine.reduces_before_waiting
    nodes = [n for n in graph.nodes if n.kind != "optimizer" and (last or not n.once) and (first or not n.first)]
    reductions = {n.id for n in nodes if n.kind in (REDUCE_SCATTER, ALL_REDUCE)}
    copied_in = {each for n in nodes if n.id in reductions for each in n.depends if graph.nodes[each].kind == "copy"}
    taken: dict[int, float] = {}  # by the copy beside a collective: what that takes from compute
    for node in nodes:
        if node.kind == "copy":
            taken[node.id] = sum(graph.nodes[each].taken_seconds for each in node.depends)
        elif node.id in reductions:
            first = min(each for each in node.depends if each in copied_in)
            taken[first] += node.taken_seconds
    for node in nodes:
        waits = [done[each] for each in node.depends if each in done]
        if (node.id in copied_in and not early) or (node.id in reductions and early):
            streams[COMPUTE] = max(streams[COMPUTE], reduced)  # one reduction at a time
        begin = max([streams[node.stream], *waits, *([streams[COMPUTE]] if node.stream == COMMUNICATION else [])])
        streams[node.stream] = done[node.id] = begin + node.seconds + taken.get(node.id, 0.0)
        if node.id in reductions:
            reduced = done[node.id]
    return max(streams.values())


@pytest.mark.parametrize("cluster", ["2x2xA100-40GB", "2x2xCPU"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("granularity", [WHOLE, OPERATORS])
@pytest.mark.parametrize("modes", [(FREE,), (KEEP,), (FREE, KEEP), MODES])
def test_with_overlap_a_step_takes_what_its_nodes_take_on_two_streams(
    modes: tuple[str, ...], granularity: str, recompute: bool, cluster: str
) -> None:
    graph = built(*modes, granularity=granularity, recompute=recompute, cluster=cluster)
    time = graph.time()
    stepped = sum(n.seconds for n in graph.nodes if n.kind == "optimizer")
    assert time.total == pytest.approx(simulated(graph) + stepped, rel=1e-9)
    wires = sum(n.seconds for n in graph.nodes if n.stream == COMMUNICATION)
    assert time.hidden_communication + time.exposed_communication == pytest.approx(wires, rel=1e-9)
    assert time.hidden_communication > 0


@pytest.mark.parametrize("once", [False, True])
def test_streams_meet_at_the_end_of_every_micro_batch(once: bool) -> None:
    graph = built(KEEP, FREE, accumulation=3, once=once)
    stepped = sum(n.seconds for n in graph.nodes if n.kind == "optimizer")
    expected = 2 * simulated(graph, last=False) + simulated(graph) + stepped
    assert graph.seconds == pytest.approx(expected, rel=1e-9)
    assert (simulated(graph, last=False) < simulated(graph)) == once


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("accumulation", [2, 4])
@pytest.mark.parametrize("cluster", [CLUSTER, "2x2xCPU"])
def test_the_first_micro_batch_gathers_what_stays_gathered(cluster: str, accumulation: int, once: bool) -> None:
    graph = built(KEEP, FREE, KEEP_IN_NODE, accumulation=accumulation, once=once, stays=True, cluster=cluster)
    stepped = sum(n.seconds for n in graph.nodes if n.kind == "optimizer")
    first, often, last = (
        simulated(graph, first=f, last=end) for f, end in ((True, False), (False, False), (False, True))
    )
    assert graph.seconds == pytest.approx(first + (accumulation - 2) * often + last + stepped, rel=1e-9)
    assert first > often and (last > often) == once
    gathers = Counter(each.unit for each in graph.collectives() if each.kind == ALL_GATHER)
    modes = {unit.name: option.mode for unit, option in zip(graph.layout.units, graph.options, strict=True)}
    assert {modes[name]: count for name, count in gathers.items()} == {KEEP: 1, KEEP_IN_NODE: 1, FREE: 2 * accumulation}
    alone = built(KEEP, cluster=cluster, stays=True)  # there is nothing to stay for
    assert alone.seconds == built(KEEP, cluster=cluster).seconds


def test_where_streams_overlap_in_part_a_step_is_that_mixture() -> None:
    """On CPUs: where collectives keep the device busy, they do so only beside compute."""
    both, none, half = (built(FREE, cluster="2x2xCPU", overlap=overlap).seconds for overlap in (1.0, 0.0, 0.5))
    assert half == pytest.approx((both + none) / 2, rel=1e-12) and both < none


@pytest.mark.parametrize("once", [False, True])
def test_micro_batches_repeat_all_but_what_is_done_once(once: bool) -> None:
    graph = built(KEEP, REPLICATE, cluster="2x2xCPU", accumulation=3, once=once, overlap=0.0)
    times = [1 if n.once or n.kind == "optimizer" else 3 for n in graph.nodes]
    expected = sum(n.seconds * count for n, count in zip(graph.nodes, times, strict=True))
    assert graph.time().total == pytest.approx(expected, rel=1e-12)
    reductions = [n for n in graph.nodes if n.kind in (REDUCE_SCATTER, ALL_REDUCE)]
    assert reductions and all(n.once == once for n in reductions)
    assert not any(n.once for n in graph.nodes if n.kind in (ALL_GATHER, COMPUTE))


# ---- a plan and its graph


@pytest.mark.parametrize(
    ("cluster", "memory", "global_batch"),
    [("4xCPU", "3MiB", None), ("2x2xA100-40GB", "4MiB", None), ("2x2xCPU", "3MiB", 64)],
)
def test_the_graph_of_a_plan_reproduces_its_prediction(cluster: str, memory: str, global_batch: int | None) -> None:
    model = captured("gpt")
    plan = plan_graph(model, resolve(cluster, memory), Training.of(), Rules(), global_batch=global_batch)
    graph = step_graph_of(plan, model)
    assert graph.time().total == plan.predicted.step_seconds
    assert graph.timeline().peak_bytes == plan.predicted.peak_bytes
    assert str(graph.timeline().peak) == plan.predicted.peak_at
    assert graph.timeline().peak.parts == plan.predicted.memory_parts
    assert graph.to_dict()["accumulation"] == plan.accumulation
    assert len(graph.to_dict()["nodes"]) == len(graph.nodes)


def test_a_plan_of_another_model_is_refused() -> None:
    plan = plan_graph(captured("gpt"), resolve("4xCPU", "8MiB"), Training.of(), Rules(), batch=1)
    with pytest.raises(UsageError, match="plan again"):
        step_graph_of(plan, captured("gpt-untied"))
    with pytest.raises(UsageError, match="plan again"):
        step_graph_of(plan, captured("gpt-pyramid"))


# ---- pools


def test_streams_do_not_share_what_they_have_freed() -> None:
    """Gathers' outputs and reduced gradients have pools of their own, whose peaks add to the computation's."""
    graph = built(FREE, cluster="2xA100-40GB")
    timeline = graph.timeline()
    gathers, reductions = timeline.pools.max(axis=1)
    sizes = [padded(graph, index, 2) for index in range(len(graph.layout.units))]
    assert gathers >= COMPUTE_BYTES * max(sizes)
    assert reductions == sum(REDUCE_BYTES * size // 2 for size in sizes)
    computing = (timeline.total - timeline.pools.sum(axis=0)).max()
    assert timeline.peak_bytes + timeline.idle_pool_bytes == computing + gathers + reductions
    assert timeline.idle_pool_bytes > 0
    assert built(REPLICATE, cluster="2xA100-40GB").timeline().pools[0].max() == 0
