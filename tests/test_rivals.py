"""The benchmark against rivals measures what it says.

- every way to train has the loss curve of one process, with and without recompute
- the meter counts what the allocator's own account counts, and refuses what would pass its limit
- the ladder finds the largest batch that fits, and tries no batch that is sure not to
- the tables follow from the files alone
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from selection import one_in

from benchmarks.rivals import data_parallel
from benchmarks.rivals.cells import SHARES, Setting, settings
from benchmarks.rivals.job import FULL, HALF, NONE, SELECTIVE, Job, adamw, whole
from benchmarks.rivals.ladder import Attempt, largest_batch
from benchmarks.rivals.layouts import Layout, train
from benchmarks.rivals.log import Log
from benchmarks.rivals.meter import environment
from benchmarks.rivals.models import SHAPES, batch_of, source_of, tiny
from benchmarks.rivals.planned import OPTIMIZER, planned_stage
from benchmarks.rivals.results import claims, rows_of
from osdp.recompute import Recompute

ROOT = Path(__file__).parents[1]
SAMPLES, STEPS = 16, 3
BATCHES = {"osdp, 2 stages": 2, "osdp, 4 stages": 2}  # of a micro-batch
WAYS: dict[str, Any] = {
    "DDP": (data_parallel.ddp, FULL, {"bucket_mb": 2}),
    "ZeRO-1": (data_parallel.zero1, NONE, {}),
    "ZeRO-2": (data_parallel.zero2, HALF, {"prefetch": True}),
    "ZeRO-2, selective": (data_parallel.zero2, SELECTIVE, {}),
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


def osdp_pipeline(stages: int, job: Job) -> Any:
    """osdp's plans of the stages, as the benchmark runs them."""
    from osdp.batching import Batching
    from osdp.cluster import Cluster
    from osdp.cost.tables import Rules
    from osdp.cost.training import Training
    from osdp.layouts import Asked, plan_inside

    graph = source_of("deep", job.shape).capture("fp32")
    cluster = Cluster.of("CPU", nodes=2, devices_per_node=2)
    training, batching = Training.of("fp32", OPTIMIZER), Batching(job.batch, 2 * stages)
    asked = Asked(lambda _: (graph, ()), cluster, training, Rules(recompute=(Recompute.FULL,)), batching, seconds=1.0)
    return planned_stage(job, [plan_inside(asked, 1, stages, stage) for stage in range(stages)], exact=True)


WAYS["osdp, 2 stages"] = (partial(osdp_pipeline, 2), NONE, {})
WAYS["osdp, 4 stages"] = (partial(osdp_pipeline, 4), NONE, {})


def curves(model: str, names: list[str]) -> dict[str, list[float] | None]:
    """Of each way, the losses that this rank knows."""
    warnings.filterwarnings("ignore")  # of torch's own, in several of the ways
    shape = tiny(SHAPES[model])
    found: dict[str, list[float] | None] = {}
    for name in names:
        build, recompute, switches = WAYS[name]
        trainer = build(Job(shape, 2, 2, BATCHES.get(name, 4), recompute, switches))
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


KINDS = [
    ("deep", list(WAYS)),
    ("encoder-decoder", ["FSDP2", "TP x DP"]),
    ("experts", ["HSDP", "TP x DP"]),
    ("lora", ["DDP", "TP"]),
    ("vit", ["ZeRO-1", "GPipe"]),
]


@pytest.mark.parametrize(("model", "names"), one_in(3, KINDS))
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


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    ("constant", "each", "bend"), [(100, 7, 0), (100, 7, 40), (10, 300, 0), (100, 0, 0), (0, 3, -2), (500, 1, 0)]
)
def test_the_ladder_finds_the_largest_batch_that_fits(constant: int, each: int, bend: int, known: bool) -> None:
    limit, most = 400, 64
    tried: list[int] = []

    def peak(batch: int) -> int:
        return constant + each * batch + (bend if batch > 8 else 0)

    def attempt(batch: int) -> Attempt:
        tried.append(batch)
        return Attempt(batch, batch, None, peak(batch))

    expected = {batch: peak(batch) + 5 for batch in (1, 4)} if known else None
    found, attempts = largest_batch(attempt, limit_bytes=limit, most=most, expected=expected)
    feasible = [batch for batch in range(1, most + 1) if peak(batch) <= limit]
    assert found == (feasible[-1] if feasible else None)
    assert len(tried) == len(set(tried)) and set(tried) == set(attempts)
    assert sum(peak(batch) > limit for batch in tried) <= 2


def example() -> Log:
    """Two limits: at the first FSDP2 fits and DDP does not."""
    log = Log([])
    setting = Setting("deep", 2, 2, "500mbit").to_dict()
    log.add("about", setting=setting, date="2026-11-18", versions={}, machine={})
    log.add("model", parameters=1_000_000, trained=1_000_000)
    log.add("limits", ddp_bytes=222, bytes=[100, 288])
    log.add("none", way="DDP", share=SHARES[0], why="does not fit", peak_bytes=222)

    def timed(way: str, peak: int, *rounds: float, plan: str = "", trial: float = 9.0, batch: int = 4) -> None:
        key = {"way": way, "batch": batch, "recompute": "none", "switches": {}, "plan": plan}
        log.add("trial", **key, samples=4 * batch, seconds=trial, peak_bytes=peak)
        for seconds in rounds:
            log.add("round", **key, seconds=seconds)

    for share, plan in zip(SHARES, ("tight", "roomy"), strict=True):
        log.add("plan", way="osdp", share=share, plan=plan, predicted=1.0, gap=0.0)
    log.add("plan", way="osdp, layout auto", share=SHARES[0], plan="stages", predicted=1.0, gap=0.0, stages=[{}, {}])
    log.add("plan", way="osdp, layout auto", share=SHARES[1], plan="roomy", predicted=1.0, gap=0.0, like="osdp")
    timed("compute alone", 999, 0.1)
    timed("osdp", 90, 0.2, 0.1, 0.4, plan="tight")
    timed("osdp", 200, 0.1, plan="roomy")
    timed("osdp, layout auto", 95, 0.15, plan="stages")
    timed("DDP", 222, 0.2)
    timed("FSDP2", 80, 0.4)
    timed("FSDP2", 120, 0.32, trial=8.0, batch=8)
    timed("FSDP2", 110, trial=0.1, batch=6)  # never came to rounds
    timed("TP", 80, 0.3)
    return log


def test_tables_follow_from_the_log() -> None:
    tight, roomy = (rows_of(example(), share) for share in SHARES)
    rows = {row.rival: row for row in tight.rows}
    assert rows["osdp"].rate == pytest.approx(80) and rows["osdp"].spread == pytest.approx(0.75)
    assert rows["FSDP2"].of_osdp == pytest.approx(0.5)
    # a pipeline moves activations; where data parallelism alone is chosen, its figures are that row's
    assert rows["osdp, layout auto"].of_limit == pytest.approx((16 / 0.15) / 160)
    assert roomy.rate("osdp, layout auto") == roomy.rate("osdp")
    assert rows["DDP"].rate is None and rows["DDP"].why == "does not fit"
    # 4 MB of gradients, once to and once fro, half of them over a link of 62.5 MB/s: 64 ms a step of 16 samples
    assert rows["FSDP2"].of_limit == pytest.approx(40 / min(160, 16 / 0.064))
    assert rows["TP"].of_limit == pytest.approx((16 / 0.3) / 160)
    assert tight.best_rival is not None and tight.best_rival.rival == "TP"
    assert roomy.rate("osdp") == pytest.approx(160) and roomy.rate("FSDP2") == pytest.approx(100)
    factors = {claim.what: claim.value for claim in claims([tight, roomy])}
    assert factors["against FSDP2 as it ships"] == pytest.approx((2.0 * 1.6) ** 0.5)
    assert factors["against the best rival where DDP does not fit"] == pytest.approx(1.5)
    assert factors["against DDP where it fits"] == pytest.approx(2.0)


def test_a_log_goes_on_where_it_ended(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text('{"what": "peak", "way": "DDP", "switches": {"bucket_mb": 2}}\n{"what": "trial", "way": "D')
    told: list[dict[str, Any]] = []
    log = Log.read(file, told.append)
    assert log.last("peak", switches={"bucket_mb": 2}) and not log.all("trial")
    log.add("trial", way="DDP", switches={"bucket_mb": 2})
    assert told == [log.last("trial", way="DDP")]


def test_settings_are_distinct_and_cover_every_model() -> None:
    every = settings()
    assert len({setting.name for setting in every}) == len(every)
    assert {setting.model for setting in every} == set(SHAPES)
    assert {setting.hosts for setting in every} == {1, 2, 4} and 8 in {setting.ranks for setting in every}
