"""The texts: plain FSDP2, with what Lightning and torchtitan need, and settings of transformers and Accelerate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from osdp.cluster import format_bytes
from osdp.errors import UsageError
from osdp.export import degrade
from osdp.export.degrade import Change, Degraded, degraded
from osdp.export.python_text import fsdp2_text, lightning_text, torchtitan_text
from osdp.export.settings_text import accelerate_text, transformers_text
from osdp.model.graph import ModelGraph
from osdp.planfile import Plan
from osdp.sharding import FREE, KEEP

if TYPE_CHECKING:
    from torch import nn

_PLAIN: tuple[Change, ...] = (
    degrade.without_slices,
    degrade.without_two_levels,
    degrade.without_joined_reductions,
    degrade.without_inputs_on_host,
)
_TRANSFORMERS: tuple[Change, ...] = (
    *_PLAIN,
    degrade.without_host,
    degrade.whole_blocks,
    degrade.keep_or_free,
    degrade.recompute_all_or_none,
    degrade.without_late_reductions,
    degrade.without_lasting_gathers,
)
_ACCELERATE: tuple[Change, ...] = (
    *_PLAIN,
    degrade.without_host,
    degrade.whole_blocks,
    degrade.recompute_all_or_none,
    degrade.all_late_reductions,
    degrade.without_lasting_gathers,
)
_EVERY_MICRO_BATCH = (*_PLAIN, degrade.without_late_reductions, degrade.without_lasting_gathers)
# For each target the ways to change a plan into its own; the fastest that fits is taken.
CHANGES: Mapping[str, Sequence[Sequence[Change]]] = {
    "fsdp2": (_PLAIN,),
    "transformers": (_TRANSFORMERS,),
    "accelerate": tuple((*_ACCELERATE, degrade.blocks_in(mode)) for mode in (KEEP, FREE)),
    "lightning": (_EVERY_MICRO_BATCH,),
    "torchtitan": (_EVERY_MICRO_BATCH,),
}
TARGETS = tuple(CHANGES)


@dataclass(frozen=True)
class Export:
    """The text for a target, and what is left of the plan there."""

    text: str
    degraded: Degraded
    notes: tuple[str, ...]


def export(plan: Plan, graph: ModelGraph, model: nn.Module, *, target: str) -> Export:
    """The plan as code or settings of a target; `model` is the planned one, on the meta device."""
    if target not in CHANGES:
        raise UsageError(f"{target!r} is no target; choose one of {', '.join(TARGETS)}")
    if target == "transformers" and not hasattr(model, "config"):
        raise UsageError("transformers runs its own models, and this is none; choose --to fsdp2")
    if target == "transformers" and plan.precision == "fp16":
        raise UsageError("transformers' own sharding computes in bf16 or fp32, and the plan in fp16; choose --to fsdp2")
    ways = [degraded(plan, graph, changes) for changes in CHANGES[target]]
    left = max(ways, key=lambda way: (way.fits, way.samples_per_second))
    notes = tuple(_notes(plan, left, target))
    head = "\n".join(f"# {line}".rstrip() for line in notes)
    write = {
        "fsdp2": fsdp2_text,
        "lightning": lightning_text,
        "torchtitan": torchtitan_text,
        "transformers": transformers_text,
        "accelerate": accelerate_text,
    }[target]
    return Export(write(left.plan, head, model), left, notes)


def _notes(plan: Plan, left: Degraded, target: str) -> list[str]:
    before, now = plan.predicted, left
    lines = [
        f"{plan.model.name} on {plan.cluster.label}, as osdp export --to {target} writes it.",
        f"The plan: {before.samples_per_second:.4g} samples/s predicted,"
        f" {format_bytes(before.peak_bytes)} of {format_bytes(before.limit_bytes)}.",
    ]
    if not left.lost:
        lines.append(f"{target} can express all of it.")
    else:
        lines.append(f"{target} cannot express:")
        lines += [f"  - {sentence}" for sentence in left.lost]
        change = now.samples_per_second / before.samples_per_second - 1 if before.samples_per_second else 0.0
        fits = "" if left.fits else ": DOES NOT FIT"
        lines.append(
            f"Without it: {now.samples_per_second:.4g} samples/s predicted ({change:+.1%}),"
            f" {format_bytes(now.peak_bytes)} of {format_bytes(before.limit_bytes)}{fits}."
        )
    if plan.cluster.engine.name != "fsdp2":
        lines.append("These figures are for osdp's runtime: on CPUs FSDP2 alone waits for every collective.")
    return lines
