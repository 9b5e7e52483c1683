"""The schedule's events as the two streams' operations, pass by pass; see [Note: Streams] in osdp.search.streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
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
    pending: tuple[int, ...]
    pending_names: tuple[str, ...]

    def timed(self, seconds: KernelSeconds) -> StagePass:
        timed = (op._replace(seconds=seconds(*segments)) if segments != _NONE else op for op, segments in self.ops)
        return StagePass(tuple(timed), self.pending, self.pending_names)


_NONE = (0, 0)
_GATHERS = {Do.GATHER: ("gather", "gather_first"), Do.GATHER_BACKWARD: ("gather_again",)}  # what they take


class StagePasses:
    """The passes of a layout's stages, read off its full schedule; units that are `carried` begin no reduction.

    Where the layout has some of a model's stages only, `places` are theirs in the model.
    """

    def __init__(
        self,
        layout: Layout,
        events: Sequence[Event],
        engine: Engine,
        carried: Set[int] = frozenset(),
        places: Sequence[int] | None = None,
    ) -> None:
        self._places = range(len(layout.staged)) if places is None else places
        self._layout, self._engine, self._carried = layout, engine, carried
        self._home = [(stage, n) for stage, staged in enumerate(layout.staged) for n in range(len(staged.units))]
        self._by_pass: list[list[Event]] = [[] for _ in range(2 * len(layout.staged))]
        for event in events:
            self._by_pass[self._pass_of(event)].append(event)
        self._pending = self._pending_gathers(events)

    def _pass_of(self, event: Event) -> int:
        """The pass that an event counts for: a block's reductions are its own; see [Note: Left at the end]."""
        if event.do is not Do.REDUCE or event.piece is None or event.piece.unit.block is None:
            return event.stage_pass
        return self._layout.stage_pass(self._home[event.piece.index][0], True)

    def _pending_gathers(self, events: Sequence[Event]) -> dict[int, tuple[tuple[int, ...], tuple[str, ...]]]:
        """Passes whose stage has units that an earlier stage of the same pass gathered ahead: which, and how."""
        found: dict[int, tuple[tuple[int, ...], tuple[str, ...]]] = {}
        for event in events:
            if event.do not in _GATHERS or event.piece is None:
                continue
            stage, number = self._home[event.piece.index]
            home = self._layout.stage_pass(stage, event.stage_pass >= len(self._layout.staged))
            if event.stage_pass < home and not self._enters(event.stage_pass, event.piece.index):
                earlier, _ = found.get(home, ((), ()))
                found[home] = (*(unit for unit in earlier if unit != number), number), _GATHERS[event.do]
        return found

    def _enters(self, stage_pass: int, index: int) -> bool:
        entered = (e for e in self._by_pass[stage_pass] if e.do in (Do.ENTER, Do.ENTER_BACKWARD))
        return any(event.piece is not None and event.piece.index == index for event in entered)

    def of(self, stage: int, *, backward: bool) -> PassOps:
        stage_pass = self._layout.stage_pass(stage, backward)
        ops: list[tuple[Op, tuple[int, int]]] = []
        rest = Op(Act.RUN)  # what the kernels of a unit that was just entered take less, where it is split
        for event in self._by_pass[stage_pass]:
            if event.do is Do.COMPUTE:
                ops.append((rest, event.segments))
                rest = Op(Act.RUN)
                continue
            assert event.piece is not None
            home, number = self._home[event.piece.index]
            unit = number if home == stage else (self._places[home], number)
            if event.do is Do.REDUCE:
                ops += [(op, _NONE) for op in self._reduction(unit, event.piece.index)]
            elif event.do in (Do.ENTER, Do.ENTER_BACKWARD):
                is_again = event.do is Do.ENTER_BACKWARD
                again = "_again" if is_again else ""
                names = (
                    *(("copy_again",) if is_again else ("copy", "copy_first")),
                    f"slice_run{again}",
                    *(("slice_reduce", "slice_reduce_last") if backward else ()),
                )
                waited = _GATHERS[Do.GATHER_BACKWARD if is_again else Do.GATHER]
                ops += [(Op(Act.WAIT, unit, waited), _NONE), (Op(Act.RUN, unit, names), _NONE)]
                rest = Op(Act.RUN, unit, (f"slice_rest{again}",))
            elif home == stage or self._enters(stage_pass, event.piece.index):
                ops.append((Op(Act.ISSUE, unit, _GATHERS[event.do]), _NONE))
            elif not ops or ops[-1][0].act is not Act.ISSUE_NEXT:  # one stands for all of them
                ops.append((Op(Act.ISSUE_NEXT), _NONE))
        return PassOps(tuple(ops), *self._pending.get(stage_pass, ((), _GATHERS[Do.GATHER])))

    def _reduction(self, unit: int | tuple[int, int], index: int) -> list[Op]:
        if not self._layout.units[index].trained:
            return []
        copied, wait = Op(Act.RUN, unit, ("copy_reduce", "copy_reduce_last")), Op(Act.WAIT_REDUCED)
        if index in self._carried:
            return [copied]
        begun = Op(Act.REDUCE, unit, ("reduce", "reduce_last"))
        return [copied, wait, begun] if self._engine.reduces_before_waiting else [wait, copied, begun]
