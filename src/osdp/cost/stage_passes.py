"""The schedule's events as the two streams' operations, pass by pass; see [Note: Streams] in osdp.search.streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from osdp.cost.layout import Layout
from osdp.cost.schedule import Do, Event
from osdp.engine import Engine
from osdp.search.streams import Act, Op, StagePass

KernelSeconds = Callable[[int, int], float]  # of the segments from one up to another


@dataclass(frozen=True)
class PassOps:
    """A pass whose kernels have no seconds yet: of each operation the segments that it computes."""

    ops: tuple[tuple[Op, tuple[int, int]], ...]
    pending: int
    pending_name: str

    def timed(self, seconds: KernelSeconds) -> StagePass:
        timed = (op._replace(seconds=seconds(*segments)) if segments != _NONE else op for op, segments in self.ops)
        return StagePass(tuple(timed), self.pending, self.pending_name)


_NONE = (0, 0)


class StagePasses:
    """The passes of a layout's stages, read off its full schedule."""

    def __init__(self, layout: Layout, events: Sequence[Event], engine: Engine) -> None:
        self._layout, self._engine = layout, engine
        self._home = [(stage, n) for stage, shaped in enumerate(layout.shaped) for n in range(len(shaped.units))]
        self._by_visit: list[list[Event]] = [[] for _ in range(2 * len(layout.shaped))]
        for event in events:
            self._by_visit[self._visit_of(event)].append(event)
        self._pending = self._pending_gathers(events)

    def _visit_of(self, event: Event) -> int:
        """The visit that an event counts for: a block's reductions are its own; see [Note: Left at the end]."""
        if event.do is not Do.REDUCE or event.piece is None or event.piece.unit.block is None:
            return event.visit
        return self._layout.visit(self._home[event.piece.index][0], True)

    def _pending_gathers(self, events: Sequence[Event]) -> dict[int, tuple[int, str]]:
        """Visits whose stage has a unit that an earlier stage of the same pass gathered ahead: which, and how."""
        found: dict[int, tuple[int, str]] = {}
        for event in events:
            if event.do not in (Do.GATHER, Do.GATHER_AGAIN) or event.piece is None:
                continue
            stage, number = self._home[event.piece.index]
            home = self._layout.visit(stage, event.visit >= len(self._layout.shaped))
            if event.visit < home and not self._enters(event.visit, event.piece.index):
                found[home] = number, event.do.value
        return found

    def _enters(self, visit: int, index: int) -> bool:
        entered = (e for e in self._by_visit[visit] if e.do in (Do.ENTER, Do.ENTER_AGAIN))
        return any(event.piece is not None and event.piece.index == index for event in entered)

    def of(self, stage: int, *, backward: bool) -> PassOps:
        visit = self._layout.visit(stage, backward)
        ops: list[tuple[Op, tuple[int, int]]] = []
        rest = Op(Act.RUN)  # what the kernels of a unit that was just entered take less, where it is split
        for event in self._by_visit[visit]:
            if event.do is Do.COMPUTE:
                ops.append((rest, event.segments))
                rest = Op(Act.RUN)
                continue
            assert event.piece is not None
            home, number = self._home[event.piece.index]
            unit = number if home == stage else (home, number)
            if event.do is Do.REDUCE:
                ops += [(op, _NONE) for op in self._reduction(unit, event.piece.index)]
            elif event.do in (Do.ENTER, Do.ENTER_AGAIN):
                again = "_again" if event.do is Do.ENTER_AGAIN else ""
                names = (
                    f"copy{again}",
                    f"slice_run{again}",
                    *(("slice_reduce", "slice_reduce_last") if backward else ()),
                )
                ops += [(Op(Act.WAIT, unit, (f"gather{again}",)), _NONE), (Op(Act.RUN, unit, names), _NONE)]
                rest = Op(Act.RUN, unit, (f"slice_rest{again}",))
            elif home == stage or self._enters(visit, event.piece.index):
                ops.append((Op(Act.ISSUE, unit, (event.do.value,)), _NONE))
            else:
                ops.append((Op(Act.ISSUE_NEXT), _NONE))
        return PassOps(tuple(ops), *self._pending.get(visit, (-1, "gather")))

    def _reduction(self, unit: int | tuple[int, int], index: int) -> list[Op]:
        if not self._layout.units[index].trained:
            return []
        copied, wait = Op(Act.RUN, unit, ("copy_reduce", "copy_reduce_last")), Op(Act.WAIT_REDUCED)
        begun = Op(Act.REDUCE, unit, ("reduce", "reduce_last"))
        return [copied, wait, begun] if self._engine.reduces_before_waiting else [wait, copied, begun]
