"""Claims about plans inside a larger layout, as they are priced.

- A tensor-parallel rank holds what DTensor gives it; two all-reduces a block in forward, two in backward, and forward's
  again, but for the block's last, where it is recomputed; each takes the seconds of its collective.
- The stages of a pipeline have every operator once, hold the activations of as many micro-batches as are in flight, and
  a step of m micro-batches takes the time of m + p - 1.
- A plan file says its layout; what cannot run it refuses it with a sentence; degrees that do not divide are refused.
- `--layout auto` shows every layout, the best first, and takes the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from small_models import source

from osdp.api import plan_graph
from osdp.batching import Batching
from osdp.cli.main import main
from osdp.cluster import Cluster
from osdp.cost.outer import Clock, local_cluster, stage_graph, waiting_seconds, with_tensor_collectives
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.errors import UsageError
from osdp.layouts import Asked, plan_inside, plan_layouts
from osdp.model.capture import capture
from osdp.model.graph import ModelGraph, Segment, TensorOperator
from osdp.model.kernels import KernelKind
from osdp.model.tensor_parallel import divide
from osdp.plan_check import check_alone
from osdp.planfile import Plan
from osdp.report.layouts_page import layout_rows

CLUSTER = Cluster.parse("2x4xH100-80GB")
TRAINING = Training.of("bf16", "adamw", None)


@cache
def divided(name: str, ranks: int) -> tuple[ModelGraph, tuple[TensorOperator, ...]]:
    model = source(name).build_on_meta()
    shared = divide(model, ranks) if ranks > 1 else ()
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
    for stage, in_flight in zip(stages, (3, 2, 1), strict=True):
        (block,) = stage.blocks
        true = next(each for each in graph.blocks if each.name == block.name).plain
        assert block.plain.forward_delta.per_sample == in_flight * true.forward_delta.per_sample
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


def test_experts_of_a_dimension_of_their_own_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt-48x1024", "--cluster", "4xL4", "--expert", "2"]) == 2
    assert "--expert 2: experts over a mesh dimension of their own are not planned" in capsys.readouterr().err
