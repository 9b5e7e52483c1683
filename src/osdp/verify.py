"""Checks a plan against the truth: the real runtime on fake tensors, its memory and its collectives beside the plan's.

A dry run (osdp.runtime.dryrun) plays one rank of the plan's whole cluster. What it cannot see is in docs/verify.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from osdp.answer import predicted_of
from osdp.cluster import Cluster
from osdp.cost.graph import PlannedCollective, step_graph_of
from osdp.cost.positions import PARTS, SAVED, TEMPORARIES
from osdp.cost.schedule import CollectiveRecord
from osdp.errors import DoesNotFit, UsageError
from osdp.model.graph import ModelGraph
from osdp.model.inputs import output_loss
from osdp.model.trace import RawTrace
from osdp.planfile import Plan
from osdp.runtime.dryrun import InputsOf, dry_run
from osdp.runtime.memory_attribution import ACTIVATIONS
from osdp.training.optimizer import optimizer_of

TOLERANCE = 0.01  # of the measured peak
ROUNDS = 4


@dataclass(frozen=True)
class Tally:
    """Collectives of one kind in one group."""

    kind: str
    group: str
    count: int
    nbytes: int


@dataclass(frozen=True)
class Verification:
    """A plan's claims beside what its dry run did.

    Parts are those of the two peaks; saved activations and temporaries are one part, which a run does not tell apart.
    """

    predicted_peak_bytes: int
    measured_peak_bytes: int
    predicted_at: str
    measured_at: str
    predicted_parts: Mapping[str, int]
    measured_parts: Mapping[str, int]
    planned: tuple[PlannedCollective, ...]
    issued: tuple[CollectiveRecord, ...]
    micro_batches: int

    @property
    def error(self) -> float:
        """How far the prediction is from the truth, as a share of it; below 0 where it is too low."""
        return self.predicted_peak_bytes / self.measured_peak_bytes - 1

    @property
    def peak_matches(self) -> bool:
        return abs(self.error) <= TOLERANCE

    @property
    def collectives_match(self) -> bool:
        return self.first_difference is None

    @property
    def first_difference(self) -> str | None:
        """The first collective that is not the planned one, in words."""
        for place, (planned, issued) in enumerate(zip(self.planned, self.issued, strict=False)):
            if planned.record != issued:
                return (
                    f"collective {place + 1} is planned as {planned.record} for {planned.unit}, and issued as {issued}"
                )
        both = min(len(self.planned), len(self.issued))
        if len(self.planned) > both:
            return f"collective {both + 1} is planned as {self.planned[both].record}, and never issued"
        return (
            f"collective {both + 1} is issued as {self.issued[both]}, and not planned" if self.issued[both:] else None
        )

    @property
    def ok(self) -> bool:
        return self.peak_matches and self.collectives_match

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": 1,
            "ok": self.ok,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "measured_peak_bytes": self.measured_peak_bytes,
            "peak_at": {"predicted": self.predicted_at, "measured": self.measured_at},
            "memory_parts": {"predicted": dict(self.predicted_parts), "measured": dict(self.measured_parts)},
            "collectives_match": self.collectives_match,
            "first_difference": self.first_difference,
            "micro_batches": self.micro_batches,
            "collectives": {
                "planned": [vars(tally) for tally in tallied([each.record for each in self.planned])],
                "issued": [vars(tally) for tally in tallied(self.issued)],
            },
        }


def tallied(collectives: Sequence[CollectiveRecord]) -> list[Tally]:
    """One tally for each kind and group, in the order in which they first occur."""
    sizes: dict[tuple[str, str], list[int]] = {}
    for each in collectives:
        sizes.setdefault((each.kind, each.group), []).append(each.nbytes)
    return [Tally(kind, group, len(found), sum(found)) for (kind, group), found in sizes.items()]


def verify(
    plan: Plan,
    graph: ModelGraph,
    *,
    build: Callable[[], nn.Module],
    inputs: InputsOf,
    loss: Callable[[Any], Tensor] | None = None,
) -> Verification:
    """Dry-runs a plan's second training step. `graph` is the captured model; the rest is as `osdp.plan` takes it.

    A dry run compiles nothing. So a plan with compiled blocks is compared as if it were of eager code, whose capture
    `graph` is then.
    """
    if dist.is_initialized():
        raise UsageError("a process group is running here; verify a plan in a process of its own, with osdp verify")
    if plan.has_inputs_on_host or any(unit.offload for unit in plan.units):
        raise UsageError(
            "the plan has units, or inputs of blocks, on the host, which a dry run in one memory does not tell from the"
            " device's; osdp's own tests compare them on a stand-in for a device; leave verify out"
        )
    planned = step_graph_of(plan, graph)
    predicted = predicted_of(planned) if plan.compiled else plan.predicted
    run = dry_run(
        build,
        inputs,
        plan,
        loss=loss or output_loss,
        watched=partial(_watched, plan),
        optimizer=partial(optimizer_of, plan.optimizer, lr=1e-3),
    )
    return Verification(
        predicted_peak_bytes=predicted.peak_bytes,
        measured_peak_bytes=run.peak_bytes,
        predicted_at=predicted.peak_at,
        measured_at=_peak_at(run.trace),
        predicted_parts=_comparable(predicted.memory_parts),
        measured_parts=_comparable(run.peak_parts),
        planned=tuple(planned.collectives(run.micro_batches)),
        issued=run.issued,
        micro_batches=run.micro_batches,
    )


def _watched(plan: Plan, model: nn.Module) -> dict[str, nn.Module]:
    """The modules that say where a peak is: those of the units."""
    return {name: model.get_submodule(name) for unit in plan.units for name in unit.modules}


def _comparable(parts: Mapping[str, int]) -> dict[str, int]:
    """Parts in the words of a run, in a fixed order; see [Note: Whose] in osdp.runtime.memory_attribution."""
    merged = {**parts, ACTIVATIONS: sum(parts.get(name, 0) for name in (SAVED, TEMPORARIES, ACTIVATIONS))}
    names = [ACTIVATIONS if name == SAVED else name for name in PARTS if name != TEMPORARIES]
    return {name: merged.get(name, 0) for name in names}


def _peak_at(trace: RawTrace) -> str:
    """Where most bytes are alive, in the words of osdp.cost.timeline."""
    peak = trace.live.index(max(trace.live))
    name, phase = "", "forward"
    for mark, kernel in zip(trace.marks, trace.mark_kernel, strict=True):
        if kernel > peak:
            break
        phase = {"begin": "forward", "turn": "backward"}.get(mark.kind, phase)
        name = mark.name or name
        if mark.kind == "optimizer":
            return "the update in the optimizer step"
    return f"{name} in {phase}"


def plan_verified(
    cluster: Cluster,
    search: Callable[[Cluster], Plan],
    check: Callable[[Plan], Verification],
    misfit: Callable[[Verification], DoesNotFit],
) -> Plan:
    """Searches until a plan's dry run fits the memory and its prediction agrees with it, or four rounds are over.

    Each round gives the search a limit that is corrected by the last prediction's error. The answer's peak is measured.
    Where no dry run fits, `misfit` makes the error out of the one that needs least.
    """
    limit = cluster.limit_bytes
    fitting: list[Plan] = []
    exceeding: list[Verification] = []
    searched, last = limit, None
    for _ in range(ROUNDS):
        try:
            found = _planned_within(cluster, searched, search)
        except DoesNotFit:
            if last is None:
                raise
            break  # under the corrected limit nothing fits: what was found under others decides
        if last is not None and found.units == last.units and found.batch_size == last.batch_size:
            break
        last, truth = found, check(found)
        off = truth.measured_peak_bytes - truth.predicted_peak_bytes
        if truth.measured_peak_bytes <= limit:
            fitting.append(_measured(found, truth))
            if off >= -TOLERANCE * truth.measured_peak_bytes:
                break
        else:
            exceeding.append(truth)
        searched = max(1, limit - off)
    if not fitting:
        raise misfit(min(exceeding, key=lambda truth: truth.measured_peak_bytes))
    return max(fitting, key=lambda plan: plan.predicted.samples_per_second)


def _planned_within(cluster: Cluster, limit: int, search: Callable[[Cluster], Plan]) -> Plan:
    """A plan for the cluster, found under another limit than its own."""
    if limit == cluster.limit_bytes:
        return search(cluster)
    found = search(cluster.with_limit(limit))
    reserve = sum(cluster.reserve.values())
    predicted = replace(found.predicted, limit_bytes=cluster.limit_bytes, reserve_bytes=reserve)
    return replace(found, cluster=cluster, predicted=predicted)


def _measured(plan: Plan, truth: Verification) -> Plan:
    if truth.measured_peak_bytes == plan.predicted.peak_bytes:
        return plan
    predicted = replace(
        plan.predicted,
        peak_bytes=truth.measured_peak_bytes,
        peak_at=truth.measured_at,
        memory_parts=truth.measured_parts,
    )
    return replace(plan, predicted=predicted)
