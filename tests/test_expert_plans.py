"""Claims about plans with experts over a mesh dimension of their own, as they are priced.

- A rank has its part of the experts and all of the rest, and computes as much a sample as for the whole model; two
  all-to-alls a block in forward, two in backward, and forward's again where it is recomputed, each with its seconds.
- A unit of experts is a unit at every granularity, and its collectives go to the ranks with the same experts.
- A plan file says its experts; what cannot run it refuses it; what does not divide or go together is refused.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from architectures import tiny
from rich.console import Console

import osdp
from osdp.cli.main import main
from osdp.cluster import Cluster
from osdp.cost.outer import Clock, waiting_seconds, with_expert_collectives
from osdp.cost.units import modes_for, stage_units, with_same_experts
from osdp.errors import UsageError
from osdp.experts import local_experts
from osdp.model.capture import capture
from osdp.model.graph import ModelGraph, Segment
from osdp.model.kernels import KernelKind
from osdp.plan_check import check_alone
from osdp.planfile import GRANULARITIES, Plan
from osdp.report.layouts_page import layout_rows
from osdp.report.page import plan_page
from osdp.report.terminal import layout_sentence, print_plan
from osdp.sharding import FREE, FREE_IN_NODE, KEEP, REPLICATE

CLUSTER = Cluster.parse("2x4xH100-80GB")


@cache
def captured(ranks: int) -> tuple[ModelGraph, Mapping[str, int]]:
    model = tiny("mixtral")
    local = model.build_on_meta()
    chosen = local_experts(local, ranks) if ranks > 1 else dict[str, int]
    graph = capture(local, model.inputs, loss=model.loss, name="mixtral", compute_dtype="bf16", device=CLUSTER.device)
    return graph, chosen()


@cache
def planned(ranks: int = 2, world: str = "2x4xH100-80GB") -> Plan:
    model = tiny("mixtral")
    asked: dict[str, Any] = {"batch": 2, "expert": ranks, "split": False, "recompute": "none"}
    return osdp.plan(model.build_on_meta(), model.inputs, world, loss=model.loss, **asked)


def waits(segments: tuple[Segment, ...]) -> int:
    return sum(int((segment.kinds == KernelKind.COLLECTIVE).sum()) for segment in segments)


def test_a_rank_has_its_part_of_the_experts_and_waits_for_tokens() -> None:
    whole, _ = captured(1)
    local, chosen = captured(2)
    assert chosen == {f"model.layers.{index}.mlp.experts": 2 for index in range(2)}
    divided = {name for each in chosen for name in whole.operators[each].parameters}
    for name, parameter in local.parameters.items():
        assert parameter.numel * (2 if name in divided else 1) == whole.parameters[name].numel, name
    assert local.flops_at(4) == pytest.approx(whole.flops_at(4), rel=0.01)  # half the experts see twice the tokens
    clock = Clock(CLUSTER, CLUSTER)
    graph = with_expert_collectives(local, chosen, 2, clock)
    for stage in graph.blocks:
        assert stage.recomputed is not None and stage.selective is None
        assert [waits(stage.plain.forward), waits(stage.plain.backward), waits(stage.recomputed.backward)] == [1, 1, 2]
    hidden = local.operators["model.layers.0.mlp.experts"].output_bytes
    group = replace(CLUSTER, nodes=1, devices_per_node=2)
    for batch in (1, 4):
        each = group.collective_seconds("all_gather", "node", 2 * hidden.at(batch))  # two experts a token
        assert waiting_seconds(graph, clock, batch) == pytest.approx(2 * 2 * 2 * each, rel=1e-3)


def test_experts_are_units_and_go_to_the_ranks_that_hold_the_same() -> None:
    local, chosen = captured(2)
    graph = with_expert_collectives(local, chosen, 2, Clock(CLUSTER, CLUSTER))
    (stage, *_) = graph.blocks
    found = stage_units(graph, stage)
    assert set(found) <= set(GRANULARITIES) and len(found["whole"]) == 2
    for units in found.values():
        (own,) = [unit for unit in units if unit.experts > 1]
        assert own.name == "model.layers.0.mlp.experts" and own.split_dim == -1
        others = own.held_by(CLUSTER)
        assert (others.nodes, others.devices_per_node) == (2, 2)
        assert others.network.bytes_per_second == CLUSTER.network.bytes_per_second / 2
        assert own.sizes(FREE_IN_NODE, others).held * 2 == own.numel
    assert all(unit.held_by(CLUSTER) is CLUSTER for unit in found["whole"] if unit.experts == 1)
    assert modes_for(with_same_experts(Cluster.parse("4xH100-80GB"), 4)) == (REPLICATE,)
    assert modes_for(with_same_experts(CLUSTER, 4)) == (REPLICATE, KEEP, FREE)


def test_a_plan_file_says_its_experts_and_is_refused_where_it_cannot_run(tmp_path: Path) -> None:
    plan = planned()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert (plan.layout.expert, plan.cluster.word, plan.global_batch) == (2, "2x4xH100-80GB", 16)
    assert sum(unit.experts for unit in plan.units) == 2
    assert plan.layout.tensor_seconds > 0 and plan.baselines
    with pytest.raises(UsageError, match=r"experts over 2, which only osdp\.parallelize\(model, plan, mesh="):
        check_alone(plan)
    whole = [replace(unit, experts=False) for unit in plan.units]
    with pytest.raises(UsageError, match="has experts over 2 ranks, and its units say otherwise"):
        Plan.from_dict(replace(plan, units=tuple(whole)).to_dict())


def test_the_page_says_who_shares_the_experts() -> None:
    page = plan_page(planned())
    assert "data 8, of which 2 share the experts" in layout_sentence(page)
    assert "all-to-alls of the experts" in layout_sentence(page)
    out = io.StringIO()
    print_plan(page, Console(file=out, width=160))
    assert "mlp.experts" in out.getvalue()


def test_a_node_whose_ranks_all_have_other_experts_holds_them_whole() -> None:
    plan = planned(4, "4xH100-80GB")
    assert {unit.mode for unit in plan.units if unit.experts} == {REPLICATE}


def test_a_stage_of_a_pipeline_has_its_experts_over_its_own_ranks() -> None:
    model = tiny("mixtral")
    asked: dict[str, Any] = {"batch": 1, "accumulation": 4, "pipeline": 2, "stage": 1, "split": False}
    plan = osdp.plan(model.build_on_meta(), model.inputs, CLUSTER, loss=model.loss, expert=2, **asked)
    assert (plan.cluster.word, str(plan.layout)) == ("4xH100-80GB", "tensor 1 × pipeline 2, experts over 2")
    assert [unit.name for unit in plan.units if unit.experts] == ["model.layers.1.mlp.experts"]
    assert all(unit.reduce_once for unit in plan.units)
    alone = osdp.plan(model.build_on_meta(), model.inputs, CLUSTER, loss=model.loss, **asked)
    messages = alone.layout.tensor_seconds
    assert plan.layout.tensor_seconds > messages > 0


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"expert": 3}, "experts over 3 ranks do not divide the 4 data-parallel devices of a node"),
        ({"cluster": "8xH100-80GB", "expert": 8}, "the 4 experts of model.layers.0.mlp.experts do not divide over 8"),
        ({"expert": 2, "tensor": 2}, "2 tensor-parallel ranks and experts over 2 ranks do not go together"),
        ({"expert": 2, "compiled": True}, "blocks with experts over 2 ranks are not compiled"),
        ({"expert": 2, "verify": True}, "dry-runs no plan with a tensor, pipeline or expert dimension"),
        ({"expert": 2, "layout": "auto"}, "expert 2 with layout auto do not go together"),
    ],
)
def test_what_does_not_divide_or_go_together_is_refused(asked: dict[str, Any], said: str) -> None:
    model = tiny("mixtral")
    given: dict[str, Any] = {"cluster": CLUSTER, "loss": model.loss, "batch": 2, **asked}
    with pytest.raises(UsageError, match=said):
        osdp.plan(model.build_on_meta(), model.inputs, **given)


def test_a_model_without_experts_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt-96x1024", "--cluster", "4xL4", "--expert", "2", "--quiet"]) == 2
    assert "GPT has no experts: no module with a num_experts" in capsys.readouterr().err


def test_layouts_with_experts_are_tried_where_a_model_has_them() -> None:
    model, tried = tiny("mixtral"), []
    best = osdp.plan(
        *(model.build_on_meta(), model.inputs, "4xH100-80GB"),
        **{"loss": model.loss, "global_batch": 16, "layout": "auto", "on_layout": tried.append, "recompute": "none"},
    )
    page = layout_rows(tried)
    fits = [row for row in page.rows if row.ratio is not None]
    assert {row.expert for row in fits} == {1, 2, 4}
    assert max(row.samples_per_second for row in fits) == best.predicted.samples_per_second
    (eight, *_) = [row for row in page.rows if row.expert == 8]
    assert eight.name == "tensor 1 × pipeline 1, experts over 8" and "do not divide" in eight.reason
