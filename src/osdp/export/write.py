"""The texts: plain FSDP2, with what Lightning and torchtitan need, and settings of transformers and Accelerate."""

from __future__ import annotations

import textwrap
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
    degrade.without_chunked_loss,
    degrade.without_slices,
    degrade.without_two_levels,
    degrade.without_joined_reductions,
    degrade.without_inputs_on_host,
)
_TRANSFORMERS: tuple[Change, ...] = (
    degrade.without_compile,
    *_PLAIN,
    degrade.without_host,
    degrade.whole_blocks,
    degrade.keep_or_free,
    degrade.recompute_all_or_none,
    degrade.without_late_reductions,
    degrade.without_lasting_gathers,
)
_ACCELERATE: tuple[Change, ...] = (
    degrade.without_compile,
    *_PLAIN,
    degrade.without_host,
    degrade.whole_blocks,
    degrade.recompute_all_or_none,
    degrade.all_late_reductions,
    degrade.without_lasting_gathers,
)
_EVERY_MICRO_BATCH = (*_PLAIN, degrade.without_late_reductions, degrade.without_lasting_gathers)
CHANGES: Mapping[str, Sequence[Change]] = {
    "fsdp2": _PLAIN,
    "transformers": _TRANSFORMERS,
    "accelerate": _ACCELERATE,
    "lightning": _EVERY_MICRO_BATCH,
    "torchtitan": _EVERY_MICRO_BATCH,
}
TARGETS = tuple(CHANGES)
WIDTH = 96  # of a line of the head, without its mark
# Changes after which the model has to be traced anew: it computes something else.
_RETRACED = (degrade.without_chunked_loss, degrade.without_compile)


@dataclass(frozen=True)
class Export:
    """The text for a target, and what is left of the plan there."""

    text: str
    degraded: Degraded
    notes: tuple[str, ...]


def traced_for(plan: Plan, target: str) -> Plan:
    """The plan as the graph that `export` takes is traced for: computed as the target computes it."""
    if target not in CHANGES:
        raise UsageError(f"{target!r} is no target; choose one of {', '.join(TARGETS)}")
    for change in CHANGES[target]:
        if change in _RETRACED:
            plan, _ = change(plan)
    return plan


def export(plan: Plan, graph: ModelGraph, model: nn.Module, *, target: str) -> Export:
    """The plan as code or settings of a target.

    `graph` is that of `traced_for(plan, target)`, and `model` the one it was traced from, on the meta device.
    """
    traced_for(plan, target)  # refuses what is no target
    if target == "transformers" and not hasattr(model, "config"):
        raise UsageError("transformers runs its own models, and this is none; choose --to fsdp2")
    if target == "transformers" and plan.precision == "fp16":
        raise UsageError("transformers' own sharding computes in bf16 or fp32, and the plan in fp16; choose --to fsdp2")
    ways = [degraded(plan, graph, changes) for changes in _ways(target, model)]
    left = max(ways, key=lambda way: (way.fits, way.samples_per_second))
    notes = tuple(_notes(plan, left, target))
    lines = [line for note in notes for line in textwrap.wrap(note, WIDTH, subsequent_indent="    ")]
    head = "\n".join(f"# {line}" for line in lines)
    write = {
        "fsdp2": fsdp2_text,
        "lightning": lightning_text,
        "torchtitan": torchtitan_text,
        "transformers": transformers_text,
        "accelerate": accelerate_text,
    }[target]
    return Export(write(left.plan, head, model), left, notes)


def _stored(plan: Plan) -> str:
    return "bf16" if plan.precision == "pure-bf16" else "fp32"


def _ways(target: str, model: nn.Module) -> Sequence[Sequence[Change]]:
    """The ways to change a plan into the target's own; the fastest that fits is taken."""
    changes = CHANGES[target]
    if target != "accelerate":
        return (changes,)
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None  # type: ignore[operator]
    name = next((name for name, module in model.named_modules() if module is embedding), None)
    return tuple((*changes, degrade.blocks_in(mode, as_blocks=name)) for mode in (KEEP, FREE))


def _notes(plan: Plan, left: Degraded, target: str) -> list[str]:
    before, now = plan.predicted, left
    lines = [
        f"{plan.model.name} on {plan.cluster.label}, as osdp export --to {target} writes it.",
        f"The plan: {before.samples_per_second:.4g} samples/s predicted,"
        f" {format_bytes(before.peak_bytes)} of {format_bytes(before.limit_bytes)}.",
        f"It is for {plan.optimizer}, with parameters in {_stored(plan)} when the model is built"
        f"{', and fp16 needs a gradient scaler' if plan.precision == 'fp16' else ''}.",
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
