"""The benchmark against rivals measures what it says.

- every way to train has the loss curve of one process, with and without recompute
- the meter counts what the allocator's own account counts, and refuses what would pass its limit
- the ladder finds the largest batch that fits, and tries no batch that is sure not to
- the tables follow from the files alone
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

from benchmarks.rivals import data_parallel
from benchmarks.rivals.cells import Cell, cells
from benchmarks.rivals.job import FULL, HALF, NONE, Job, adamw, whole
from benchmarks.rivals.ladder import Attempt, best, climb
from benchmarks.rivals.layouts import Layout, train
from benchmarks.rivals.meter import environment
from benchmarks.rivals.models import SHAPES, batch_of, tiny
from benchmarks.rivals.results import claims, rows_of

ROOT = Path(__file__).parents[1]
SAMPLES, STEPS = 16, 3
WAYS: dict[str, Any] = {
    "DDP": (data_parallel.ddp, FULL, {"bucket_mb": 2}),
    "ZeRO-1": (data_parallel.zero1, NONE, {}),
    "ZeRO-2": (data_parallel.zero2, HALF, {"prefetch": True}),
    "FSDP2": (data_parallel.fsdp2, FULL, {}),
    "HSDP": (data_parallel.hsdp, NONE, {}),
    "TP": (partial(train, layout=Layout(1, 1, 4)), NONE, {}),
    "TP x DP": (partial(train, layout=Layout(1, 2, 2)), FULL, {"data": "free"}),
    "GPipe": (partial(train, layout=Layout(4, 1, 1, "GPipe")), NONE, {"micro_batches": 1}),
    "1F1B x FSDP2": (partial(train, layout=Layout(2, 2, 1, "1F1B")), FULL, {"data": "free", "micro_batches": 1}),
    "interleaved x ZeRO-2": (
        partial(train, layout=Layout(2, 2, 1, "interleaved")),
        NONE,
        {"data": "keep", "micro_batches": 1},
    ),
}


def curves(model: str, names: list[str]) -> dict[str, list[float] | None]:
    """Of each way, the losses that this rank knows."""
    warnings.filterwarnings("ignore")  # of torch's own, in several of the ways
    shape = tiny(SHAPES[model])
    found: dict[str, list[float] | None] = {}
    for name in names:
        build, recompute, switches = WAYS[name]
        trainer = build(Job(shape, 2, 2, 4, recompute, switches))
        share = SAMPLES // trainer.parts
        own = slice(trainer.part * share, (trainer.part + 1) * share)
        losses = [trainer.step(*(each[own] for each in batch_of(shape, SAMPLES, seed=s))) for s in range(STEPS)]
        found[name] = None if losses[0] is None else [loss.item() for loss in losses]
    return found


def single(model: str) -> list[float]:
    shape = tiny(SHAPES[model])
    net = whole(Job(shape, 1, 1, SAMPLES))
    optimizer, losses = adamw(net.parameters()), []
    for step in range(STEPS):
        loss = net(*batch_of(shape, SAMPLES, seed=step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("deep", list(WAYS)),
        ("encoder-decoder", ["FSDP2", "TP x DP"]),
        ("experts", ["HSDP", "TP x DP"]),
        ("lora", ["DDP", "TP"]),
        ("vit", ["ZeRO-1", "GPipe"]),
    ],
)
def test_every_way_has_the_loss_curve_of_one_process(model: str, names: list[str]) -> None:
    expected = single(model)
    assert expected[0] != expected[-1]
    ranks = run_ranks(4, curves, model, names)
    for name in names:
        known = [rank[name] for rank in ranks if rank[name] is not None]
        mean = [sum(losses) / len(losses) for losses in zip(*known, strict=True)]
        assert mean == pytest.approx(expected, abs=2e-5), name


METERED = """
import torch
from benchmarks.rivals.meter import Meter
from osdp.profiling.trial import peak_above_start

meter = Meter()
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 64))


def step():
    model(torch.ones(32, 256)).sum().backward()
    model.zero_grad()


step()
meter.begin()
counted = peak_above_start(step)
assert meter.peak_bytes == counted > 500_000, (meter.peak_bytes, counted)
assert meter.level_bytes == 0, meter.level_bytes
with meter.limited(counted):
    step()
with meter.limited(counted - 1):
    try:
        step()
    except RuntimeError as error:
        assert "can't allocate memory" in str(error)
    else:
        raise AssertionError("the limit was passed")
"""


def test_the_meter_counts_as_the_allocator_does_and_refuses_what_passes_its_limit() -> None:
    paths = f"{ROOT}:{ROOT / 'src'}"
    env = {**os.environ, **environment(), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", METERED], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("rungs", [False, True])
@pytest.mark.parametrize(
    ("constant", "each", "bend"), [(100, 7, 0), (100, 7, 40), (10, 300, 0), (100, 0, 0), (0, 3, -2)]
)
def test_the_ladder_finds_the_largest_batch_that_fits(constant: int, each: int, bend: int, rungs: bool) -> None:
    limit, most = 400, 64
    tried: list[int] = []

    def peak(batch: int) -> int:
        return constant + each * batch + (bend if batch > 8 else 0)

    def attempt(batch: int) -> Attempt:
        tried.append(batch)
        return Attempt(batch, batch, 1.0 + batch / 10, peak(batch))

    attempts = climb(attempt, limit_bytes=limit, most_samples=most, rungs=rungs)
    feasible = [batch for batch in range(1, most + 1) if peak(batch) <= limit]
    found = best(attempts, limit_bytes=limit)
    assert (found and found.batch) == (feasible[-1] if feasible else None)
    assert len(tried) == len(set(tried))
    assert sum(peak(batch) > limit for batch in tried) <= 2


def example(share: float) -> dict[str, Any]:
    cell = Cell("deep", 2, 2, "500mbit", share)
    figures = {"batch": 4, "samples": 16, "peak_bytes": 10, "recompute": "none", "switches": {}, "seconds": 9.0}
    return {
        "cell": cell.to_dict(),
        "limit_bytes": 100,
        "parameters": 1_000_000,
        "trained": 1_000_000,
        **{"date": "2026-11-18", "versions": {}, "machine": {}, "done": True},
        "rivals": {
            "compute alone": {**figures, "rounds": [0.1]},
            "osdp": {**figures, "rounds": [0.2, 0.1, 0.4]},
            "DDP": {"why": "does not fit", "peak_bytes": 300},
            "FSDP2": {**figures, "rounds": [0.4]},
            "TP": {**figures, "rounds": [0.3], "gradients": False},
        },
    }


def test_tables_follow_from_the_files() -> None:
    found = rows_of(example(0.45))
    rows = {row.rival: row for row in found.rows}
    assert rows["osdp"].rate == pytest.approx(80) and rows["osdp"].spread == pytest.approx(0.75)
    assert rows["FSDP2"].of_osdp == pytest.approx(0.5)
    assert rows["DDP"].rate is None and rows["DDP"].why == "does not fit"
    # 4 MB of gradients, once to and once fro, half of them over a link of 62.5 MB/s: 64 ms a step of 16 samples
    assert rows["FSDP2"].of_limit == pytest.approx(40 / min(160, 16 / 0.064))
    assert rows["TP"].of_limit == pytest.approx((16 / 0.3) / 160)
    assert found.best_rival is not None and found.best_rival.rival == "TP"
    factors = {claim.what: claim.value for claim in claims([found, rows_of(example(1.3))])}
    assert factors["against FSDP2 as it ships"] == pytest.approx(2.0)
    assert factors["against the best rival where DDP does not fit"] == pytest.approx(1.5)
    assert "against DDP where it fits" not in factors


def test_cells_are_distinct_and_cover_every_model_and_limit() -> None:
    every = list(cells())
    assert len({cell.name for cell in every}) == len(every)
    assert {(cell.model, cell.share) for cell in every} == {(model, share) for model in SHAPES for share in (0.45, 1.3)}
    assert {cell.hosts for cell in every} == {1, 2, 4} and math.prod((2, 4)) in {cell.ranks for cell in every}
