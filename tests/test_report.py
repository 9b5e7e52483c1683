"""Claims: equal blocks are one row, whatever their order; figures and ratios are the plan's; pages fit 80 columns."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osdp.errors import DoesNotFit, Remedy
from osdp.planfile import Plan, PlanUnit
from osdp.recompute import Recompute
from osdp.report.catalogue import device_rows, model_rows
from osdp.report.graph_page import GraphPage, Tally, graph_page
from osdp.report.grouping import below, label_of
from osdp.report.numbers import format_count, format_flops, format_rate, format_seconds, format_share
from osdp.report.page import Part, RemedyRow, UnitRow, grouped, held_shares, misfit_page, plan_page
from osdp.report.printing import console
from osdp.report.terminal import print_devices, print_graph, print_misfit, print_models, print_plan
from osdp.report.unit_notes import unit_notes

GIB = 1024**3
MakeUnit = Callable[..., PlanUnit]


def test_the_page_says_what_was_assumed_and_what_is_not_trained(plan: Plan) -> None:
    more = {"assumptions": ("masks hide nothing",), "unused": ("a.w", "b.w", "c.w", "d.w"), "trained": 480}
    said, silent = io.StringIO(), io.StringIO()
    print_plan(plan_page(replace(plan, model=replace(plan.model, **more))), console(said))
    print_plan(plan_page(plan), console(silent))
    text = " ".join(said.getvalue().split())
    assert "480 of them trained" in text
    assert "assumed in tracing: masks hide nothing" in text
    assert "the loss does not depend on a.w, b.w, c.w and 1 more: stored, and not trained" in text
    assert not any(words in silent.getvalue() for words in ("trained", "assumed", "depend"))


# ---- grouping


def test_blocks_with_the_same_choices_are_one_group_with_its_units(plan: Plan) -> None:
    embed, first, last = grouped(plan.units)
    assert (embed.names, embed.is_block) == (("embed",), False)
    assert first.names == ("blocks.0", "blocks.1", "blocks.2")
    assert first.recompute
    assert first.units == (UnitRow("", "free", 1, 1, False, False, 20), UnitRow("mlp", "free", 4, 3, False, False, 100))
    assert first.parameters == 120
    assert (last.names, last.recompute) == (("blocks.3",), Recompute.NONE)
    assert last.units == (UnitRow("", "replicate", 1, 1, False, False, 120),)


@pytest.mark.parametrize(
    "change",
    [
        {"mode": "keep"},
        {"splits": 2},
        {"recompute": Recompute.FULL},
        {"reduce_once": True},
        {"two_levels": True},
        {"parameters": 101},
    ],
    ids=lambda change: next(iter(change)),
)
def test_any_difference_separates_blocks(unit: MakeUnit, change: dict[str, object]) -> None:
    alike = (unit("h.0", block="h.0"), unit("h.1", block="h.1"))
    assert [group.names for group in grouped(alike)] == [("h.0", "h.1")]
    different = (unit("h.0", block="h.0"), unit("h.1", block="h.1", **change))
    assert [group.names for group in grouped(different)] == [("h.0",), ("h.1",)]


def test_alternating_blocks_are_two_groups(unit: MakeUnit) -> None:
    units = tuple(unit(f"h.{i}", block=f"h.{i}", mode="keep" if i % 2 else "free") for i in range(6))
    assert [group.names for group in grouped(units)] == [("h.0", "h.2", "h.4"), ("h.1", "h.3", "h.5")]


def test_lists_of_blocks_and_units_outside_blocks_stay_apart(unit: MakeUnit) -> None:
    blocks = tuple(unit(name, block=name) for name in ("encoder.0", "encoder.1", "decoder.0"))
    outside = (unit("in.0"), unit("in.1"))
    names = [group.names for group in grouped((*outside, *blocks))]
    assert names == [("in.0",), ("in.1",), ("encoder.0", "encoder.1"), ("decoder.0",)]


@given(st.lists(st.sampled_from(["free", "keep", "replicate"]), min_size=1, max_size=12))
def test_grouping_loses_and_invents_nothing(modes: list[str]) -> None:
    units = tuple(
        PlanUnit(f"h.{i}", (f"h.{i}",), f"h.{i}", mode, 1, 1, False, False, False, 100) for i, mode in enumerate(modes)
    )
    groups = grouped(units)
    assert len(groups) == len(set(modes))
    assert {name: group.units[0].mode for group in groups for name in group.names} == {
        f"h.{i}": mode for i, mode in enumerate(modes)
    }


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (["h.3"], "h.3"),
        (["h.0", "h.1"], "h.0, h.1 (2)"),
        ([f"h.{i}" for i in range(47)], "h.0 … h.46 (47)"),
        ([f"h.{i}" for i in range(46, -1, -1)], "h.46 … h.0 (47)"),
        (["h.0", "h.1", "h.2", "h.7", "h.9", "h.10", "h.11"], "h.0 … h.2, h.7, h.9 … h.11 (7)"),
        (["a.0", "a.1", "a.2", "b.3", "b.4"], "a.0 … a.2, b.3, b.4 (5)"),
        (["start", "end"], "start, end (2)"),
    ],
)
def test_labels(names: list[str], label: str) -> None:
    assert label_of(names) == label


def test_names_below_a_parent() -> None:
    assert below("h.1.mlp", "h.1") == "mlp"
    assert below("h.1", "h.1") == ""
    assert below("h.11.mlp", "h.1") == "h.11.mlp"
    assert below("mlp", "") == "mlp"


# ---- the values of the pages


def test_the_page_has_the_plans_figures(plan: Plan) -> None:
    page = plan_page(plan)
    assert (page.batch_size, page.accumulation, page.world_size, page.global_batch) == (3, 2, 8, 48)
    assert (page.samples_per_second, page.tokens_per_second) == (32.0, 32.0 * 128)
    assert page.memory.share == 0.75
    assert page.memory.parts == (
        Part("saved activations", 20 * GIB, pytest.approx(2 / 3)),
        Part("parameters", 10 * GIB, pytest.approx(1 / 3)),
    )
    assert page.time_parts[0] == Part("compute", 1.2, pytest.approx(0.8))
    assert page.certificate == plan.certificate


def test_without_a_length_there_are_no_tokens(plan: Plan) -> None:
    assert plan_page(replace(plan, model=replace(plan.model, seq_len=None))).tokens_per_second is None


def test_baselines_are_compared_as_plan_over_baseline(plan: Plan) -> None:
    infeasible, feasible = plan_page(plan).baselines
    assert infeasible.ratio is None
    assert feasible.ratio == pytest.approx(32 / 20)


def test_a_partly_sharded_unit_counts_for_both_modes(unit: MakeUnit) -> None:
    units = (unit("a", splits=4, sharded_splits=1), unit("b", mode="replicate", splits=2, sharded_splits=2))
    assert held_shares(units) == (Part("replicate", 175, 0.875), Part("free", 25, 0.125))


def _misfit() -> DoesNotFit:
    return DoesNotFit(
        "smallest peak 50.0 GiB exceeds 40.0 GiB",
        peak_bytes=50 * GIB,
        limit_bytes=40 * GIB,
        peak_at="blocks.0 in backward",
        memory_parts={"parameters": 45 * GIB, "temporaries": 5 * GIB},
        remedies=(
            Remedy("recompute", 45 * GIB),
            Remedy("16 devices", 40 * GIB),
            Remedy("short", 39 * GIB, estimate=True),
        ),
    )


def test_remedies_say_what_they_save_and_whether_they_suffice() -> None:
    page = misfit_page(_misfit())
    assert page.excess_bytes == 10 * GIB
    assert page.remedies == (
        RemedyRow("short", 39 * GIB, 11 * GIB, True, estimate=True),
        RemedyRow("16 devices", 40 * GIB, 10 * GIB, True),
        RemedyRow("recompute", 45 * GIB, 5 * GIB, False),
    )


@dataclass(frozen=True)
class Node:
    kind: str
    phase: str
    stage: str
    group: str | None = None
    nbytes: int = 0
    flops: int = 0
    seconds: float = 0.0


def _graph() -> GraphPage:
    nodes = []
    for i in range(4):
        nodes.append(Node("all_gather", "forward", f"h.{i}", "world", nbytes=10, seconds=1.0))
        nodes.append(Node("compute", "forward", f"h.{i}", flops=5, seconds=2.0))
    for i in range(3, -1, -1):
        nodes.append(Node("compute", "backward", f"h.{i}", flops=10, seconds=4.0))
        nodes.append(Node("reduce_scatter", "backward", f"h.{i}", "world" if i else "node", nbytes=20, seconds=2.0))
    return graph_page(nodes)


def test_equal_stages_of_the_graph_are_one_row() -> None:
    page = _graph()
    assert [(row.phase, row.stages) for row in page.stages] == [
        ("forward", ("h.0", "h.1", "h.2", "h.3")),
        ("backward", ("h.3", "h.2", "h.1")),
        ("backward", ("h.0",)),
    ]
    assert page.stages[0].tallies == (
        Tally("all_gather", "world", 1, 10, 0, 1.0),
        Tally("compute", None, 1, 0, 5, 2.0),
    )


@pytest.mark.parametrize("change", [{"nbytes": 11}, {"flops": 1}, {"kind": "all_reduce"}, {"group": "node"}])
def test_any_difference_separates_stages_of_the_graph(change: dict[str, Any]) -> None:
    first = Node("all_gather", "forward", "h.0", "world", nbytes=10)
    assert [row.stages for row in graph_page([first, replace(first, stage="h.1")]).stages] == [("h.0", "h.1")]
    rows = graph_page([first, replace(first, stage="h.1", **change)]).stages
    assert [row.stages for row in rows] == [("h.0",), ("h.1",)]


def test_totals_of_the_graph_are_by_collective_and_group() -> None:
    page = _graph()
    assert page.nodes == 16
    assert page.totals == (
        Tally("all_gather", "world", 4, 40, 0, 4.0),
        Tally("compute", None, 8, 0, 60, 24.0),
        Tally("reduce_scatter", "world", 3, 60, 0, 6.0),
        Tally("reduce_scatter", "node", 1, 20, 0, 2.0),
    )


# ---- numbers


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (format_count(2_522_224_640), "2.52 B"),
        (format_count(999_999), "1.00 M"),
        (format_count(64), "64"),
        (format_flops(1.214e12), "1.21 TFLOP"),
        (format_rate(34.14), "34.1"),
        (format_rate(999.7), "1,000"),
        (format_rate(4096), "4,096"),
        (format_rate(0.05123), "0.0512"),
        (format_rate(9.996), "10.0"),
        (format_rate(0), "0"),
        (format_seconds(1.239), "1.24 s"),
        (format_seconds(0.9999), "1.00 s"),
        (format_seconds(0.0812), "81.2 ms"),
        (format_seconds(35e-6), "35.0 µs"),
        (format_share(0.001), "<1 %"),
        (format_share(0.714), "71 %"),
    ],
)
def test_numbers_have_three_digits(text: str, want: str) -> None:
    assert text == want


# ---- printing


def _printed(show: Callable[..., None], page: object) -> str:
    out = console(io.StringIO())
    out.width = 80
    show(page, out)
    return out.file.getvalue()  # type: ignore[attr-defined]


def _long(plan: Plan) -> Plan:
    """The same plan with the longest names that are met in practice."""
    deep = "base_model.model.language_model.decoder.transformer.layers"
    units = [
        replace(each, name=each.name.replace("blocks", deep), block=each.block and each.block.replace("blocks", deep))
        for each in plan.units
    ]
    return replace(plan, units=tuple(units), model=replace(plan.model, name="./a/path/that/is/long/" * 5))


def test_every_page_fits_80_columns_without_colour(plan: Plan) -> None:
    pages = [
        _printed(print_plan, plan_page(plan)),
        _printed(print_plan, plan_page(_long(plan))),
        _printed(print_misfit, misfit_page(_misfit())),
        _printed(print_graph, _graph()),
        _printed(print_models, model_rows()),
        _printed(print_devices, device_rows()),
    ]
    for page in pages:
        assert max(len(line) for line in page.splitlines()) <= 80
        assert "\x1b" not in page


def test_the_plans_page_says_what_matters(plan: Plan) -> None:
    words = " ".join(_printed(print_plan, plan_page(plan)).split())
    for text in (
        "32.0 samples/s 4,096 tokens/s",
        "micro-batch 3 × accumulation 2 × 8 devices = global batch 48",
        "30.0 GiB of 40.0 GiB (75 %)",
        "peak at blocks.2.mlp in backward",
        "blocks.0 … blocks.2 (3) full 120 each",
        "mlp free 4, 1 replicate",
        "data parallel – – does not fit",
        "1.60×",
        "no plan of the searched space exceeds 32.0 samples/s (gap 0.00 %)",
    ):
        assert text in words


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"reduce_once": True}, "gradients reduced once a step, by the last micro-batch: embed"),
        ({"gather_once": True}, "gathered once a step, by the first micro-batch, and freed by the last: embed"),
        ({"prefetch": 2}, "prefetch of two units instead of one: embed"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_what_a_unit_does_beyond_its_mode_is_a_sentence_with_its_name(
    plan: Plan, change: dict[str, Any], sentence: str
) -> None:
    changed = replace(plan, units=tuple(replace(u, **change) if u.name == "embed" else u for u in plan.units))
    assert sentence in unit_notes(plan_page(changed))
    assert sentence in " ".join(_printed(print_plan, plan_page(changed)).split())
    every = replace(plan, units=tuple(replace(unit, **change) for unit in plan.units))
    assert sentence.replace("embed", "all units") in unit_notes(plan_page(every))
    inside = replace(plan, units=tuple(replace(u, **change) if u.name == "blocks.0.mlp" else u for u in plan.units))
    assert sentence.replace("embed", "mlp of blocks.0") in unit_notes(plan_page(inside))


def test_a_search_that_its_time_limit_ended_says_so(plan: Plan) -> None:
    late = replace(plan, certificate=replace(plan.certificate, status="time limit", batches_searched=0))
    words = " ".join(_printed(print_plan, plan_page(late)).split())
    assert "the search ended at its time limit no batch size searched beyond its bounds" in words
    assert "time limit" not in _printed(print_plan, plan_page(plan))


def test_names_are_printed_as_they_are(plan: Plan) -> None:
    name = "[red]x[/red] :smile:"
    odd = replace(plan, model=replace(plan.model, name=name), units=(replace(plan.units[0], name=name),))
    assert _printed(print_plan, plan_page(odd)).count(name) == 2


def test_every_preset_and_device_is_listed_whole() -> None:
    models, devices = _printed(print_models, model_rows()), _printed(print_devices, device_rows())
    assert all(row.name in models for row in model_rows())
    assert all(row.name in devices for row in device_rows())
