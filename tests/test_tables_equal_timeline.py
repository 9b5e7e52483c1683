"""Claim: the search's tables judge a choice as the plain timeline and the step graph do.

The tables share slots, drop dominated rows and put units on lines; none of that may change a byte or a second.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from odd_models import Twice, UsedBehind, odd_graph
from small_models import captured

from osdp.cluster import Cluster, Link
from osdp.cost import units
from osdp.cost.graph import step_graph
from osdp.cost.tables import Rules, Tables
from osdp.cost.timeline import build_timeline
from osdp.cost.training import Training
from osdp.cost.units import OPERATORS, Option
from osdp.recompute import Recompute
from osdp.search.evaluate import evaluate
from osdp.search.problem import Problem, StageChoice, VariantTable
from osdp.sharding import FREE, KEEP, MODES, REPLICATE, Scope

MODELS = ("gpt", "gpt-pyramid", "llama", "gpt-tiny")
CLUSTERS = ("2x2xA100-40GB", "4xA100-40GB", "2x2xCPU", "1x3xCPU")  # the first two overlap, the last two do not
CHOICES = 8  # random choices for each combination, half of them close to uniform


@pytest.fixture
def small_operators_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "LARGE_NUMEL", 256)


def random_choice(problem: Problem, rng: random.Random, *, uniform: bool) -> tuple[StageChoice, ...]:
    """A variant, an option and a number of slices for everything, at random; or the same ones almost everywhere."""
    fixed = rng.random(), rng.random(), rng.random()

    def pick(which: int, count: int) -> int:
        return int((fixed[which] if uniform and rng.random() < 0.9 else rng.random()) * count)

    def options(variant: VariantTable) -> tuple[tuple[int, int], ...]:
        chosen = [pick(1, len(unit)) for unit in variant.units]
        return tuple((o, 1 + pick(2, unit[o].slices)) for o, unit in zip(chosen, variant.units, strict=True))

    choice = []
    for stage in problem.stages:
        variant = pick(0, len(stage.variants))
        choice.append(StageChoice(variant, options(stage.variants[variant])))
    return tuple(choice)


def tables_for(model: str, cluster: str, *, accumulation: int = 1, rules: Rules | None = None) -> Tables:
    training = replace(Training.of("bf16", "adamw"), accumulation=accumulation)
    return Tables(captured(model), Cluster.parse(cluster), training, rules or Rules())


def compare(tables: Tables, batch: int, *, seed: int, count: int = CHOICES) -> list[Option]:
    """Judges random choices both ways; gives all options that took part."""
    rng = random.Random(seed)
    taken: list[Option] = []
    accumulation = tables.training.accumulation
    for recomputed in tables.recompute_cases:
        limit = tables.cluster.limit_bytes
        problem = tables.problem(batch, limit=limit, accumulation=accumulation, recomputed=recomputed)
        for number in range(count):
            choice = random_choice(problem, rng, uniform=number % 2 == 1)
            verdict = evaluate(problem, choice)
            layout, options = tables.read(problem, choice)
            timeline = build_timeline(layout, options, batch, tables.training, tables.cluster)
            graph = step_graph(layout, options, batch, tables.training, tables.cluster)
            assert verdict.peak == timeline.peak_bytes, (number, choice)
            assert verdict.seconds == pytest.approx(graph.time().total, rel=1e-9), (number, choice)
            taken += options
    return taken


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("model", MODELS)
def test_random_choices_cost_the_same(model: str, cluster: str) -> None:
    taken = compare(tables_for(model, cluster), 2, seed=1)
    assert len({option.mode for option in taken}) >= 3


@pytest.mark.parametrize("cluster", ["2x2xA100-40GB", "1x3xCPU", "2x2xCPU"])
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_with_accumulation(model: str, cluster: str) -> None:
    taken = compare(tables_for(model, cluster, accumulation=3), 2, seed=2)
    assert {option.reduce_once for option in taken} == {False, True}
    assert {option.gather_once for option in taken if option.mode == KEEP} == {False, True}
    assert {option.all_reduce_once for option in taken} == ({False, True} if cluster.startswith("2x2") else {False})


@pytest.mark.usefixtures("small_operators_split")
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("cluster", ["2x2xA100-40GB", "4xCPU"])
@pytest.mark.parametrize("model", ["gpt", "gpt-untied", "llama"])
def test_with_split_operators(model: str, cluster: str, accumulation: int) -> None:
    taken = compare(tables_for(model, cluster, accumulation=accumulation), 2, seed=3)
    partly = [option for option in taken if 1 < option.sharded < option.slices]
    assert partly, "no unit has some, but not all, of its slices sharded"


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("cluster", ["2x2xA100-40GB", "3xA100-40GB"])
@pytest.mark.parametrize("model", ["gpt", "llama", "stacked"])
def test_with_blocks_that_prefetch_two_units(model: str, cluster: str, precision: str) -> None:
    """By operators alone, so that half of the choices of blocks have a depth of two."""
    graph = captured(model, "bf16" if precision == "bf16" else "fp32")
    rules = Rules(modes=(FREE, KEEP), granularities=(OPERATORS,), split=False)
    tables = Tables(graph, Cluster.parse(cluster), Training.of(precision), rules)
    problem = tables.problem(2, limit=tables.cluster.limit_bytes, recomputed=tables.recompute_cases[-1])
    keys = [variant.key for stage in problem.stages for variant in stage.variants if variant.is_block]
    assert {(key.recompute, key.prefetch) for key in keys if key.granularity == OPERATORS} == {  # type: ignore[attr-defined]
        (how, depth) for how in (Recompute.NONE, Recompute.FULL) for depth in (1, 2)
    }
    compare(tables, 2, seed=9, count=12)


def test_nothing_is_prefetched_deeper_where_that_gains_nothing() -> None:
    """Where nothing overlaps, and replicas."""
    alone = replace(Cluster.parse("4xA100-40GB"), overlap=0.0)
    for tables in (
        Tables(captured("gpt"), alone, Training.of("bf16"), Rules()),
        tables_for("gpt", "4xA100-40GB", rules=Rules(modes=(REPLICATE,))),
    ):
        problem = tables.problem(2, limit=tables.cluster.limit_bytes, recomputed=tables.recompute_cases[-1])
        keys = [variant.key for stage in problem.stages for variant in stage.variants]
        assert {key.prefetch for key in keys} == {1}  # type: ignore[attr-defined]


def test_at_other_batch_sizes() -> None:
    for batch in (1, 5, 33):
        compare(tables_for("gpt", "2x2xA100-40GB"), batch, seed=batch, count=6)


@pytest.mark.parametrize("precision", ["fp32", "pure-bf16"])
@pytest.mark.parametrize("optimizer", ["adamw-fused", "sgd-momentum", "adamw-bf16", "adafactor"])
def test_in_other_trainings(precision: str, optimizer: str) -> None:
    training = Training.of(precision, optimizer)
    graph = captured("gpt", training.precision.compute_dtype)
    compare(Tables(graph, Cluster.parse("2x2xCPU"), training, Rules()), 2, seed=4)


@pytest.mark.parametrize("reduce_dtype", ["fp32", "bf16"])
def test_with_other_reductions(reduce_dtype: str) -> None:
    training = Training.of("bf16", "adamw", reduce_dtype)
    compare(Tables(captured("gpt"), Cluster.parse("2x2xCPU"), training, Rules()), 2, seed=5)


def test_where_modules_are_called_several_times() -> None:
    graph = odd_graph(Twice)
    rules = Rules(modes=(FREE, KEEP, REPLICATE))  # within nodes the first gather and the others differ
    compare(Tables(graph, Cluster.parse("2x2xA100-40GB"), Training.of("fp32"), rules), 2, seed=7)


def test_where_only_the_model_itself_runs_behind_the_blocks() -> None:
    compare(Tables(odd_graph(UsedBehind), Cluster.parse("1x3xCPU"), Training.of("fp32"), Rules()), 2, seed=9, count=6)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("model", ["t5", "idle-operators", "idle-tower", "adapters"])
def test_where_units_are_left_when_backward_has_ended(model: str, accumulation: int) -> None:
    for cluster in ("2x2xA100-40GB", "1x3xCPU"):
        compare(tables_for(model, cluster, accumulation=accumulation), 2, seed=8, count=6)


def test_long_runs_choose_by_block() -> None:
    """The 18 alike blocks of the preset are one run whose units choose together; its tables are judged alike."""
    tables = tables_for("gpt-pyramid-preset", "8xA100-40GB")
    compare(tables, 2, seed=6, count=1)


def on_two_levels(hop_seconds: float) -> Tables:
    """Two nodes behind a slow network; two levels take one more hop in the node."""
    node, network = Link(1e11, hop_seconds), Link(1e8, 1e-4)
    cluster = Cluster.of("CPU", nodes=2, devices_per_node=2, node_link=node, network=network)
    return Tables(captured("gpt"), cluster, Training.of(), Rules())


def test_two_levels_cost_the_same_and_are_offered_beside_one() -> None:
    taken = compare(on_two_levels(0.0), 2, seed=5)
    over_world = {mode for mode in MODES if mode.sharded_over is Scope.WORLD}
    assert {(option.mode, option.two_levels) for option in taken if option.mode in over_world} == {
        (mode, two_levels) for mode in over_world for two_levels in (False, True)
    }
    assert not any(option.two_levels for option in taken if option.mode not in over_world)


def test_units_that_are_too_small_to_gain_from_two_levels_stay_on_one() -> None:
    tables = on_two_levels(1e-5)
    problem = tables.problem(2, limit=tables.cluster.limit_bytes)
    first = [StageChoice(0, tuple((0, 1) for _ in stage.variants[0].units)) for stage in problem.stages]
    layout, _ = tables.read(problem, first)
    options = [unit for stage in problem.stages for unit in stage.variants[0].units]
    sizes: dict[bool, list[int]] = {False: [], True: []}
    for unit, own in zip(layout.units, options, strict=True):
        keys = [key for option in own for key in option.key]  # type: ignore[attr-defined]
        sizes[any(key.two_levels for key in keys)].append(unit.numel)
    assert sizes[True] and sizes[False], sizes
    assert max(sizes[False]) < min(sizes[True])


@pytest.mark.usefixtures("small_operators_split")
def test_with_another_dimension_sharded() -> None:
    tables = tables_for("stacked", "2x2xA100-40GB")
    compare(tables, 2, seed=7, count=6)
