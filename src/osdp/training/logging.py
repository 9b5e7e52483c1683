"""What a run says, on rank 0: a line a step, or a JSON document a line; a bar on a terminal; curves."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from osdp.cluster import format_bytes
from osdp.planfile import Plan
from osdp.report.numbers import format_rate, format_seconds, format_share
from osdp.training.curves import CurveTargets, CurveWriters, open_writers
from osdp.training.drift import typical_seconds
from osdp.training.loop import Step


@dataclass(frozen=True)
class Summary:
    """A run's end: the median step and the highest peak, beside what the plan expects of both."""

    steps: int
    first_loss: float
    last_loss: float
    predicted_step_seconds: float
    measured_step_seconds: float
    predicted_peak_bytes: int
    measured_peak_bytes: int

    @staticmethod
    def of(steps: list[Step], plan: Plan) -> Summary:
        return Summary(
            steps=len(steps),
            first_loss=steps[0].loss,
            last_loss=steps[-1].loss,
            predicted_step_seconds=plan.predicted.step_seconds,
            measured_step_seconds=typical_seconds([step.timing for step in steps]),
            predicted_peak_bytes=plan.predicted.peak_bytes,
            measured_peak_bytes=max(step.timing.peak_bytes for step in steps),
        )


def step_line(step: Step, steps: int, predicted_seconds: float, mfu: float | None = None) -> str:
    """'step  12/100  loss 2.3456  norm 0.812  lr 3.0e-04  1.2 GiB  12,345 tok/s  812 ms (predicted 790 ms)'."""
    predicted = f" (predicted {format_seconds(predicted_seconds)})" if predicted_seconds > 0 else ""
    parts = [
        f"step {step.number:{len(str(steps))}}/{steps}",
        f"loss {step.loss:.4f}",
        "overflow, skipped" if step.gradient_norm is None else f"norm {step.gradient_norm:.3f}",
        f"lr {step.lr:.1e}",
        format_bytes(step.timing.peak_bytes),
        f"{format_rate(step.tokens_per_second)} tok/s",
        f"{format_seconds(step.timing.seconds)}{predicted}",
    ]
    if mfu is not None:
        parts.append(f"MFU {100 * mfu:.1f} %")
    if step.validation_loss is not None:
        parts.insert(2, f"validation {step.validation_loss:.4f}")
    return "  ".join(parts)


def measured_mfu(step: Step, plan: Plan) -> float | None:
    """The model FLOPs utilization of a step: the plan's, at the seconds that it took; None where none is predicted."""
    predicted = plan.predicted
    return predicted.mfu * predicted.step_seconds / step.timing.seconds if predicted.mfu > 0 else None


def step_document(step: Step, plan: Plan) -> dict[str, Any]:
    """What was measured of a step, flat, and what the plan expects of it."""
    fields, expected = asdict(step), plan.predicted
    rates = {"samples_per_second": plan.global_batch / step.timing.seconds, "mfu": measured_mfu(step, plan)}
    predicted = {"predicted_seconds": expected.step_seconds, "predicted_peak_bytes": expected.peak_bytes}
    return {"event": "step", **fields.pop("timing"), **fields, **rates, **predicted}


def plan_lines(plan: Plan) -> list[str]:
    """How a run is planned, in two lines."""
    held: dict[str, int] = {}
    for unit in plan.units:
        held[unit.mode] = held.get(unit.mode, 0) + unit.parameters
    total = sum(held.values())
    shares = (
        f"{mode} {format_share(count / total)}" for mode, count in sorted(held.items(), key=lambda each: -each[1])
    )
    recomputed = len({unit.block for unit in plan.units if unit.recompute})
    batch = f"micro-batch {plan.batch_size} × accumulation {plan.accumulation} × {plan.cluster.world_size} ranks"
    return [
        f"{plan.model.name} on {plan.cluster.label}: {plan.precision}, {plan.optimizer}",
        f"{batch} = global batch {plan.global_batch}",
        f"parameters by mode: {', '.join(shares)}; {recomputed} blocks recomputed",
    ]


def summary_lines(summary: Summary, plan: Plan) -> list[str]:
    lines = [f"{summary.steps} steps: loss {summary.first_loss:.4f} to {summary.last_loss:.4f}"]
    measured_in = "resident memory above the start's" if plan.cluster.device.is_cpu else "by the allocator"
    seconds = format_seconds(summary.measured_step_seconds), format_bytes(summary.measured_peak_bytes)
    if summary.predicted_step_seconds > 0:
        lines.append(
            f"step: predicted {format_seconds(summary.predicted_step_seconds)}, measured {seconds[0]} (median)"
        )
    if summary.predicted_peak_bytes > 0:
        peak = format_bytes(summary.predicted_peak_bytes)
        lines.append(f"peak: predicted {peak}, measured {seconds[1]} ({measured_in})")
    return lines


class StepLogger:
    """Says what happens, where it is wanted; on other ranks than the first, nothing."""

    def __init__(self, *, leads: bool, as_json: bool, every: int, steps: int, bar: Any, curves: CurveWriters) -> None:
        self._leads, self._as_json, self._every, self._steps = leads, as_json, every, steps
        self._bar, self._curves = bar, curves

    def start(self, plan: Plan, done: int, folder: Path | None) -> None:
        if done:
            self._line({"event": "resume", "step": done}, f"goes on from step {done} in {folder}")
        document = {"event": "start", "step": done, "steps": self._steps, "plan": plan.to_dict()}
        self._line(document, *plan_lines(plan))
        self._curves.describe(plan)
        if self._bar is not None:
            self._bar.update(0, completed=done)

    def step(self, step: Step, plan: Plan) -> None:
        due = step.number % self._every == 0 or step.number == self._steps or step.validation_loss is not None
        if self._as_json or due:
            line = step_line(step, self._steps, plan.predicted.step_seconds, measured_mfu(step, plan))
            self._line(step_document(step, plan), line)
        if self._bar is not None:
            self._bar.update(0, completed=step.number, description=f"loss {step.loss:.4f}")
        self._curves.write(step_document(step, plan))

    def warn(self, sentence: str | None) -> None:
        if self._leads and sentence:
            print(f"osdp: warning: {sentence}", file=sys.stderr, flush=True)

    def end(self, steps: list[Step], plan: Plan) -> None:
        if not steps:
            self._line({"event": "end", "steps": 0}, f"all {self._steps} steps were done before; give more --steps")
            return
        summary = Summary.of(steps, plan)
        self._line({"event": "end", **asdict(summary)}, *summary_lines(summary, plan))

    def _line(self, document: dict[str, Any], *lines: str) -> None:
        if self._leads:
            text = [json.dumps(document, allow_nan=False)] if self._as_json else lines
            print(*text, sep="\n", flush=True)


@contextmanager
def step_logger(
    *, leads: bool, as_json: bool, quiet: bool, every: int, steps: int, targets: CurveTargets
) -> Iterator[StepLogger]:
    with ExitStack() as stack:
        bar, curves = None, open_writers(targets, leads=leads, stack=stack)
        # The bar takes over what is printed: lines that go to a file would go to the terminal.
        if leads and not as_json and not quiet and sys.stderr.isatty() and sys.stdout.isatty():
            bar = stack.enter_context(_bar(steps))
        yield StepLogger(leads=leads, as_json=as_json, every=every, steps=steps, bar=bar, curves=curves)


def _bar(steps: int) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(30), MofNCompleteColumn())
    bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    bar.add_task("starts", total=steps)
    return bar
