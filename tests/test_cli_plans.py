"""Claim: `osdp plan` and `osdp graph` print, save and refuse what they should, on real models."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from osdp.cli import plan as plan_command
from osdp.cli.main import main
from osdp.errors import DoesNotFit, Remedy
from osdp.planfile import PLAN_VERSION, Plan

HEAVY = ("torch", "highspy", "transformers", "rich", "numpy")
TINY = ("plan", "gpt-tiny", "--cluster", "4xRTX-TITAN")


# ---- planning, really


def test_a_plan_is_printed_saved_and_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main([*TINY, "--seq-len", "32", "-o", str(path), "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    plan = Plan.load(path)
    assert (plan.model.name, plan.model.seq_len, plan.model.parameters) == ("gpt-tiny", 32, 867_072)
    assert "gpt-tiny on 4xRTX-TITAN" in out
    assert f"global batch {plan.global_batch}" in out
    assert max(len(line) for line in out.splitlines() if not line.startswith("saved to")) <= 80
    assert os.listdir(tmp_path) == ["plan.json"]


def test_json_is_one_document_that_is_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    arguments = ("--global-batch", "64", "--modes", "keep,free", "--pin", "blocks.1*=keep", "--no-split")
    assert main([*TINY, *arguments, "--no-recompute", "--json", "-o", str(path)]) == 0
    out, err = capsys.readouterr()
    plan = Plan.from_dict(json.loads(out))
    assert plan == Plan.load(path)
    assert plan.global_batch == 64
    assert {unit.mode for unit in plan.units} <= {"keep", "free"}
    assert {unit.mode for unit in plan.units if unit.name.startswith("blocks.1")} == {"keep"}
    assert not any(unit.recompute or unit.splits > 1 for unit in plan.units)
    assert "tracing the model" in err


def test_the_options_reach_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--batch", "2", "--precision", "pure-bf16", "--optimizer", "sgd", "--memory", "3GiB")
    assert main([*TINY, *options, "--json", "--quiet"]) == 0
    plan = Plan.from_dict(json.loads(capsys.readouterr().out))
    assert (plan.batch_size, plan.precision, plan.reduce_dtype, plan.optimizer) == (2, "pure-bf16", "bf16", "sgd")
    assert plan.cluster.memory_bytes == 3 * 1024**3


def test_a_pin_that_matches_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--pin", "no.such.module=keep", "--quiet"]) == 2
    assert "no.such.module" in capsys.readouterr().err


def test_what_does_not_fit_says_why_and_what_would_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--memory", "4MiB", "--offload", "none", "--quiet"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert "No plan fits" in err
    assert "What would help" in err
    assert max(len(line) for line in err.splitlines()) <= 80


def test_what_does_not_fit_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--memory", "4MiB", "--offload", "none", "--quiet", "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    error = document["error"]
    assert document["version"] == PLAN_VERSION
    assert error["peak_bytes"] > error["limit_bytes"] > 0
    assert sum(error["memory_parts"].values()) == error["peak_bytes"]
    assert error["peak_at"]
    assert all(set(remedy) == {"change", "peak_bytes", "estimate"} for remedy in error["remedies"])


def test_the_json_of_a_misfit_has_every_field() -> None:
    remedies = (Remedy("recompute", 3),)
    error = DoesNotFit("no", peak_bytes=5, limit_bytes=4, peak_at="a", memory_parts={"x": 5}, remedies=remedies)
    assert plan_command.misfit_dict(error) == {
        **{"message": "no", "peak_bytes": 5, "limit_bytes": 4, "peak_at": "a", "memory_parts": {"x": 5}},
        "remedies": [{"change": "recompute", "peak_bytes": 3, "estimate": False}],
    }


# ---- the graph


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graph") / "plan.json"
    assert main([*TINY, "--modes", "free", "--quiet", "-o", str(path)]) == 0
    return path


def test_the_graph_gathers_and_reduces_what_the_plan_says(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "graph.json"
    assert main(["graph", str(plan_file), "--json", "-o", str(path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(path.read_text())
    nodes = document["nodes"]
    plan = Plan.load(plan_file)
    gathers = [node for node in nodes if node["kind"] == "all_gather" and node["phase"] == "forward"]
    assert len(gathers) == sum(unit.splits for unit in plan.units)
    identities = [node["id"] for node in nodes]
    assert all(set(node["depends"]) <= set(identities[:place]) for place, node in enumerate(nodes))


def test_the_graph_is_printed_with_equal_blocks_together(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", str(plan_file)]) == 0
    out = capsys.readouterr().out
    assert "Forward" in out
    assert "Whole step" in out
    assert "reduce_scatter" in out
    assert max(len(line) for line in out.splitlines()) <= 80


def test_a_plan_of_another_model_is_refused(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", str(plan_file), "--model", "gpt-small-27m"]) == 2
    assert "27,448,320 parameters, the plan is for 867,072" in capsys.readouterr().err


def test_a_plan_whose_model_is_not_found_says_what_to_give(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan.save(tmp_path / "plan.json")
    assert main(["graph", str(tmp_path / "plan.json")]) == 2
    assert "made for 'toy', give its path with --model" in capsys.readouterr().err
