"""`osdp doctor` tells sound machines from others.

- Alone and on two real ranks every mode is exact, the planned memory is what a step allocates, and the report is whole.
- A gradient that is not averaged right, or memory that was not planned, fails a check: exit code 1 and a sentence.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from training_runs import Process

from osdp.cli.main import main
from osdp.doctor import exact
from osdp.doctor import run as doctor
from osdp.doctor.report import Check, MeasuredPeak, Report
from osdp.sharding import MODES

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")


def report_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_two_ranks_are_examined_and_the_report_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    process = Process((*TORCHRUN, "-m", "osdp", "doctor", "--quiet", "--json", "-o", str(path)))
    assert process.end() == 0, "".join(process.errors)
    report = report_of(path)
    assert json.loads("".join(process.lines)) == report
    assert report["ok"] and report["engine"] == "async-gloo" and report["backend"] == "gloo"
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert {"osdp", "torch", "python"} <= report["versions"].keys()
    names = {check["name"] for check in report["checks"]}
    assert {f"exact: {mode}" for mode in MODES} <= names
    assert {"exact: free, recomputed", "exact: free, in slices", "memory: free", "memory: replicate"} <= names
    assert all(check["ok"] for check in report["checks"])
    assert {(link["kind"], link["group"]) for link in report["links"]} == {
        (kind, "world") for kind in ("all_gather", "reduce_scatter", "all_reduce")
    }
    assert all(link["seconds"] > 0 for link in report["links"])
    by_mode = {peak["mode"]: peak for peak in report["peaks"]}
    assert by_mode["free"]["allocated_bytes"] < by_mode["replicate"]["allocated_bytes"]
    for peak in by_mode.values():
        assert peak["predicted_bytes"] == pytest.approx(peak["allocated_bytes"], rel=0.01)
        assert peak["reserved_bytes"] is None


def made_up(checks: Sequence[Check]) -> Report:
    peak = MeasuredPeak("free", 100, 90, None, 0)
    return Report({}, ({"rank": 0, "device": "cpu", "name": "CPU", "host": "here"},), "CPU", "async-gloo", "gloo", True,
                  (), (peak,), tuple(checks), ("a note",), 1.0)  # fmt: skip


@pytest.mark.parametrize("error", [0.2, float("inf"), float("nan")])
def test_a_check_that_fails_is_exit_code_1_and_a_sentence(
    error: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = made_up([Check("exact: keep", 0.0, 1e-4, "none"), Check("memory: free", error, 0.05, "leave room", "why")])
    monkeypatch.setattr(doctor, "examine", lambda wanted: (report, True))
    path = tmp_path / "report.json"
    assert main(["doctor", "-o", str(path)]) == 1
    said = capsys.readouterr()
    assert "osdp: error: 1 of 2 checks failed; memory: free is off by" in said.err
    assert "0.05 is allowed (why); leave room" in said.err and "FAILED" in said.out
    document = report_of(path)
    assert not document["ok"] and [check["ok"] for check in document["checks"]] == [True, False]


def test_alone_wrong_gradients_and_unplanned_memory_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parallelized model whose loss is 1 % larger, and steps that hold a tensor that nobody planned."""
    import torch

    import osdp
    from osdp.profiling.trial import Tried

    parallelize, step = osdp.parallelize, Tried.step

    def wrong(model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        found = parallelize(model, *args, **kwargs)
        found.register_forward_hook(lambda module, inputs, loss: loss * 1.01)
        return found

    def larger(tried: Tried) -> None:
        kept = torch.ones(1 << 20)
        step(tried)
        kept.zero_()

    monkeypatch.setattr(osdp, "parallelize", wrong)
    monkeypatch.setattr(Tried, "step", larger)
    path = tmp_path / "report.json"
    assert main(["doctor", "--quiet", "-o", str(path)]) == 1
    failed = {check["name"] for check in report_of(path)["checks"] if not check["ok"]}
    assert {"exact: replicate", "exact: free, recomputed", "memory: replicate"} <= failed
    monkeypatch.undo()
    assert exact.LIMIT == 1e-4


def test_ranks_that_share_an_accelerator_are_named() -> None:
    ranks = [{"rank": rank, "host": "a", "device": "cuda:0"} for rank in (0, 1)]
    found = doctor._same_device(ranks)
    assert found is not None and found.startswith("ranks 0 and 1 both use cuda:0 of a; start ranks with torchrun")
    assert doctor._same_device([{**rank, "device": "cpu"} for rank in ranks]) is None
    assert doctor._same_device([ranks[0], {**ranks[1], "host": "b"}]) is None
