"""`osdp train` says once, and with the likely cause, that a run is not as its plan predicts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from osdp.cluster import Cluster, Measured
from osdp.planfile import Plan
from osdp.training.drift import ENOUGH_STEPS, WARM_UP_STEPS, Pace, Timing, typical_seconds

# The plan of conftest: a step of 1.5 s, 0.3 s of it exposed communication, a peak of 30 of 40 GiB, on 2x4xA100-40GB.
AS_PREDICTED = Timing(1.5, 0.001, None, 30 << 30)


def said(plan: Plan, timing: Timing, *, warm_up: Timing = AS_PREDICTED, more: int = 0) -> list[str]:
    """All sentences of a run whose steps are alike after the warm-up."""
    pace = Pace(plan)
    timings = [warm_up] * WARM_UP_STEPS + [timing] * (ENOUGH_STEPS + more)
    return [sentence for sentence in map(pace.parted, timings) if sentence]


def measured(plan: Plan) -> Plan:
    return replace(plan, cluster=replace(plan.cluster, measured=(Measured("all_gather", "world", 1e-5, 1e11),)))


@pytest.mark.parametrize(("seconds", "parts"), [(1.72, False), (1.73, True), (1.28, False), (1.27, True)])
def test_more_than_15_percent_slower_or_faster_is_said_once(plan: Plan, seconds: float, parts: bool) -> None:
    sentences = said(plan, replace(AS_PREDICTED, seconds=seconds), more=20)
    assert len(sentences) == parts
    if parts:
        assert f"a step takes {seconds} s" in sentences[0] and "the predicted 1.50 s" in sentences[0]


def test_nothing_is_said_before_enough_steps_nor_of_the_first_nor_of_those_beside_a_save(plan: Plan) -> None:
    slow = replace(AS_PREDICTED, seconds=9.0)
    assert said(plan, slow, more=-1) == []
    assert said(plan, AS_PREDICTED, warm_up=slow) == []
    assert said(plan, replace(slow, saving=True), more=20) == []
    pace = Pace(plan)
    mixed = [AS_PREDICTED, slow, AS_PREDICTED] * ENOUGH_STEPS  # the median is as predicted
    assert not any(map(pace.parted, mixed))


def test_the_causes_are_those_that_were_measured(plan: Plan) -> None:
    slow = replace(AS_PREDICTED, seconds=3.0)
    (unmeasured,) = said(plan, slow)
    assert "2x4xA100-40GB is not measured" in unmeasured and "`osdp profile`" in unmeasured
    known = measured(plan)
    (loading,) = said(known, replace(slow, data_seconds=1.2))
    assert "loading data takes 40 % of it" in loading and "not measured" not in loading
    (planned,) = said(known, slow)
    assert "20 % of it is planned as exposed communication" in planned
    (waiting,) = said(known, replace(slow, waited_seconds=1.5))
    assert "ranks wait 50 % of it" in waiting and "20 % of exposed communication is planned" in waiting
    (other,) = said(known, replace(slow, waited_seconds=0.6))
    assert "is not as it was measured" in other and "wait" not in other
    (faster,) = said(known, replace(AS_PREDICTED, seconds=1.0, data_seconds=0.5))
    assert "is not as it was measured" in faster and "loading" not in faster


def test_the_peak_counts_too_and_on_processors_only_beyond_the_limit(plan: Plan) -> None:
    (high,) = said(plan, replace(AS_PREDICTED, peak_bytes=36 << 30))
    assert high == "the peak is 36.0 GiB, predicted 30.0 GiB of 40.0 GiB: plan with a smaller --memory"
    (low,) = said(plan, replace(AS_PREDICTED, peak_bytes=20 << 30))
    assert low.endswith("a larger batch may fit")
    on_cpus = replace(plan, cluster=Cluster.parse("8xCPU"))
    assert said(on_cpus, replace(AS_PREDICTED, peak_bytes=39 << 30)) == []
    assert len(said(on_cpus, replace(AS_PREDICTED, peak_bytes=41 << 30))) == 1


def test_the_median_leaves_out_the_first_steps_and_those_beside_a_save() -> None:
    slow, saving = replace(AS_PREDICTED, seconds=9.0), replace(AS_PREDICTED, seconds=5.0, saving=True)
    assert typical_seconds([slow, slow, AS_PREDICTED, saving, saving]) == 1.5
    assert typical_seconds([slow, slow]) == 9.0
