"""Claims of the demonstration, `make demo`:

- Stock FSDP2 and plans train alike: the same loss at every step, and the peak is measured of each.
- The page computes medians without the first round, and says so when the plan is slower or exceeds the limit.
- Ranks that fail end the demonstration with their own words.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks as on_ranks

from examples.demo.page import page_of, verdict
from examples.demo.ranks import RanksFailed, run_ranks
from examples.demo.worker import trained
from osdp.cli.main import main
from osdp.planfile import Plan
from osdp.training.world import World

MODEL = "tiny_lm:build"


def _trained(fsdp: str, plan: str) -> dict[str, dict[str, Any]]:
    world = World(dist.get_rank(), 2, dist.get_rank(), 2, torch.device("cpu"), dist.HashStore())
    return trained(Namespace(model=MODEL, fsdp=fsdp, plan=plan, rounds=2, steps=2), world)


def test_stock_fsdp2_and_plans_train_alike(tmp_path: Path) -> None:
    options = ("--cluster", "2xCPU", "--precision", "fp32", "--global-batch", "8", "--no-split", "--quiet")
    files = {mode: str(tmp_path / f"{mode}.json") for mode in ("free", "keep")}
    for mode, file in files.items():
        assert main(["plan", MODEL, *options, "--no-recompute", "--modes", mode, "-o", file]) == 0
    found, other = on_ranks(2, _trained, files["free"], files["keep"])
    plain, free, keep = found.values()
    assert len(plain["losses"]) == 4 and plain["losses"][-1] < plain["losses"][0]
    for mode, way in {"free": free, "keep": keep}.items():
        assert way["losses"] == pytest.approx(plain["losses"], abs=1e-4)
        assert len(way["round_seconds"]) == 2 and min(way["round_seconds"]) > 0
        assert way["peak_bytes"] == pytest.approx(Plan.load(files[mode]).predicted.peak_bytes, rel=0.01)
    assert free["peak_bytes"] < keep["peak_bytes"] and other == found


def _measured(*round_seconds: float, peak: int = 10) -> dict[str, Any]:
    rounds = len(round_seconds)
    losses = [5.0 - step / 10 for step in range(2 * rounds)]
    return {"losses": losses, "round_seconds": list(round_seconds), "peak_bytes": peak}


def test_the_page_says_how_it_went(plan: Plan) -> None:
    plan = replace(plan, predicted=replace(plan.predicted, limit_bytes=100))

    def page(plain: dict[str, Any], planned: dict[str, Any]) -> Any:
        ways = {"plain FSDP2": plain, "FSDP, by osdp": plain, "the plan": planned}
        return page_of(plan, plan, ways, sample_tokens=16)

    faster = page(_measured(99.0, 3.0, 2.0, 4.0), _measured(99.0, 2.0, 2.0, 2.0))
    assert faster.gain == 1.5 and faster.gains == (1.0, 1.5, 2.0) and faster.steps == 8
    assert [row.step_seconds for row in faster.rows] == [3.0, 3.0, 2.0]
    assert faster.rows[2].tokens_per_second == plan.global_batch * 16 / 2.0
    assert faster.rows[0].last_loss == pytest.approx((4.4 + 4.3) / 2)
    assert "50 % faster" in verdict(faster) and "1.00× to 2.00×" in verdict(faster)
    assert "20 % slower" in verdict(page(_measured(9.0, 2.0), _measured(9.0, 2.5)))
    assert "exceeded by the plan (200 B)" in verdict(page(_measured(9.0, 3.0), _measured(9.0, 2.0, peak=200)))


def test_ranks_that_fail_end_it_with_their_own_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    with pytest.raises(RanksFailed, match=r"log failed on 2 ranks: .*No such file.*\(all of it: .*log\)"):
        run_ranks(2, "json.tool", str(tmp_path / "missing.json"), log=log)
    assert "missing.json" in capsys.readouterr().err and "ChildFailedError" in log.read_text()
