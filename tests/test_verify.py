"""Claims: `osdp verify` finds a plan's peak and collectives equal to those of the real runtime, and says where not.

- The collectives of a dry run are those of the planned graph, in order and to the byte, on both engines.
- The peak is equal to the byte, and so is every part of it; with reductions once a step it is never too low.
- A plan, or a graph, that was tampered with does not agree.
- A search under a wrong cost model is corrected by dry runs until what it finds fits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from odd_models import Model, Repeated, Returning, Twice, data, odd_graph
from planned import plan_by_hand
from small_models import captured, source
from torch import Tensor

from osdp.cli.main import main
from osdp.cluster import Cluster
from osdp.cost.graph import PlannedCollective, StepGraph, step_graph_of
from osdp.cost.units import OPERATORS
from osdp.errors import DoesNotFit
from osdp.model.capture import scaled_inputs
from osdp.planfile import Plan
from osdp.runtime import dryrun
from osdp.sharding import FREE, FREE_IN_NODE, FREE_TO_NODE, KEEP, KEEP_IN_NODE, REPLICATE
from osdp.verify import Verification, plan_verified, tallied, verify

pytestmark = pytest.mark.filterwarnings("ignore:.*returned a view tensor.*")

EVERY_MODE = (FREE, KEEP, REPLICATE, FREE_TO_NODE, FREE_IN_NODE, KEEP_IN_NODE)
STOCK, CARRIED = "A100-80GB", "CPU"
SCALARS = 8  # the loss and its gradient


def planned(model: str, world: str, device: str, **changes: Any) -> tuple[Plan, StepGraph]:
    """A plan by hand with the prediction that its graph gives."""
    plan = plan_by_hand(model, world, device=device, **changes)
    graph = step_graph_of(plan, captured(model, "bf16" if plan.precision != "fp32" else "fp32", device))
    peak = graph.timeline().peak
    predicted = replace(plan.predicted, peak_bytes=peak.nbytes, peak_at=str(peak), memory_parts=peak.parts)
    return replace(plan, predicted=predicted), graph


def verified(model: str, plan: Plan) -> Verification:
    ours = source(model)
    graph = captured(model, "bf16" if plan.precision != "fp32" else "fp32", plan.cluster.device.name)
    return verify(plan, graph, build=ours.build_on_meta, inputs=ours.inputs, loss=ours.loss)


@dataclass(frozen=True)
class Case:
    model: str
    world: str
    device: str
    changes: dict[str, Any]
    exact: bool = True  # the peak is equal, else it may be too high

    def __str__(self) -> str:
        return "-".join([self.model, self.world, self.device, *self.changes])


ONCE = {"accumulation": 2, "reduce_once": (True, False)}
CASES = [
    Case("gpt", "2x2", STOCK, {"modes": EVERY_MODE, "granularity": OPERATORS, "recompute": (True, False)}),
    Case("gpt", "2x2", STOCK, {"modes": EVERY_MODE, "accumulation": 4}),
    Case("gpt", "4", STOCK, {"modes": (FREE, KEEP, REPLICATE), **ONCE}, exact=False),
    Case("gpt", "2x2", CARRIED, {"modes": EVERY_MODE, "precision": "bf16"}),
    Case("gpt", "2x2", CARRIED, {"modes": EVERY_MODE, "granularity": OPERATORS, "recompute": (True,)}),
    Case("gpt-uneven", "3", CARRIED, {"modes": (FREE, KEEP, REPLICATE)}),
    Case("stacked", "2x2", STOCK, {"modes": (FREE, KEEP), "precision": "bf16"}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_dry_run_is_what_was_planned(case: Case) -> None:
    plan, graph = planned(case.model, case.world, case.device, **case.changes)
    found = verified(case.model, plan)
    assert found.first_difference is None
    assert len(found.issued) == len(graph.collectives(found.micro_batches)) > 0
    off = found.predicted_peak_bytes - found.measured_peak_bytes
    assert -SCALARS <= off <= (SCALARS if case.exact else 0.05 * found.measured_peak_bytes)
    assert sum(found.measured_parts.values()) == found.measured_peak_bytes
    if case.exact:
        assert all(
            abs(nbytes - found.measured_parts[part]) <= SCALARS for part, nbytes in found.predicted_parts.items()
        )


@pytest.mark.parametrize(
    ("world", "device", "recompute"),
    [("2x2", STOCK, (True, False)), ("3", CARRIED, (False,))],
)
def test_slices_are_gathered_one_by_one_in_their_own_sizes(
    world: str, device: str, recompute: tuple[bool, ...]
) -> None:
    """Three slices of 16 columns are 6, 5 and 5."""
    splits = ((3, 2), (2, 2), (4, 1))
    modes = EVERY_MODE if world == "2x2" else (FREE, KEEP)
    shape = {"granularity": OPERATORS, "splits": splits, "recompute": recompute}
    plan = plan_by_hand(odd_graph(Model), world, modes=modes, device=device, **shape)
    found = verify(plan, odd_graph(Model), build=Model, inputs=scaled_inputs(data(2, seed=0)))
    assert any(unit.splits == 3 for unit in plan.units)
    assert found.first_difference is None


@pytest.mark.parametrize(
    ("kind", "device", "modes"),
    [
        (Twice, STOCK, EVERY_MODE),
        (Twice, CARRIED, (FREE,)),
        (Repeated, STOCK, (FREE,)),
        (Returning, CARRIED, EVERY_MODE),
    ],
)
def test_modules_called_several_times_are_gathered_with_each_call_and_reduced_once(
    kind: type[Model], device: str, modes: tuple[str, ...]
) -> None:
    graph = odd_graph(kind)
    for recompute in ((False,), (True,)) if graph.blocks else ((False,),):
        plan = plan_by_hand(graph, "2x2", modes=modes, granularity=OPERATORS, recompute=recompute, device=device)
        planned = step_graph_of(plan, graph)
        plan = replace(plan, predicted=replace(plan.predicted, peak_bytes=planned.timeline().peak_bytes))
        found = verify(plan, graph, build=kind, inputs=scaled_inputs(data(2, seed=0)))
        assert found.first_difference is None
        reductions = [each for each in planned.nodes if each.kind in ("reduce_scatter", "all_reduce")]
        assert {node.name for node in reductions} == {unit.name for unit in plan.units}
        assert -0.005 <= found.error <= 0.001  # a gather that nobody uses is not in the timeline


def test_a_tampered_graph_does_not_match() -> None:
    plan, _ = planned("gpt", "2x2", STOCK, modes=EVERY_MODE)
    found = verified("gpt", plan)
    assert found.ok
    swapped = (found.planned[1], found.planned[0], *found.planned[2:])
    assert swapped[0] != swapped[1]
    first = found.planned[0]
    for wrong, words in (
        (swapped, "collective 1 is planned as"),
        ((first._replace(nbytes=first.nbytes + 2), *found.planned[1:]), "collective 1 is planned as"),
        (found.planned[:-1], "and not planned"),
        ((*found.planned, PlannedCollective("all_gather", "world", 2, "more")), "and never issued"),
    ):
        tampered = replace(found, planned=wrong)
        assert not tampered.collectives_match and not tampered.ok
        assert words in (tampered.first_difference or "")
        assert tampered.to_dict()["collectives_match"] is False


def test_a_plan_whose_modes_were_changed_does_not_agree_with_its_claims() -> None:
    plan, _ = planned("gpt", "2x2", STOCK, modes=(FREE,), precision="bf16")
    changed = replace(plan, units=tuple(replace(unit, mode=REPLICATE) for unit in plan.units))
    found = verified("gpt", changed)
    assert found.error < -0.5 and not found.peak_matches and found.collectives_match


def test_collectives_are_tallied_by_kind_and_group() -> None:
    _, graph = planned("gpt", "2x2", STOCK, modes=(KEEP_IN_NODE,))
    tallies = tallied([each.record for each in graph.collectives()])
    assert [(tally.kind, tally.group) for tally in tallies] == [
        ("all_gather", "node"),
        ("reduce_scatter", "node"),
        ("all_reduce", "across"),
    ]
    assert tallies[1].nbytes == 2 * tallies[2].nbytes  # each of two ranks has half of what the node scatters


# ---- searching again


def searched(wrong_by: int) -> tuple[Callable[[Cluster], Plan], Callable[[Plan], Verification], list[int]]:
    """A search that fills its limit, under a model that is `wrong_by` bytes too low; and the limits given to it."""
    plan, _ = planned("gpt", "2x2", STOCK, modes=(FREE,))
    truth = Verification(1, 1, "", "", {}, {}, (), (), 1)
    limits: list[int] = []

    def search(cluster: Cluster) -> Plan:
        limits.append(cluster.limit_bytes)
        return replace(
            plan,
            cluster=cluster,
            batch_size=len(limits),
            predicted=replace(plan.predicted, peak_bytes=cluster.limit_bytes, samples_per_second=cluster.limit_bytes),
        )

    def check(found: Plan) -> Verification:
        peak = found.predicted.peak_bytes
        return replace(truth, predicted_peak_bytes=peak, measured_peak_bytes=peak + wrong_by)

    return search, check, limits


@pytest.mark.parametrize("wrong_by", [3 << 30, -(3 << 30), 0])
def test_the_limit_is_corrected_until_the_truth_fits(wrong_by: int) -> None:
    cluster = Cluster.parse("2x2xA100-80GB")
    search, check, limits = searched(wrong_by)
    found = plan_verified(cluster, search, check, not_expected)
    assert found.cluster == cluster
    assert 0 <= cluster.limit_bytes - found.predicted.peak_bytes <= 8
    assert limits[0] == cluster.limit_bytes
    assert len(limits) == (1 if wrong_by == 0 else 2) or wrong_by < 0
    assert found.predicted.limit_bytes in (0, cluster.limit_bytes)


def not_expected(truth: Verification) -> DoesNotFit:
    raise AssertionError(f"a plan fits, and {truth} was called a misfit")


def test_where_no_dry_run_fits_the_error_is_of_the_one_that_needs_least() -> None:
    """The truth is always 1 GiB and a little above the limit, least in the second round."""
    cluster = Cluster.parse("4xA100-80GB")
    search, _, limits = searched(0)
    seen: list[Verification] = []

    def check(plan: Plan) -> Verification:
        above = cluster.limit_bytes + (1 << 30) + abs(len(limits) - 2)
        return Verification(plan.predicted.peak_bytes, above, "", f"round {len(limits)}", {}, {}, (), (), 1)

    def misfit(truth: Verification) -> DoesNotFit:
        seen.append(truth)
        return DoesNotFit(
            "no", peak_bytes=truth.measured_peak_bytes, limit_bytes=0, peak_at="", memory_parts={}, remedies=()
        )

    with pytest.raises(DoesNotFit):
        plan_verified(cluster, search, check, misfit)
    assert [truth.measured_at for truth in seen] == ["round 2"]
    assert len(limits) == 4


def test_a_plan_whose_dry_run_fits_is_kept_when_a_corrected_limit_allows_none() -> None:
    """The first prediction is far too high: the limit is raised, the next dry run exceeds it, and no third plan is."""
    cluster = Cluster.parse("4xA100-80GB")
    search, _, limits = searched(0)

    def until_the_third(given: Cluster) -> Plan:
        if len(limits) == 2:
            raise DoesNotFit("no", peak_bytes=1, limit_bytes=0, peak_at="", memory_parts={}, remedies=())
        return search(given)

    def check(plan: Plan) -> Verification:
        truth = plan.predicted.peak_bytes // 2 if len(limits) == 1 else 1 << 40
        return Verification(plan.predicted.peak_bytes, truth, "", "", {}, {}, (), (), 1)

    assert plan_verified(cluster, until_the_third, check, not_expected).batch_size == 1


# ---- the command


def small_model() -> tuple[Model, tuple[Tensor, Tensor]]:
    return Model(), data(2, seed=0)


def test_the_command_verifies_what_plan_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    model = f"{__name__}:small_model"
    arguments = ["plan", model, "--cluster", "2x2xA100-40GB", "--batch", "2", "-o", str(file), "--quiet"]
    assert main([*arguments, "--verify"]) == 0
    assert "verified: a dry run of this plan peaks at" in capsys.readouterr().out
    assert main(["verify", str(file), "--json"]) == 0
    out, progress = capsys.readouterr()
    document = json.loads(out)
    assert document["collectives_match"] and document["ok"]
    assert abs(document["predicted_peak_bytes"] - document["measured_peak_bytes"]) <= SCALARS
    assert document["collectives"]["planned"] == document["collectives"]["issued"] != []
    assert document["memory_parts"]["measured"].keys() == document["memory_parts"]["predicted"].keys()
    assert "rank 0 of 4" in progress

    plan = Plan.load(file)
    replace(plan, predicted=replace(plan.predicted, peak_bytes=plan.predicted.peak_bytes * 9 // 10)).save(file)
    assert main(["verify", str(file), "--quiet"]) == 1
    page, error = capsys.readouterr()
    assert "DIFFERS  peak memory" in page and "agrees  collectives" in page
    assert "plan again" in error


def test_the_command_answers_a_truth_that_never_fits_as_it_answers_a_misfit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dry runs that need 1 GiB more than they do: what the search's tables cannot know."""
    true = dryrun.DryRun.peak_bytes.fget
    assert true is not None
    monkeypatch.setattr(dryrun.DryRun, "peak_bytes", property(lambda run: true(run) + (1 << 30)))
    arguments = ["plan", f"{__name__}:small_model", "--cluster", "2x2xA100-40GB", "--batch", "2", "--memory", "512MiB"]
    assert main([*arguments, "--quiet", "--verify", "--json"]) == 3
    out, err = capsys.readouterr()
    error = json.loads(out)["error"]
    assert error["peak_bytes"] > 1 << 30 > error["limit_bytes"]
    assert "No plan fits" in err and "What would help" in err
    assert "of memory on each device" in error["remedies"][0]["change"]
    assert all(remedy["estimate"] for remedy in error["remedies"])  # another plan's dry run may find more, or less
