"""Candidates: a way to train with its batch, recompute and switches, or with a plan; and how each is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from osdp.planfile import Plan

from .bench import Bench, Build
from .data_parallel import alone
from .job import FULL, NONE
from .log import Line
from .planned import planned, planned_stage
from .rivals import ALONE, ENGINE, Rival, rivals_for

if TYPE_CHECKING:
    from .planning import Planner

BY_PLAN = "by the plan"


@dataclass(frozen=True)
class Candidate:
    way: str
    batch: int
    recompute: str = NONE
    switches: Mapping[str, Any] = field(default_factory=dict)
    plan: str = ""  # the digest of the plan that it follows

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __hash__(self) -> int:
        return hash((self.way, self.batch, self.recompute, self.plan))

    @staticmethod
    def of(line: Line) -> Candidate:
        return Candidate(line["way"], line["batch"], line["recompute"], line["switches"], line["plan"])


class Ways:
    """The ways of a setting; those that a plan guides are built from the plans in the log."""

    def __init__(self, bench: Bench, planner: Callable[[], Planner]) -> None:
        self._bench, self._planner = bench, planner
        setting = bench.setting
        self.rivals = {rival.name: rival for rival in rivals_for(setting.hosts, setting.ranks_per_host)}
        self.rivals = {ENGINE: Rival(ENGINE, self._engine, {}, recomputes=(NONE, FULL)), **self.rivals}

    def __iter__(self) -> Iterator[Rival]:
        return iter(self.rivals.values())

    def build(self, candidate: Candidate) -> Build:
        job = self._bench.job(candidate.batch, candidate.recompute, candidate.switches)
        if candidate.way == ALONE:
            return partial(alone, job)
        if candidate.plan:
            found = self._bench.log.last("plan", plan=candidate.plan)
            assert found is not None, f"no plan {candidate.plan} is in the log"
            if "stages" in found:
                return partial(planned_stage, job, [Plan.from_dict(each) for each in found["stages"]])
            return partial(planned, job, Plan.from_dict(found["document"]))
        return partial(self.rivals[candidate.way].build, job)

    def _engine(self, job: Any) -> Any:
        return planned(job, self._planner().freed(job.batch, job.recompute))
