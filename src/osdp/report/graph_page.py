"""The distributed computation graph in short: equal stages together, and totals by collective."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from osdp.report.grouping import label_of, merged

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


class StepNode(Protocol):
    """What this page reads of a node of the step's graph."""

    @property
    def kind(self) -> str: ...
    @property
    def phase(self) -> str: ...
    @property
    def stage(self) -> str: ...
    @property
    def group(self) -> str | None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def flops(self) -> int: ...
    @property
    def seconds(self) -> float: ...


@dataclass(frozen=True)
class Tally:
    """Nodes of one kind and group taken together."""

    kind: str
    group: str | None
    count: int
    nbytes: int
    flops: int
    seconds: float


@dataclass(frozen=True)
class StageRow:
    """Stages that do the same in a phase; the tallies are those of one of them."""

    phase: str
    stages: tuple[str, ...]
    tallies: tuple[Tally, ...]

    @property
    def label(self) -> str:
        return label_of(self.stages)


@dataclass(frozen=True)
class GraphPage:
    """`totals` are of the whole step, one tally for each kind and group."""

    nodes: int
    stages: tuple[StageRow, ...]
    totals: tuple[Tally, ...]


def graph_page(nodes: Sequence[StepNode]) -> GraphPage:
    # Nodes of neighbouring stages may alternate, as a collective is issued while another stage computes.
    passes = [
        StageRow(found[0].phase, (found[0].stage,), tallied(found))
        for found in merged(nodes, key=lambda node: (node.phase, node.stage))
    ]
    rows = tuple(
        StageRow(alike[0].phase, tuple(name for row in alike for name in row.stages), alike[0].tallies)
        for alike in merged(passes, key=_key)
    )
    return GraphPage(len(nodes), rows, tallied(nodes))


def _key(row: StageRow) -> tuple[object, ...]:
    parent, _, last = row.stages[0].rpartition(".")
    same = [(tally.kind, tally.group, tally.count, tally.nbytes, tally.flops) for tally in row.tallies]
    return row.phase, parent if last.isdecimal() else row.stages[0], tuple(same)


def tallied(nodes: Iterable[StepNode]) -> tuple[Tally, ...]:
    """One tally for each kind and group, in the order in which they first occur."""
    return tuple(
        Tally(
            kind=alike[0].kind,
            group=alike[0].group,
            count=len(alike),
            nbytes=sum(node.nbytes for node in alike),
            flops=sum(node.flops for node in alike),
            seconds=sum(node.seconds for node in alike),
        )
        for alike in merged(nodes, key=lambda node: (node.kind, node.group))
    )
