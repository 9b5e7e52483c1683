"""The traced runs of one fake model with its blocks compiled; see [Note: Compiled traces] in compiled_blocks.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from osdp.model.compiled_blocks import CompiledBlocks, StageTraces, reason_of, with_levels
from osdp.model.compiled_growth import fit_levels
from osdp.model.graph import Trace
from osdp.model.inputs import CaptureError
from osdp.model.runs import Runner
from osdp.model.stages import build_trace, cut_stages
from osdp.model.trace import RawTrace
from osdp.recompute import Recompute

COMPILED_BATCHES = (2, 8)  # far apart, so that what is off at one of them is not far off at others

Stages = Sequence[tuple[str | None, StageTraces]]
"""Every stage: its block, None outside of blocks, and its traces."""

Which = Callable[[StageTraces], Trace | None]


@dataclass(frozen=True)
class CompiledTraces:
    """The traces of every stage with blocks compiled, and a line for all that has the memory of eager code."""

    stages: tuple[StageTraces, ...]
    notes: tuple[str, ...]


def try_compiled(run: Runner, batches: Sequence[int], eager: Stages) -> CompiledTraces:
    """Traces the step with its blocks compiled; `batches` are those of the eager traces.

    What cannot be traced so keeps the trace of eager code.
    """
    batches = COMPILED_BATCHES if len(batches) > 1 else batches
    names = [block for block, _ in eager if block is not None]
    try:
        compiled = CompiledBlocks(run.model, names, run.mode)
        taken = _Taken(replace(run, pace=None), batches, eager, compiled)
        plain, again = taken.plain(), taken.recomputed()
    except Exception as error:
        return CompiledTraces(
            tuple(traces._replace(on_host=None) for _, traces in eager),
            (f"compiled blocks have the memory of eager code: a step with them was not traced ({reason_of(error)})",),
        )
    notes = []
    try:
        selective = taken.selective(again)
    except Exception as error:
        selective = [traces.selective for _, traces in eager]
        notes = [f"selectively recomputed blocks have the memory of eager code ({reason_of(error)})"]
    whole = [
        f"{kind} blocks have the memory of eager code: torch.compile does not take one as a whole ({reason})"
        for kind, reason in compiled.failed.items()
    ]
    return CompiledTraces(tuple(map(StageTraces, plain, again, selective)), (*whole, *notes))


@dataclass(frozen=True)
class _Taken:
    run: Runner
    batches: Sequence[int]
    eager: Stages
    compiled: CompiledBlocks

    def plain(self) -> list[Trace]:
        found = self._traced(lambda traces: traces.plain, Recompute.NONE)
        return [each for each in found if each is not None]

    def recomputed(self) -> list[Trace | None]:
        return self._traced(lambda traces: traces.recomputed, Recompute.FULL)

    def selective(self, recomputed: Sequence[Trace | None]) -> list[Trace | None]:
        found = self._traced(lambda traces: traces.selective, Recompute.SELECTIVE)
        for (block, _), full, other in zip(self.eager, recomputed, found, strict=True):
            # what a checkpoint around a block holds for it, one inside may not: stages outside blocks have the former
            if block is None and full is not None and other is not None and not _is_above(full, other):
                raise CaptureError("it changes what is held outside blocks")
        return found

    def _traced(self, which: Which, how: Recompute) -> list[Trace | None]:
        blocks = [block for block, traces in self.eager if how and block is not None and which(traces) is not None]
        if how and not blocks:
            return [None] * len(self.eager)
        raw = {batch: self._step(batch, blocks, how) for batch in self.batches}
        parameters = self.run.model.named_parameters()
        trace = fit_levels(raw, {name: each.numel() * each.element_size() for name, each in parameters})
        cuts = cut_stages(trace, self.run.blocks, set(self.run.outermost) - set(self.run.blocks))
        if cuts is None or [cut.block for cut in cuts] != [block for block, _ in self.eager]:
            raise CaptureError("its backward runs in another order")
        found: list[Trace | None] = []
        for (_, traces), cut in zip(self.eager, cuts, strict=True):
            own = which(traces)
            found.append(None if own is None else with_levels(own, build_trace(trace, cut)))
        return found

    def _step(self, batch: int, blocks: Sequence[str], how: Recompute) -> RawTrace:
        """One step; once more where a block was found not to compile: what its error refers to stays alive."""
        while True:
            known = self.compiled.eager_blocks
            trace = self.run.compiled(self.compiled, batch, blocks, how)
            if self.compiled.eager_blocks == known:
                return trace


def _is_above(one: Trace, other: Trace) -> bool:
    """Whether one trace of a stage holds at least what the other does, everywhere."""

    def levels(trace: Trace, batch: int) -> list[int]:
        saved = trace.forward_delta.at(batch)
        found = [level for each in trace.forward for level in (each.peak_at(batch), each.end.at(batch))]
        return found + [saved + level for each in trace.backward for level in (each.peak_at(batch), each.end.at(batch))]

    marks = [[each.mark for each in (*trace.forward, *trace.backward)] for trace in (one, other)]
    return marks[0] == marks[1] and all(
        mine >= theirs
        for batch in (1, 1 << 20)
        for mine, theirs in zip(levels(one, batch), levels(other, batch), strict=True)
    )
