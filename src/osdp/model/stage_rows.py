"""Turns the traces of a model's stages into the stages of its graph: which are alike, and what each has of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from osdp.model.graph import Operator, Stage, Trace
from osdp.model.stages import shape_of
from osdp.model.structure import find_parts, operators_below, signature
from osdp.planfile import Granularity


class TracedStage(NamedTuple):
    """The traces of a stage of the full model; see `Stage`."""

    block: str | None
    plain: Trace
    recomputed: Trace | None
    selective: Trace | None
    on_host: Trace | None


def numbered_stages(
    stages: Sequence[TracedStage],
    modules: Mapping[str, nn.Module],
    operators: Mapping[str, Operator],
    finer: Mapping[Granularity, Sequence[TracedStage] | None],
) -> tuple[Stage, ...]:
    kinds: dict[object, int] = {}
    numbered = []
    blocks = {stage.block for stage in stages if stage.block is not None}
    inside = {name for block in blocks for name in operators_below(modules[block], block)}
    for index, (block, plain, *others) in enumerate(stages):
        if block is None:
            entered = {s.mark.name for s in plain.forward if s.mark.kind == "enter"}
            owned = tuple(name for name in operators if name in entered and name not in inside)
            key: object = ("outside", index)
            parts: tuple[str, ...] = ()
            smaller: dict[Granularity, TracedStage | None] = {}
        else:
            owned = tuple(operators_below(modules[block], block))
            parts = tuple(find_parts(modules[block], block))
            smaller = {each: None if traced is None else traced[index] for each, traced in finer.items()}
            every = (stages[index], *(each for each in smaller.values() if each is not None))
            shapes = [trace and shape_of(trace, block) for _, *traces in every for trace in traces]
            key = (signature(modules[block]), *smaller, *shapes)
        name = block or ("start" if index == 0 else "end" if index + 1 == len(stages) else f"between.{index}")
        number = kinds.setdefault(key, len(kinds))
        recomputed, selective, on_host = others
        stage = Stage(name, block is not None, number, owned, parts, plain, recomputed, selective, on_host)
        by = {each: None if traced is None else _as_traced(stage, traced) for each, traced in smaller.items()}
        numbered.append(replace(stage, finer=by) if by else stage)
    return tuple(numbered)


def _as_traced(stage: Stage, traced: TracedStage) -> Stage:
    """The stage with other traces, timed as its own."""

    def timed(trace: Trace, own: Trace | None) -> Trace:
        return replace(trace, timed_as=(own or stage.plain).signature)

    return replace(
        stage,
        plain=timed(traced.plain, stage.plain),
        recomputed=traced.recomputed and timed(traced.recomputed, stage.recomputed),
        selective=traced.selective and timed(traced.selective, stage.selective),
        on_host=traced.on_host and timed(traced.on_host, stage.on_host),
    )
