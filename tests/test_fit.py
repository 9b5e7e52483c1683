"""Claim: when nothing fits, the error is exact about what is too much, and its remedies really fit when applied."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from small_models import captured, source

from osdp.api import resolve
from osdp.batching import Batching
from osdp.cluster import Cluster
from osdp.cost.positions import PARTS
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.errors import DoesNotFit, Remedy
from osdp.infeasible import nothing_fits, smallest_timeline
from osdp.model.capture import capture
from osdp.planfile import Plan
from osdp.planning import plan_graph
from osdp.recompute import Recompute
from osdp.sharding import FREE, REPLICATE

MODEL = "gpt-tiny"


def fits(
    cluster: Cluster, *, training: Training | None = None, rules: Rules | None = None, batch: int | None = 1
) -> Plan:
    training = training or Training.of()
    graph = captured(MODEL, training.precision.compute_dtype)
    return plan_graph(graph, cluster, training, rules or Rules(), batch=batch)


def refused(cluster: Cluster, *, rules: Rules | None = None, batch: int | None = 1) -> DoesNotFit:
    with pytest.raises(DoesNotFit) as error:
        fits(cluster, rules=rules, batch=batch)
    return error.value


def remedy(error: DoesNotFit, pattern: str) -> tuple[Remedy, re.Match[str]]:
    for each in error.remedies:
        match = re.search(pattern, each.change)
        if match:
            return each, match
    raise AssertionError(f"no remedy like {pattern!r} among {[each.change for each in error.remedies]}")


def test_the_error_says_what_is_too_much() -> None:
    cluster = resolve("4xCPU", "3MiB")
    error = refused(cluster)
    assert error.limit_bytes == cluster.limit_bytes == 3 << 20
    assert error.peak_bytes > error.limit_bytes
    assert tuple(error.memory_parts) == PARTS
    assert sum(error.memory_parts.values()) == error.peak_bytes
    assert all(nbytes >= 0 for nbytes in error.memory_parts.values())
    least = smallest_timeline(captured(MODEL), cluster, Training.of(), Rules(), 1)
    assert (error.peak_bytes, error.peak_at) == (least.peak_bytes, str(least.peak))
    assert error.peak_at in str(error)
    assert "would fit" in str(error)


@pytest.mark.parametrize(("word", "memory"), [("4xCPU", "3MiB"), ("2x2xA100-40GB", "3MiB"), ("1xCPU", "10MiB")])
def test_the_memory_remedy_fits(word: str, memory: str) -> None:
    """The amount that is printed is what a person would type, whatever the reserve."""
    error = refused(resolve(word, memory))
    promised, match = remedy(error, r"^(.*) of memory on each device")
    plan = fits(resolve(word, match[1].replace(" ", "")))
    assert plan.predicted.peak_bytes <= plan.predicted.limit_bytes
    assert promised.peak_bytes == error.peak_bytes


def test_the_memory_remedy_fits_at_every_size() -> None:
    """Sizes are printed rounded: never down to where the plan no longer fits."""
    graph, training = captured("gpt"), Training.of()
    for batch in (97, 40009):
        error = nothing_fits(graph, resolve("4xA100-40GB", "1MiB"), training, Rules(), Batching(batch))
        _, match = remedy(error, r"^(.*) of memory on each device")
        enough = resolve("4xA100-40GB", match[1].replace(" ", ""))
        assert enough.limit_bytes >= error.peak_bytes, (batch, match[1])


@pytest.mark.parametrize(("word", "memory"), [("2xCPU", "7MiB"), ("1x2xA100-40GB", "7MiB")])
def test_the_devices_remedy_fits_and_half_of_them_do_not(word: str, memory: str) -> None:
    error = refused(resolve(word, memory))
    promised, match = remedy(error, r"^(\d+) devices \((.*)\)$")
    larger = resolve(match[2], memory)
    assert larger.world_size == int(match[1])
    plan = fits(larger)
    assert plan.predicted.peak_bytes <= plan.predicted.limit_bytes
    assert promised.peak_bytes <= plan.predicted.peak_bytes
    if larger.nodes > 2:
        refused(replace(larger, nodes=larger.nodes // 2))


def test_dropping_restrictions_fits() -> None:
    cluster, rules = resolve("4xCPU", "8MiB"), Rules(modes=(REPLICATE,))
    error = refused(cluster, rules=rules)
    promised, _ = remedy(error, "dropping the restrictions")
    assert promised.peak_bytes <= cluster.limit_bytes
    fits(cluster)


def test_a_batch_of_one_fits() -> None:
    cluster = resolve("4xCPU", "8MiB")
    remedy(refused(cluster, batch=500), "a batch of 1")
    fits(cluster, batch=1)


def test_lighter_states_fit() -> None:
    cluster = resolve("1xCPU", "12MiB")
    remedy(refused(cluster), "pure-bf16")
    fits(cluster, training=Training.of("pure-bf16"))


def test_the_fused_optimizer_fits() -> None:
    """Where the update is the peak: one byte below what the plain optimizer needs at least."""
    cluster, fused = resolve("1xCPU", None), Training.of("pure-bf16", "adamw-fused")
    plain = Training.of("pure-bf16")
    peak = smallest_timeline(captured(MODEL), cluster, plain, Rules(), 1).peak_bytes
    cluster = resolve("1xCPU", peak - 1)
    with pytest.raises(DoesNotFit) as error:
        fits(cluster, training=plain)
    promised, _ = remedy(error.value, "adamw-fused")
    assert promised.peak_bytes <= fits(cluster, training=fused).predicted.peak_bytes <= cluster.limit_bytes


def test_a_global_batch_is_priced_as_it_would_be_accumulated() -> None:
    """Two samples of a rank need more than one: together, or, one by one, gradients that stay."""
    graph, training = captured(MODEL), Training.of()
    cluster = resolve("4xCPU", smallest_timeline(graph, resolve("4xCPU", None), training, Rules(), 1).peak_bytes)
    with pytest.raises(DoesNotFit) as error:
        plan_graph(graph, cluster, training, Rules(), global_batch=8)
    least = [
        smallest_timeline(graph, cluster, replace(training, accumulation=accumulation), Rules(), batch).peak_bytes
        for accumulation, batch in ((1, 2), (2, 1))
    ]
    assert error.value.peak_bytes == min(least) > cluster.limit_bytes
    promised, _ = remedy(error.value, "^8 devices")
    assert promised.peak_bytes <= cluster.limit_bytes


def test_a_shorter_sequence_fits() -> None:
    cluster, rules = resolve("4xCPU", "8MiB"), Rules(modes=(FREE,), recompute=(Recompute.NONE,), split=False)
    error = refused(cluster, rules=rules, batch=6)
    promised, match = remedy(error, r"sequences of about (\d+) instead of 64")
    assert promised.estimate and promised.peak_bytes <= cluster.limit_bytes
    assert all(each.estimate == each.change.startswith(("sequences", "optimizer states")) for each in error.remedies)
    model, length = source(MODEL), int(match[1])

    def shorter(batch: int) -> tuple[tuple[object, ...], dict[str, object]]:
        args, kwargs = model.inputs(batch)
        return tuple(tokens[:, :length] for tokens in args), kwargs

    graph = capture(model.build_on_meta(), shorter, loss=model.loss)
    plan_graph(graph, cluster, Training.of(), rules, batch=6)


def test_without_a_batch_the_error_is_that_of_one_sample() -> None:
    cluster = resolve("4xCPU", "3MiB")
    assert refused(cluster, batch=None).peak_bytes == refused(cluster, batch=1).peak_bytes
