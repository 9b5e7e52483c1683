"""Claims of `osdp profile`:

- A fit recovers a known line, is not turned by outliers, and times them again.
- Overlap and the host's time are what makes the model's own formula equal what was measured.
- Every distinct stage of a model is timed, plain and recomputed, at full and at reduced depth.
- Batch sizes grow until a sample takes no less, so that times beyond them can be told.
- A profile of real ranks reads back, and a plan made with it predicts the seconds that were timed.
- A rank that stalls ends the other within the timeout, with a sentence; nothing is left half written.
"""

from __future__ import annotations

import itertools
import json
import math
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import captured, gpt, source
from test_train import running, two_ranks

from osdp.cli.main import main
from osdp.cli.profile import write_text
from osdp.cluster import GROUPS, KINDS, Cluster, Measured
from osdp.cluster.measured import between
from osdp.cost.graph import step_graph_of
from osdp.cost.tables import Rules
from osdp.cost.training import TIMED_OPTIMIZERS, Training
from osdp.cost.units import OPERATORS, WHOLE
from osdp.model.capture import capture
from osdp.model.graph import ModelGraph
from osdp.model.source import ModelSource, load_model
from osdp.planning import plan_graph
from osdp.profiling.bench import Bench
from osdp.profiling.collectives import groups_of
from osdp.profiling.engine import TINY_WIDTH, EngineFigures, TimedStack, fitted, probes_of
from osdp.profiling.line_fit import Point, fit, least_squares, settled
from osdp.profiling.rounds import LEAST_ROUNDS, Rounds, TimedLine, typical
from osdp.profiling.stack import Passes, Stack
from osdp.profiling.stages import StageRounds, larger_batch, rising
from osdp.recompute import Recompute
from osdp.training.rank_job import RankJob
from osdp.training.world import started

LATENCY, RATE = 2e-4, 5e8
SIZES = tuple(1 << power for power in range(12, 25, 2))


def _seconds(size: int) -> float:
    return LATENCY + size / RATE


def _points(**wrong: float) -> dict[int, Point]:
    """On the line, but for the sizes that are off by a factor."""
    factors = {int(size.removeprefix("at")): factor for size, factor in wrong.items()}
    return {size: Point((1.0, size), _seconds(size) * factors.get(size, 1.0)) for size in SIZES}


@pytest.mark.parametrize("wrong", [{}, {"at65536": 8.0}, {"at4096": 5.0, "at1048576": 0.2}])
def test_a_fit_recovers_a_line_whatever_outliers_do(wrong: dict[str, float]) -> None:
    line = fit(list(_points(**wrong).values()))
    assert line.first == pytest.approx(LATENCY, rel=1e-3)
    assert 1 / line.second == pytest.approx(RATE, rel=1e-3)
    assert line.outliers == len(wrong) and line.median_error < 1e-3
    worst = max((abs(1 / factor - 1) for factor in wrong.values()), default=0.0)
    assert line.worst_error == pytest.approx(worst, rel=1e-2, abs=1e-9)  # of all points: outliers are not hidden


def test_a_coefficient_can_be_held_and_none_is_negative() -> None:
    held = fit(list(_points().values()), first=LATENCY / 2)
    assert held.first == LATENCY / 2 and 1 / held.second == pytest.approx(RATE, rel=0.2)
    falling = fit([Point((1.0, 1e3), 2e-3), Point((1.0, 1e6), 1e-3)])
    assert falling.first > 0 and falling.second > 0
    concave = fit([Point((1.0, 1e3), 1e-6), Point((1.0, 2e3), 4e-6), Point((1.0, 4e3), 16e-6)])
    assert concave.first > 0 and concave.second > 0


def test_outliers_are_timed_again() -> None:
    points = _points(at65536=8.0)
    again: list[int] = []

    def timed(size: int) -> Point:
        again.append(size)
        return Point((1.0, size), _seconds(size))

    line = settled(points, timed, late=lambda: False)
    assert again == [65536] and line.outliers == 0
    settled(_points(at65536=8.0), timed, late=lambda: True)
    assert again == [65536]  # not when time is up


def test_least_squares_stay_within_their_bounds() -> None:
    def errors(values: np.ndarray) -> np.ndarray:
        return np.array([values[0] ** 3 - 8, values[0] * values[1] - 6, values[1] - 3])

    def found(low: float, high: float) -> list[float]:
        return least_squares(errors, np.ones(2), np.full(2, low), np.full(2, high)).tolist()

    assert found(0, 10) == pytest.approx([2, 3], abs=1e-3)
    assert found(0, 1.5) == pytest.approx([1.5, 1.5])
    assert found(0, 2.5) == pytest.approx([2.0, 2.5], abs=0.05)  # held at its bound, the others go on


@pytest.mark.parametrize("word", ["2xCPU", pytest.param("2x2xCPU", marks=pytest.mark.slow)])
def test_the_engines_figures_are_read_off_its_passes(word: str) -> None:
    """Passes that were predicted with known figures give these figures back."""
    pairs = [(kind, group) for group in groups_of(Cluster.parse(word)) for kind in KINDS]
    alone = [Measured(kind, group, 1e-3, 125e6 if group == "world" else 1e9) for kind, group in pairs]
    cluster = replace(Cluster.parse(word), measured=tuple(alone))
    busy = {(kind, group): {"world": 0.3, "node": 0.9, "across": 0.5}[group] for kind, group in pairs}
    busy |= {("all_reduce", "across"): 0.9} if len(pairs) > 3 else {}
    factor = {pair: 0.9 + 0.1 * number for number, pair in enumerate(pairs) if pair[1] == "world"}
    truth = EngineFigures(5e-4, 2e-3, 1e-4, 2e-10, busy, factor, ())
    tiny, few, many = Passes(8e-3, 1.6e-2), Passes(0.02, 0.04), Passes(0.16, 0.32)
    cases = (TINY_WIDTH, WHOLE, tiny), (TINY_WIDTH, OPERATORS, tiny), (256, WHOLE, few), (320, WHOLE, many)
    stacks = []
    for width, granularity, passes in cases:
        stack = Stack(width, 1, torch.device("cpu"), granularity)
        known = replace(cluster, stages=stack.timed_stages(passes))
        options = [option for probe in probes_of(cluster) for option in probe.options]
        stacks.append(TimedStack(stack, known, {o: stack.predicted(o, truth.applied(known)) for o in options}))
    found = fitted(*stacks)
    assert (found.unit_overhead_seconds, found.collective_overhead_seconds) == pytest.approx((5e-4, 2e-3), rel=0.02)
    assert (found.tensor_seconds, found.copy_byte_seconds) == pytest.approx((1e-4, 2e-10), rel=0.1)
    assert found.overlap == pytest.approx(0.7, abs=0.02)
    assert found.busy == pytest.approx({pair: busy[pair] for pair in found.busy}, abs=0.05)
    assert {pair: found.factor[pair] for pair in factor} == pytest.approx(factor, rel=0.02)
    assert all(each.predicted_seconds == pytest.approx(each.measured_seconds, rel=0.02) for each in found.passes)


def test_an_interrupted_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "profile.toml"
    write_text("old", file)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_text("new", file)
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def test_bad_arguments_are_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, says in (
        (["-o", str(tmp_path / "profile.json")], "does not end in .toml"),
        (["--batches", "1,0"], "0 is below 1"),
        (["--seq-len", "8"], "give one with --model"),
        (["-o", str(tmp_path / "p.toml"), "--nodes", "3"], "3 nodes of 0 devices"),
    ):
        assert main(["profile", *arguments]) == 2
        assert says in capsys.readouterr().err


def test_every_group_of_ranks_is_measured_once() -> None:
    assert groups_of(Cluster.parse("4xCPU")) == groups_of(Cluster.parse("4x1xCPU")) == ("world",)
    assert groups_of(Cluster.parse("2x2xCPU")) == GROUPS and groups_of(Cluster.parse("CPU")) == ()


# ---- rounds


def test_slow_turns_do_not_change_what_things_take_beside_each_other() -> None:
    """Five turns, each slow as a whole by another factor: the parts are exact, the whole is that of the median turn."""
    one = np.array([[1.0, 3.0], [2.0, 6.0]])
    taken = np.array([1.0, 1.1, 1.5, 1.9, 4.0])[:, None, None] * one
    assert typical(taken) == pytest.approx(1.5 * one)
    taken[3, 0, 0] *= 10  # and one that goes astray alone does not turn them
    assert typical(taken)[1, 1] == pytest.approx(1.5 * 6.0, rel=0.2)


class _Pretended:
    """An action that takes as long as it is told, in turn."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = itertools.cycle(seconds)

    def __call__(self) -> None:
        time.sleep(next(self._seconds))


def test_a_line_goes_through_the_medians_of_all_rounds() -> None:
    """Amounts of 1, 2 and 4, of which the second is slow in some rounds: 5 ms each in the median."""
    with (
        started(timeout_seconds=60) as world,
        RankJob(world, timeout_seconds=60, quiet=True).under_way() as rank_job,
    ):
        line = TimedLine[int](Bench(rank_job, budget_seconds=1))
        for amount in (1, 2, 4):
            slow = 0.05 if amount == 2 else 0.0
            line.admit(amount, _Pretended(*(5e-3 * amount + each for each in (0.0, 0.0, slow, 0.0))), (0.0, amount))
        for _ in range(7):
            line.round()
        fitted_line = line.fit()
    assert fitted_line.second == pytest.approx(5e-3, rel=0.15) and fitted_line.outliers == 0


@pytest.mark.parametrize("busy", [0.002, 0.01])
def test_what_is_computed_counts_in_seconds_of_cpu_times_a_factor(busy: float) -> None:
    """A run that computes for a while, says so, and is kept from the CPU for as long again."""

    def run() -> np.ndarray:
        time.sleep(2 * busy)
        return np.array([busy / 4, busy * 3 / 4])

    with (
        started(timeout_seconds=60) as world,
        RankJob(world, timeout_seconds=60, quiet=True).under_way() as rank_job,
    ):
        bench = Bench(rank_job, budget_seconds=1)
        assert bench.clock_factor == 1.0  # nothing ran yet
        assert bench.computed(3, run) == pytest.approx([busy / 4, busy * 3 / 4])
        assert 1.4 < bench.clock_factor < 6.0  # 2 on an idle machine: a busy one wakes sleepers late


# ---- stages


class _Waiting:
    """Waits in each round as long as it is told, in turn."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = itertools.cycle(seconds)

    def round(self) -> None:
        time.sleep(next(self._seconds))


def _graph(model: ModelSource) -> ModelGraph:
    return capture(model.build_on_meta(), model.inputs, loss=model.loss, name=model.name, compute_dtype="fp32")


def test_a_larger_batch_never_takes_less() -> None:
    assert rising([1.0, 2.0, 4.0]) == (1.0, 2.0, 4.0)
    assert rising([3.0, 1.0, 4.0]) == (2.0, 2.0, 4.0)
    assert rising([5.0, 4.0, 3.0]) == (4.0, 4.0, 4.0)


def test_rounds_say_when_the_machines_were_not_steady() -> None:
    with (
        started(timeout_seconds=60) as world,
        RankJob(world, timeout_seconds=60, quiet=True).under_way() as rank_job,
    ):
        bench = Bench(rank_job, budget_seconds=0.2, shares={"rounds": 1.0})
        bench.begin("rounds", "waiting")
        steady = Rounds(bench, [_Waiting([0.05])])
        steady.take_all()
        assert LEAST_ROUNDS <= len(steady.seconds) < 8 and steady.unsteady() is None
        unsteady = Rounds(bench, [_Waiting([0.01, 0.1])])
        for _ in range(6):
            unsteady.take()
        assert "something else ran on the machines" in (unsteady.unsteady() or "")


@pytest.mark.parametrize("name", ["deep", "gpt-pyramid"])
def test_every_distinct_stage_is_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "deep":  # at reduced depth
        monkeypatch.setattr("osdp.profiling.stages._WHOLE_PARAMETERS", 0)
    model = gpt(layers=(7,)) if name == "deep" else source(name)
    graph = _graph(model) if name == "deep" else captured(name, "fp32")
    with (
        started(timeout_seconds=60) as world,
        RankJob(world, timeout_seconds=60, quiet=True).under_way() as rank_job,
    ):
        bench = Bench(rank_job, budget_seconds=1)
        stages = StageRounds(bench, model, graph, batches=(1, 2, 4096), memory_bytes=8 << 20)
        Rounds(bench, [stages]).take_all()
        timed = stages.timed()
    ways = [(stage.plain, stage.recomputed, stage.selective) for stage in graph.stages]
    traces = [trace for each in ways for trace in each if trace is not None]
    assert {stage.signature for stage in timed.stages} == {trace.signature for trace in traces}
    assert len(timed.stages) < len(traces)
    assert timed.batches == (1, 2) and timed.stopped.startswith("batch 4096 needs about")
    for stage in timed.stages:
        trace = next(trace for trace in traces if trace.signature == stage.signature)
        for seconds, segments in ((stage.forward_seconds, trace.forward), (stage.backward_seconds, trace.backward)):
            assert len(seconds) == 2 and (min(seconds) > 0 or not segments)


def true_seconds(batch: int) -> float:
    """A pass whose rate improves with the batch, as that of 16 blocks of 256 on a CPU."""
    return 0.105 * batch + 0.25 * (1 - math.exp(-batch / 2.5))


def timed_batches(longest_seconds: float) -> tuple[int, ...]:
    passes = {batch: true_seconds(batch) for batch in (1, 2, 4)}
    while following := larger_batch(passes, longest_seconds):
        passes[following] = true_seconds(following)
    return tuple(passes)


def test_batches_grow_until_a_sample_takes_no_less() -> None:
    assert timed_batches(math.inf) == (1, 2, 4, 8, 16, 32, 64)
    assert timed_batches(1.5) == (1, 2, 4, 8)
    assert larger_batch({1: 1.0, 2: 2.0, 4: 3.9}, math.inf) is None

    def error(batches: tuple[int, ...], batch: int) -> float:
        found = between(batches, tuple(map(true_seconds, batches)), batch)
        return abs(found / true_seconds(batch) - 1)

    assert error((1, 2, 4), 23) > 0.12
    assert error(timed_batches(1.5), 23) < 0.06
    assert error(timed_batches(math.inf), 23) < 0.01


# ---- the command, on real ranks


def test_a_plan_with_a_profile_predicts_what_was_timed(tmp_path: Path) -> None:
    file = tmp_path / "profile.toml"
    options = ("--model", "tiny_lm:build", "--batches", "1,2", "--seconds", "1", "--json", "-o", str(file))
    with running(*two_ranks("-m", "osdp", "profile", *options)) as ranks:
        assert [rank.end() for rank in ranks] == [0, 0], "".join(ranks[0].errors)
    assert not ranks[1].lines and list(tmp_path.iterdir()) == [file]
    document = json.loads("".join(ranks[0].lines))
    cluster = Cluster.from_toml(file)
    assert cluster.to_dict() == document["cluster"] and cluster.word == "2xCPU"
    assert [(each.kind, each.group) for each in cluster.measured] == [(kind, "world") for kind in KINDS]
    assert {each.name for each in cluster.optimizers} == set(TIMED_OPTIMIZERS)
    assert all(0 <= each <= 1 for each in (cluster.overlap, *(c.busy_fraction for c in cluster.measured)))
    assert cluster.device.matmul_efficiency == 1.0

    graph = _graph(load_model("tiny_lm:build"))
    plan = plan_graph(graph, cluster, Training.of("fp32", "sgd"), Rules(recompute=(Recompute.NONE,)), batch=2)
    timed = [cluster.timed_stage(stage.plain.signature) for stage in graph.stages]
    expected = sum(each.forward_seconds[1] + each.backward_seconds[1] for each in timed if each is not None)
    assert None not in timed and plan.predicted.time_parts["compute"] == pytest.approx(expected)
    optimizer = cluster.timed_optimizer("sgd")
    assert optimizer is not None
    held = sum(unit.parameters for unit in plan.units if unit.mode == "replicate")
    assert plan.predicted.time_parts["optimizer"] >= held * 4 * optimizer.byte_seconds
    assert step_graph_of(plan, graph).time().total == pytest.approx(plan.predicted.step_seconds)


def test_a_rank_that_stalls_ends_the_other_within_the_timeout(tmp_path: Path) -> None:
    options = ("--timeout", "8", "--seconds", "300", "-o", str(tmp_path / "profile.toml"))
    with running(*two_ranks("-m", "osdp", "profile", *options)) as ranks:
        end = time.monotonic() + 100
        while not any("ranks at once" in line for line in ranks[0].errors):
            assert time.monotonic() < end and ranks[0].popen.poll() is None, "".join(ranks[0].errors)
            time.sleep(0.01)
        ranks[1].popen.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        assert ranks[0].end() == 1
        assert time.monotonic() - stopped < 8 + 5
    (sentence,) = ranks[0].sentences()
    assert "error: rank 0 waited 8 s in computing on 2 ranks at once: another rank hangs or is gone" in sentence
    assert "nothing is written" in sentence and not list(tmp_path.iterdir())
