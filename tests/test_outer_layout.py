"""Claims about plans inside a larger layout, as they are priced.

- A tensor-parallel rank holds what DTensor gives it; two all-reduces a block in forward, two in backward, and forward's
  again, but for the block's last, where it is recomputed; each takes the seconds of its collective.
- With sequence parallelism it gathers and scatters tokens instead, as many bytes with twice the latencies, and saves
  its part of what it did save whole between shared operators.
- The stages of a pipeline have every operator once, hold the activations of as many micro-batches as are in flight, and
  a step of m micro-batches takes the time of m + p - 1.
- What a profile timed is used where it holds: the blocks of a stage, collectives of groups with the same ranks, and
  links, for messages and all else, at the rates that gathers had.
- Where neither batch is given, all stages take the same micro-batch; a pipeline fills at the pace of all its stages.
- A plan file says its layout; what cannot run it refuses it with a sentence; degrees that do not divide are refused.
- `--layout auto` shows every layout, the best first, and takes the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from small_models import source
from torch import nn

import osdp
from osdp.batching import Batching
from osdp.cluster import Cluster, Measured, TimedStage
from osdp.cluster.part import local_cluster
from osdp.cost.outer import Clock, in_flight, stage_graph, waiting_seconds, with_tensor_collectives
from osdp.cost.tables import Rules
from osdp.cost.time_model import compute_time
from osdp.cost.training import Training
from osdp.errors import UsageError
from osdp.layouts import Asked, plan_inside, plan_layouts
from osdp.model.capture import capture
from osdp.model.gpt import GPT, GPTConfig
from osdp.model.graph import ModelGraph, Segment, TensorOperator
from osdp.model.kernels import KernelKind
from osdp.model.tensor_parallel import divide
from osdp.plan_check import check_alone
from osdp.planfile import Plan
from osdp.planning import plan_graph
from osdp.report.layouts_page import layout_rows
from osdp.runtime.larger_layout import find_mesh

CLUSTER = Cluster.parse("2x4xH100-80GB")
TRAINING = Training.of("bf16", "adamw", None)


@cache
def divided(name: str, ranks: int, *, by_tokens: bool = False) -> tuple[ModelGraph, tuple[TensorOperator, ...]]:
    model = source(name).build_on_meta()
    shared = divide(model, ranks, by_tokens=by_tokens) if ranks > 1 else ()
    found = source(name)
    device = CLUSTER.device
    return capture(model, found.inputs, loss=found.loss, name=name, seq_len=found.seq_len, device=device), shared


def asked(name: str, **changes: object) -> Asked:
    rules = Rules(granularities=("whole",), split=False)
    made = Asked(lambda ranks: divided(name, ranks), CLUSTER, TRAINING, rules, Batching(None, None, 32), seconds=1.0)
    return replace(made, **changes)  # type: ignore[arg-type]


def waits(segments: Sequence[Segment]) -> int:
    return sum(int((segment.kinds == KernelKind.COLLECTIVE).sum()) for segment in segments)


def test_a_tensor_parallel_rank_holds_its_part_and_waits_for_the_others() -> None:
    whole, _ = divided("llama", 1)
    local, shared = divided("llama", 2)
    halved = {name for each in shared for name in whole.operators[each.name].parameters}
    assert len(shared) == 3 * 7 + 2  # seven operators of each block, the embedding and the head
    for name, parameter in local.parameters.items():
        assert parameter.numel * (2 if name in halved else 1) == whole.parameters[name].numel, name
    ranks = local_cluster(CLUSTER, 2, 1)
    clock = Clock(CLUSTER, ranks)
    graph = with_tensor_collectives(local, shared, 2, clock)
    for stage in graph.blocks:
        assert stage.recomputed is not None
        assert [waits(stage.plain.forward), waits(stage.plain.backward)] == [2, 2]
        assert waits(stage.recomputed.backward) == 3  # the second forward ends before the block's last product
    assert all(graph.operators[each.name].split_dim == -1 for each in shared)
    hidden = local.operators["model.layers.0.mlp.down_proj"].output_bytes
    group = replace(CLUSTER, nodes=1, devices_per_node=2)
    for batch in (1, 4):
        true = group.collective_seconds("all_reduce", "node", hidden.at(batch))
        assert clock.seconds(clock.all_reduce(2)(hidden), batch) == pytest.approx(true, rel=1e-3)
    assert waiting_seconds(graph, clock, 1) > 12 * group.collective_seconds("all_reduce", "node", hidden.at(1)) * 0.999


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_with_sequence_parallelism_tokens_are_gathered_and_scattered(name: str) -> None:
    local, _ = divided(name, 2)
    ours, shared = divided(name, 2, by_tokens=True)
    assert {n: p.shape for n, p in ours.parameters.items()} == {n: p.shape for n, p in local.parameters.items()}
    clock = Clock(CLUSTER, local_cluster(CLUSTER, 2, 1))
    graph = with_tensor_collectives(ours, shared, 2, clock)
    whole = 16 * 32 * 2  # bytes of a sample's activation: tokens, width, bf16
    group = replace(CLUSTER, nodes=1, devices_per_node=2)
    one = group.collective_seconds("all_gather", "node", 3 * whole)
    assert one == group.collective_seconds("reduce_scatter", "node", 3 * whole)
    for stage, before in zip(graph.blocks, local.blocks, strict=True):
        assert stage.recomputed is not None and before.recomputed is not None
        assert [waits(stage.plain.forward), waits(stage.plain.backward)] == [4, 4]
        assert waits(stage.recomputed.backward) == 4 + 3  # the second forward ends before the last product's scatter
        block = replace(graph, stages=(stage,))
        assert waiting_seconds(block, clock, 3) == pytest.approx(8 * one, rel=1e-3)
        assert stage.plain.forward_delta.per_sample < before.plain.forward_delta.per_sample
    second = graph.blocks[1].recomputed
    assert (
        second is not None and second.forward_delta.per_sample == whole // 2
    )  # its input: what it hands on is as large
    norm = next(name for name in ours.operators if name.endswith(("norm1", "input_layernorm")))
    assert ours.operators[norm].output_bytes.per_sample == whole // 2


def test_sequence_parallelism_that_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="16 tokens do not divide over 3 tensor-parallel ranks"):
        model = GPT(GPTConfig(96, 16, (2,), (48,), head_width=16))
        divide(model, 3, by_tokens=True)
        model(torch.zeros(1, 16, dtype=torch.long))
    with pytest.raises(UsageError, match="give --tensor too"):
        osdp.plan(source("gpt").build_on_meta(), source("gpt").inputs, "8xH100-80GB", sequence_parallel=True)


def test_a_tied_vocabulary_is_divided_once() -> None:
    whole, _ = divided("gpt", 1)
    local, _ = divided("gpt", 2)
    assert local.parameters["tokens.weight"].shape == (48, 32)
    assert local.parameters["tokens.weight"].aliases == whole.parameters["tokens.weight"].aliases


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_stages_have_every_operator_once_and_hold_what_is_in_flight(name: str) -> None:
    graph, _ = divided(name, 1)
    stages = [stage_graph(graph, 3, stage, 8, None) for stage in range(3)]
    assert [operator for stage in stages for operator in stage.operators] == [
        operator for stage in graph.stages for operator in stage.operators
    ]
    tied = sum(p.numel for p in graph.parameters.values() if p.aliases)  # the first and the last stage have it each
    assert sum(stage.num_parameters for stage in stages) == graph.num_parameters + tied
    for stage, held in zip(stages, (3, 2, 1), strict=True):
        (block,) = stage.blocks
        true = next(each for each in graph.blocks if each.name == block.name).plain
        assert block.plain.forward_delta.per_sample == held * true.forward_delta.per_sample
        gone = block.plain.forward_delta + block.plain.backward_delta
        assert gone == true.forward_delta + true.backward_delta  # backward frees what forward has saved


def test_a_pipelines_step_takes_the_time_of_more_micro_batches_than_it_has() -> None:
    plan = plan_inside(asked("llama", batching=Batching(2, 6)), 1, 2, stage=1)
    assert (plan.batch_size, plan.accumulation, plan.cluster.word, plan.global_batch) == (2, 6, "4xH100-80GB", 48)
    assert all(unit.reduce_once for unit in plan.units)
    local = local_cluster(CLUSTER, 1, 2)
    graph = stage_graph(divided("llama", 1)[0], 2, 1, 6, Clock(CLUSTER, local))
    rules = replace(asked("llama").rules, only_reduced_once=True)
    alone = plan_graph(graph, local, TRAINING, rules, batch=2, accumulation=7, search_seconds=1.0)
    assert plan.predicted.step_seconds == alone.predicted.step_seconds
    assert plan.predicted.samples_per_second == pytest.approx(48 / alone.predicted.step_seconds)
    assert plan.layout.bubble_seconds == pytest.approx(alone.predicted.step_seconds / 7)


def test_a_stage_is_timed_as_the_profile_timed_its_blocks_and_its_messages_come_on_top() -> None:
    graph, _ = divided("gpt", 1)
    timed = {each.plain.signature: TimedStage(each.plain.signature, each.name, (1, 8), (1.0, 8.0), (2.0, 16.0))
             for each in graph.stages}  # fmt: skip
    gathers = [Measured("all_gather", group, 1e-3, rate) for group, rate in (("node", 4e8), ("across", 5e7))]
    cluster = replace(Cluster.of("CPU", nodes=2, devices_per_node=2, measured=gathers), stages=tuple(timed.values()))
    hidden = graph.operators[graph.blocks[-1].operators[0]].output_bytes.at(4)
    for pipeline, at_once in ((2, 2), (4, 1)):  # ranks of a node that send to the next one
        local = local_cluster(cluster, 1, pipeline)
        assert local.stages == cluster.stages
        assert [each.group for each in local.measured] == (["node"] if pipeline == 2 else [])
        assert (local.node_link.bytes_per_second, local.node_link.latency_seconds) == (4e8, 1e-3)
        stage = stage_graph(blocks(4), pipeline, 0, 8, Clock(cluster, local))
        seconds = [compute_time(each.plain, local, TRAINING, backward=False).at(4) for each in stage.stages]
        assert seconds[:-1] == [4.0] * (len(seconds) - 1)
        assert seconds[-1] == pytest.approx(4.0 + 1e-3 + at_once * hidden / 1e8, rel=1e-4)
    divided_ranks = local_cluster(cluster, 2, 1)
    assert not divided_ranks.stages and [each.group for each in divided_ranks.measured] == ["across"]


def test_stages_take_one_micro_batch_and_fill_at_their_mean_pace() -> None:
    free = asked("gpt", capture=lambda ranks: (blocks(4), ()), batching=Batching(None, 8))
    together = plan_inside(free, 1, 4)
    assert together.accumulation == 8
    given = replace(free, batching=Batching(together.batch_size, 8))
    slowest, fastest = sorted((plan_inside(given, 1, 4, stage) for stage in (0, 3)), key=rate)
    assert rate(slowest) < rate(together) < rate(fastest)
    pace = (1 + rate(slowest) / rate(fastest)) / 2
    assert together.layout.bubble_seconds == pytest.approx(slowest.layout.bubble_seconds * pace)
    assert together.layout.stage == slowest.layout.stage
    saved = slowest.layout.bubble_seconds - together.layout.bubble_seconds
    assert together.predicted.step_seconds == pytest.approx(slowest.predicted.step_seconds - saved)
    assert rate(together) * together.predicted.step_seconds == pytest.approx(together.global_batch)


def rate(plan: Plan) -> float:
    return plan.predicted.samples_per_second


def blocks(count: int) -> ModelGraph:
    """The tiny GPT with so many of its block in place of its own."""
    graph, _ = divided("gpt", 1)
    first, *_ = [stage for stage in graph.stages if stage.is_block]
    at = graph.stages.index(first)
    outside = [stage for stage in graph.stages if not stage.is_block]
    return replace(graph, stages=(*outside[:at], *[first] * count, *outside[at:]))


def test_interleaved_stages_have_every_chunk_once_and_hold_what_their_schedule_has_in_flight() -> None:
    graph = blocks(8)
    stages = [stage_graph(graph, 2, stage, 6, None, 2) for stage in range(2)]
    assert [len(stage.blocks) for stage in stages] == [4, 4]
    assert [stage.stages[0].is_block for stage in stages] == [False, True]  # the embedding is in the first part
    assert [stage.stages[-1].is_block for stage in stages] == [True, False]  # and the head in the last
    (true, *_) = [each.plain for each in graph.stages if each.is_block]
    for stage, held in zip(stages, (2.5, 1.5), strict=True):
        assert {each.plain.forward_delta.per_sample for each in stage.blocks} == {
            round(held * true.forward_delta.per_sample)
        }
    assert (
        stages[1].stages[-1].plain == graph.stages[-1].plain
    )  # the head goes backward at once, micro-batch by micro-batch


@pytest.mark.parametrize("pipeline", [2, 4, 8])
@pytest.mark.parametrize("interleave", [2, 3])
@pytest.mark.parametrize("rounds", [1, 3])
def test_what_is_in_flight_is_counted_as_the_schedule_runs(pipeline: int, interleave: int, rounds: int) -> None:
    """By going through torch's own schedule: what every rank has begun and not yet ended, in chunks."""
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    micro_batches = pipeline * rounds
    for stage in range(pipeline):
        schedule = object.__new__(ScheduleInterleaved1F1B)
        values = {"n_local_stages": interleave, "pp_group_size": pipeline, "rank": stage}
        vars(schedule).update(values, _n_microbatches=micro_batches, number_of_rounds=rounds)
        vars(schedule).update(microbatches_per_round=pipeline, _num_stages=pipeline * interleave)
        begun = most = 0
        for action in schedule._calculate_single_rank_operations(stage):
            kind = "" if action is None else action.computation_type.name
            begun += (kind == "FORWARD") - (kind == "FULL_BACKWARD")
            most = max(most, begun)
        assert in_flight(pipeline, stage, micro_batches, interleave) * interleave == most


def test_an_interleaved_pipeline_waits_for_its_share_of_the_bubble() -> None:
    given = {"capture": lambda ranks: (blocks(8), ()), "batching": Batching(2, 8)}
    plain, interleaved = (plan_inside(asked("gpt", **given), 1, 4, 0, v) for v in (1, 2))
    assert str(interleaved.layout) == "tensor 1 × pipeline 4 in 2 chunks"
    for plan, idle in ((plain, 3), (interleaved, 2)):
        share = plan.layout.bubble_seconds / plan.predicted.step_seconds
        assert share == pytest.approx(idle / (plan.accumulation + idle))
    with pytest.raises(UsageError, match="is for 2 chunks of blocks on each stage"):
        find_mesh(nn.Linear(1, 1), interleaved, None)


def test_degrees_of_interleaving_that_do_not_go_are_refused() -> None:
    with pytest.raises(UsageError, match="a multiple of 2 micro-batches"):
        plan_inside(asked("gpt", capture=lambda ranks: (blocks(8), ()), batching=Batching(2, 5)), 1, 2, 0, 2)
    with pytest.raises(UsageError, match="too few for 4 stages, or chunks of stages"):
        plan_inside(asked("llama", batching=Batching(2, 6)), 1, 2, 0, 2)
    with pytest.raises(UsageError, match="give --pipeline too"):
        plan_inside(asked("llama"), 1, 1, None, 2)


def test_the_local_cluster_shares_the_nodes_network() -> None:
    local = local_cluster(CLUSTER, 2, 2)
    assert (local.nodes, local.devices_per_node) == (1, 2)
    assert local.slowest_factor == pytest.approx(CLUSTER.slowest_factor)
    assert local_cluster(CLUSTER, 4, 1).network.bytes_per_second == CLUSTER.network.bytes_per_second / 4
    for tensor, pipeline in ((3, 1), (8, 1), (1, 3)):
        with pytest.raises(UsageError, match="do not divide"):
            local_cluster(CLUSTER, tensor, pipeline)


def test_a_plan_file_says_its_layout_and_is_refused_where_it_cannot_run(tmp_path: Path) -> None:
    plan = plan_inside(asked("llama"), 2, 2)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert (plan.layout.tensor, plan.layout.pipeline, plan.layout.whole) == (2, 2, CLUSTER.word)
    with pytest.raises(UsageError, match=r"tensor 2 × pipeline 2, which only osdp\.parallelize\(model, plan, mesh="):
        check_alone(plan)


def test_the_layouts_are_shown_side_by_side_and_the_best_is_taken() -> None:
    tried = []
    best = plan_layouts(asked("llama"), tried=tried.append, tensors=(1, 2), pipelines=(1, 2, 3))
    page = layout_rows(tried)
    assert len(page.rows) == 6
    rates = [row.samples_per_second for row in page.rows]
    assert rates == sorted(rates, reverse=True) and rates[0] == best.predicted.samples_per_second
    assert all(row.reason for row in page.rows if row.ratio is None)
    assert "data parallelism alone" in page.verdict
