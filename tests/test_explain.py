"""Claims about `osdp explain` and `osdp diff`:

- An alternative's step and peak are those of a plan with that change, and of a proven plan none that fits is faster.
- The limit binds where the timeline comes close to it. More memory and network are never worth less than nothing.
- A difference names what was asked for, what is predicted and which units changed, those alike together.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from small_models import captured

from osdp.api import resolve
from osdp.cli.main import main
from osdp.cost.graph import step_graph_of
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.errors import UsageError
from osdp.planfile import Plan
from osdp.planning import plan_graph
from osdp.recompute import Recompute
from osdp.report.difference import UnitChange, plan_difference, print_difference
from osdp.report.explain_page import MOST_SHOWN, print_explanation
from osdp.report.explanation import Alternative, Explained, Explanation, bindings, explanation
from osdp.report.printing import console
from osdp.sharding import MODES


@cache
def made() -> Plan:
    cluster = replace(resolve("2x2xRTX-3090", "300KiB"), reserve_fraction=0.0)
    return plan_graph(captured("gpt"), cluster, Training.of(), Rules(), batch=2)


@cache
def of_block() -> Explanation:
    return explanation(made(), captured("gpt"), unit="blocks.1", prices=False)


def test_alternatives_of_a_proven_plan_are_slower_or_do_not_fit() -> None:
    plan = made()
    assert plan.certificate.status == "optimal"
    for unit in ("blocks.0", "blocks.1", plan.units[0].name):
        (found,) = explanation(plan, captured("gpt"), unit=unit, prices=False).explained
        assert found.chosen.step_seconds == pytest.approx(plan.predicted.step_seconds)
        assert found.chosen.peak_bytes == plan.predicted.peak_bytes
        fitting = [each for each in found.alternatives if each.fits]
        assert min(each.step_seconds for each in fitting) >= plan.predicted.step_seconds * (1 - 1e-9)
        assert {each.mode for each in found.alternatives} == set(MODES)


def test_an_alternative_is_the_plan_with_that_change() -> None:
    plan = made()
    (found,) = of_block().explained
    granularity = found.chosen.granularity
    now = [unit for unit in plan.units if unit.block == "blocks.1"]
    other = next(
        each
        for each in found.alternatives[1:]
        if each.granularity == granularity and each.recompute == now[0].recompute and each.mode != now[0].mode
    )
    change = {"mode": other.mode, "splits": 1, "sharded_splits": 0 if other.mode == "replicate" else 1}
    units = tuple(replace(unit, **change) if unit.block == "blocks.1" else unit for unit in plan.units)
    step = step_graph_of(replace(plan, units=units), captured("gpt"))
    assert other.step_seconds == pytest.approx(step.seconds)
    assert other.peak_bytes == step.timeline().peak_bytes


def test_the_limit_binds_where_memory_comes_close_to_it() -> None:
    step = step_graph_of(made(), captured("gpt"))
    peak = step.timeline().peak_bytes
    tight = list(bindings(step, peak))
    assert min(each.spare_bytes for each in tight) == 0
    assert step.timeline().peak.stage in {name for each in tight for name in each.stages}
    assert list(bindings(step, 2 * peak)) == []


def test_more_is_never_worth_less_than_nothing() -> None:
    found = explanation(made(), captured("gpt"))
    assert [price.gain >= -1e-9 for price in found.prices] == [True, True, True]
    assert found.prices[0].gain > 0  # the plan is squeezed
    assert sum(price.gain > 0 for price in found.prices[1:]) >= 1


def test_unknown_units_are_refused() -> None:
    with pytest.raises(UsageError, match=r"no unit 'blocks.77'; names look like 'blocks\.\d'"):
        explanation(made(), captured("gpt"), unit="blocks.77", prices=False)


def test_the_commands_print_and_refuse(tiny_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["explain", str(tiny_plan), "blocks.1", "--quiet"]) == 0
    out = capsys.readouterr().out
    assert "chosen" in out and "replicate" in out and max(map(len, out.splitlines())) <= 80
    assert main(["explain", str(tiny_plan), "nothing", "--quiet"]) == 2
    other = replace(Plan.load(tiny_plan), batch_size=3)
    path = tmp_path / "other.json"
    document = json.loads(tiny_plan.read_text())
    document["optimizer"] = "sgd"
    path.write_text(json.dumps(document))
    capsys.readouterr()
    assert main(["diff", str(tiny_plan), str(path)]) == 0
    out = capsys.readouterr().out
    assert "optimizer" in out and "sgd" in out
    assert main(["diff", str(tiny_plan), str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"] == [{"name": "optimizer", "before": "adamw", "after": "sgd"}] and not found["units"]
    assert other.batch_size == 3


def test_what_is_printed_is_readable_at_80_columns(plan: Plan) -> None:
    long = "bert.encoder.layer.0.attention.output"
    before = replace(plan, units=tuple(replace(unit, name=f"{long}.{unit.name}") for unit in plan.units))
    units = tuple(replace(unit, mode="keep_in_node", gather_once=True, prefetch=2) for unit in before.units)
    out = console(io.StringIO())
    out.width = 80
    print_difference(plan_difference(before, replace(before, units=units)), ("before", "after"), out)
    ways = [
        Alternative("keep_in_node", "operators", Recompute.SELECTIVE, 1, 1.0 + n / 100, 20 << 30, n % 2 == 0, n == 0, 2)
        for n in range(40)
    ]
    found = Explanation("m", "c", 1.0, 1.0, 1, 2, 1.0, (), (), (), (Explained("h.0", ("h.0",), tuple(ways)),))
    print_explanation(found, out)
    lines = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80
    assert any(long in line for line in lines) and any("after   keep_in_node" in line for line in lines)
    rows = [line for line in lines if line.startswith("  keep_in_node")]
    assert len(rows) == 1 + 2 * MOST_SHOWN and all("operators" in row and "selective" in row for row in rows)
    assert "  23 slower ones are in --json" in [line.rstrip() for line in lines]


def test_a_difference_has_units_that_change_alike_together(plan: Plan) -> None:
    units = [replace(unit, mode="keep") if unit.name.endswith(".mlp") else unit for unit in plan.units]
    faster = replace(plan.predicted, samples_per_second=64.0)
    found = plan_difference(plan, replace(plan, units=tuple(units), batch_size=6, predicted=faster))
    names = tuple(f"blocks.{n}.mlp" for n in range(3))
    held = "3 of 4 slices, recomputed"
    assert found.units == (UnitChange(names, f"free, {held}", f"keep, {held}", 100),)
    assert found.same_units == len(plan.units) - 3
    assert [each.name for each in found.settings] == ["micro-batch", "global batch"]
    assert (found.figures[0].before, found.figures[0].after) == (32.0, 64.0)
    assert plan_difference(plan, plan).runs_alike
    for change in ({"compiled": True}, {"loss_chunks": 8}):
        assert not plan_difference(plan, replace(plan, **change)).runs_alike
