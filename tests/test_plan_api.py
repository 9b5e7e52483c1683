"""Claims about `osdp.plan`: what it returns fits, is proven fastest, and does what was asked of it."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from small_models import captured, source

import osdp
from osdp import Plan, UsageError
from osdp.api import resolve
from osdp.cost import units
from osdp.cost.tables import Rules, Tables
from osdp.cost.training import Training
from osdp.infeasible import smallest_timeline
from osdp.planning import Progress
from osdp.search.evaluate import Verdict, evaluate
from osdp.search.problem import Problem, StageChoice
from osdp.search.solve import lowest_peak, solve_exactly
from osdp.sharding import FREE, FREE_IN_NODE, KEEP, REPLICATE

MIB = 1 << 20
MODEL = "gpt-tiny"

CASES = [("4xCPU", "8MiB"), ("4xCPU", "12MiB"), ("2x2xCPU", "10MiB"), ("2x2xA100-40GB", "16MiB")]


@pytest.fixture(autouse=True)
def captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One capture serves all tests: capture has tests of its own."""
    monkeypatch.setattr("osdp.request.capture", lambda *_, compute_dtype, **__: captured(MODEL, compute_dtype))


def planned(cluster: str = "4xCPU", memory: str | int = "12MiB", **changes: Any) -> Plan:
    model = source(MODEL)
    return osdp.plan(model.build_on_meta(), model.inputs, cluster, memory=memory, loss=model.loss, **changes)


@cache
def plain(cluster: str, memory: str) -> Plan:
    return planned(cluster, memory)


def without_seconds(plan: Plan) -> Plan:
    return replace(plan, certificate=replace(plan.certificate, seconds=0.0))


def modes_by_unit(plan: Plan) -> dict[str, str]:
    return {unit.name: unit.mode for unit in plan.units}


# ---- it fits, it is proven, it beats the baselines


@pytest.mark.parametrize(("cluster", "memory"), CASES)
def test_it_fits_and_is_proven(cluster: str, memory: str) -> None:
    plan = plain(cluster, memory)
    predicted = plan.predicted
    assert predicted.peak_bytes <= predicted.limit_bytes == plan.cluster.limit_bytes
    assert predicted.limit_bytes + predicted.reserve_bytes == int(memory.removesuffix("MiB")) * MIB
    assert sum(predicted.memory_parts.values()) == predicted.peak_bytes
    parts = {key: value for key, value in predicted.time_parts.items() if key != "hidden communication"}
    assert sum(parts.values()) == pytest.approx(predicted.step_seconds, rel=1e-12)
    assert predicted.samples_per_second == pytest.approx(plan.global_batch / predicted.step_seconds, rel=1e-12)
    assert plan.certificate.status == "optimal"
    assert plan.certificate.gap == 0.0
    assert plan.certificate.bound == pytest.approx(predicted.samples_per_second, rel=1e-9)


@pytest.mark.parametrize(("cluster", "memory"), CASES)
def test_it_is_at_least_as_fast_as_every_baseline(cluster: str, memory: str) -> None:
    plan = plain(cluster, memory)
    feasible = [baseline for baseline in plan.baselines if baseline.feasible]
    assert feasible
    for baseline in feasible:
        assert plan.predicted.samples_per_second >= baseline.samples_per_second * (1 - 1e-9), baseline.name


def test_every_parameter_is_in_one_unit() -> None:
    plan = plain("4xCPU", "12MiB")
    assert sum(unit.parameters for unit in plan.units) == plan.model.parameters == captured(MODEL).num_parameters
    assert len(modes_by_unit(plan)) == len(plan.units)


def test_less_memory_never_gives_more_throughput() -> None:
    plans = plain("4xCPU", "8MiB"), planned("4xCPU", "9MiB"), plain("4xCPU", "12MiB")
    rates = [plan.predicted.samples_per_second for plan in plans]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]


def test_the_smallest_memory_that_fits_is_exact() -> None:
    """A plan exists at the smallest reachable peak, and none with one byte less."""
    training = Training.of()
    cluster = resolve("4xCPU", "12MiB")  # it has no reserve: memory is the limit
    peak = smallest_timeline(captured(MODEL), cluster, training, Rules(), 1).peak_bytes
    assert planned("4xCPU", peak).predicted.peak_bytes == peak
    with pytest.raises(osdp.DoesNotFit) as error:
        planned("4xCPU", peak - 1)
    assert error.value.peak_bytes == peak


def climbed(problem: Problem, choice: tuple[StageChoice, ...], steps: int) -> Verdict:
    """Changes one or a few things at random and keeps what fits and is not slower."""
    rng, best = random.Random(0), evaluate(problem, choice)
    for _ in range(steps):
        changed = list(choice)
        for stage in rng.choices(range(len(changed)), k=rng.randint(1, 3)):
            variants, old = problem.stages[stage].variants, changed[stage]
            variant = old.variant if rng.random() < 0.8 else rng.randrange(len(variants))
            units = variants[variant].units
            options = list(old.options) if variant == old.variant else [(rng.randrange(len(unit)), 1) for unit in units]
            unit = rng.randrange(len(options))
            options[unit] = rng.randrange(len(units[unit])), 1
            changed[stage] = StageChoice(variant, tuple(options))
        verdict = evaluate(problem, tuple(changed))
        if verdict.peak <= problem.limit and verdict.seconds <= best.seconds:
            choice, best = tuple(changed), verdict
    return best


@pytest.mark.parametrize("slack", [1 << 16, 1 << 19])
def test_no_choice_beats_the_proven_one_in_tight_memory(slack: int) -> None:
    tables = Tables(captured(MODEL), resolve("4xCPU", "12MiB"), Training.of(), Rules())
    choice, lowest = lowest_peak(tables.problem(1, limit=12 * MIB))
    problem = tables.problem(1, limit=lowest.peak + slack)
    outcome = solve_exactly(problem)
    assert outcome.status == "optimal"
    assert outcome.verdict is not None
    assert outcome.verdict.seconds <= climbed(problem, choice, 4000).seconds * (1 + 1e-9)


def test_the_same_plan_twice() -> None:
    assert without_seconds(planned("2x2xCPU", "10MiB")) == without_seconds(plain("2x2xCPU", "10MiB"))


def test_saved_and_loaded(tmp_path: Path) -> None:
    plan = plain("2x2xCPU", "10MiB")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_progress_is_reported() -> None:
    seen: list[Progress] = []
    planned("4xCPU", "12MiB", batch=2, progress=seen.append)
    assert [name for name in dict.fromkeys(p.stage for p in seen)] == ["capture", "baselines", "search"]


@pytest.mark.parametrize(("precision", "optimizer"), [("fp32", "sgd"), ("pure-bf16", "adamw-fused")])
def test_training_is_as_asked(precision: str, optimizer: str) -> None:
    plan = planned(precision=precision, optimizer=optimizer, batch=2)
    assert (plan.precision, plan.optimizer) == (precision, optimizer)
    states = plan.predicted.memory_parts["optimizer states"]
    assert (states == 0) == (optimizer == "sgd")


def test_unknown_training_is_refused() -> None:
    for wrong in ({"precision": "int4"}, {"optimizer": "lamb"}, {"reduce_dtype": "fp8"}):
        with pytest.raises(UsageError, match="unknown"):
            planned(**wrong)


# ---- batch sizes


def test_batch_is_fixed() -> None:
    plan = planned(batch=3)
    assert (plan.batch_size, plan.accumulation, plan.global_batch) == (3, 1, 12)
    assert plan.predicted.samples_per_second <= plain("4xCPU", "12MiB").predicted.samples_per_second


def test_the_chosen_batch_beats_its_neighbours() -> None:
    best = plain("4xCPU", "12MiB")
    for batch in (best.batch_size - 1, best.batch_size + 1):
        try:
            rate = planned(batch=batch).predicted.samples_per_second
        except osdp.DoesNotFit:
            continue
        assert rate <= best.predicted.samples_per_second * (1 + 1e-9)


def test_global_batch_is_reached_with_accumulation() -> None:
    largest = plain("4xCPU", "8MiB").batch_size
    each = 4 * largest
    plan = planned(memory="8MiB", global_batch=4 * each)
    assert plan.global_batch == 4 * each
    assert plan.batch_size * plan.accumulation == each
    assert plan.accumulation > 1
    assert plan.predicted.peak_bytes <= plan.predicted.limit_bytes
    for baseline in plan.baselines:
        if baseline.feasible:
            assert baseline.batch_size * baseline.accumulation == each
            assert plan.predicted.samples_per_second >= baseline.samples_per_second * (1 - 1e-9), baseline.name


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"global_batch": 66}, "66 does not divide over 4 devices; 64 does"),
        ({"global_batch": 3}, "3 does not divide over 4 devices; 4 does"),
        ({"batch": 2, "global_batch": 8}, "not both"),
        ({"batch": 0}, "must be from 1 to 1,048,576"),
        ({"global_batch": -4}, "must be from 1 to 1,048,576"),
    ],
)
def test_impossible_batches_are_refused(wrong: dict[str, int], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        planned(**wrong)


# ---- pins and restrictions


def test_pins_are_respected() -> None:
    plan = planned(pin={"tokens": KEEP, "blocks.1": FREE, "blocks.2.*": REPLICATE}, batch=2, memory="64MiB")
    modes = modes_by_unit(plan)
    assert modes["tokens"] == KEEP
    assert modes["blocks.1"] == FREE
    assert {mode for name, mode in modes.items() if name.startswith("blocks.2")} == {REPLICATE}


def test_pins_of_operators_of_one_block_make_it_finer() -> None:
    plan = planned(pin=["blocks.0.qkv=replicate", "blocks.0.fc1=free"], batch=2, memory="64MiB")
    modes = modes_by_unit(plan)
    assert modes["blocks.0.qkv"] == REPLICATE
    assert modes["blocks.0.fc1"] == FREE
    assert "blocks.0.fc2" in modes


def test_a_pinned_plan_is_not_faster() -> None:
    pinned = planned(pin={"blocks.*": FREE_IN_NODE}, cluster="2x2xCPU", memory="10MiB")
    assert pinned.predicted.samples_per_second < plain("2x2xCPU", "10MiB").predicted.samples_per_second


@pytest.mark.parametrize(
    ("pin", "why"),
    [
        (["tokens=keep", "tokens=free"], "pinned to both keep and free"),
        ({"blocks.0.qkv": KEEP, "blocks.0.*": FREE}, "the pins leave blocks.0 no mode that is allowed; drop one"),
        (["layers.*=keep"], r"pin 'layers.\*' matches no operator"),
        (["tokens=offload"], "the modes are"),
        ({"tokens": "offload"}, "cannot pin 'tokens' to 'offload'"),
        ({"tokens": FREE_IN_NODE}, "cannot pin 'tokens' to 'free_in_node'"),
        (["tokens"], "is not 'name=mode'"),
    ],
)
def test_impossible_pins_are_refused(pin: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        planned(pin=pin)


def test_modes_are_restricted() -> None:
    plan = planned(modes=[REPLICATE, FREE], memory="24MiB", batch=4)
    assert {unit.mode for unit in plan.units} <= {REPLICATE, FREE}
    assert {unit.mode for unit in planned(modes=[FREE], batch=4).units} == {FREE}
    with pytest.raises(UsageError, match="unknown mode 'zero'"):
        planned(modes=["zero"])
    with pytest.raises(UsageError, match="none of the modes free_in_node exists"):
        planned(modes=[FREE_IN_NODE])


def test_recompute_can_be_forbidden() -> None:
    plan = planned(recompute=False)
    assert not any(unit.recompute for unit in plan.units)
    free = plain("4xCPU", "12MiB")
    assert any(unit.recompute for unit in free.units)
    assert plan.predicted.samples_per_second < free.predicted.samples_per_second


def test_splitting_can_be_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is so tight that only split operators fit, forbidding them leaves nothing."""
    monkeypatch.setattr(units, "LARGE_NUMEL", 1 << 16)
    cluster = resolve("16xCPU", "12MiB")
    least = {
        split: smallest_timeline(captured(MODEL), cluster, Training.of(), Rules(split=split), 1).peak_bytes
        for split in (False, True)
    }
    assert least[True] < least[False]
    between = (least[True] + least[False]) // 2
    plan = planned("16xCPU", between, batch=1)
    assert any(unit.splits > 1 for unit in plan.units)
    assert all(unit.sharded_splits <= unit.splits for unit in plan.units)
    with pytest.raises(osdp.DoesNotFit):
        planned("16xCPU", between, split=False, batch=1)
    assert all(unit.splits == 1 for unit in planned("16xCPU", least[False] + MIB, split=False, batch=1).units)
