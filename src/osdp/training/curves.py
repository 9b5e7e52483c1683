"""Curves of a run for TensorBoard and Weights & Biases: one set of names, one writer for each, on rank 0 only."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osdp.errors import UsageError
from osdp.planfile import Plan

# A field of a step's document, and the name that both programs group by; see docs/training.md.
CURVES = {
    "loss": "train/loss",
    "validation_loss": "validation/loss",
    "gradient_norm": "train/gradient_norm",
    "lr": "train/lr",
    "tokens_per_second": "throughput/tokens_per_second",
    "samples_per_second": "throughput/samples_per_second",
    "mfu": "throughput/mfu",
    "seconds": "step/seconds",
    "predicted_seconds": "step/predicted_seconds",
    "data_seconds": "step/data_seconds",
    "waited_seconds": "step/waited_seconds",
    "peak_bytes": "memory/peak_bytes",
    "predicted_peak_bytes": "memory/predicted_peak_bytes",
}


@dataclass(frozen=True)
class CurveTargets:
    """Where curves go: a folder for TensorBoard, a project of W&B, both or neither."""

    tensorboard: Path | None = None
    wandb: str | None = None


def curves(document: dict[str, Any]) -> dict[str, float]:
    """The values of a step's document that are there, by their curves' names."""
    return {name: document[field] for field, name in CURVES.items() if document[field] is not None}


class CurveWriters:
    """Writes a step's values to every target."""

    def __init__(self, tensorboard: Any = None, wandb: Any = None) -> None:
        self._tensorboard, self._wandb = tensorboard, wandb

    def describe(self, plan: Plan) -> None:
        """W&B's table of runs compares runs by their settings."""
        if self._wandb is not None:
            self._wandb.config.update(run_settings(plan), allow_val_change=True)

    def write(self, document: dict[str, Any]) -> None:
        values, number = curves(document), document["number"]
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, number)
        if self._wandb is not None:
            self._wandb.log(values, step=number)


def run_settings(plan: Plan) -> dict[str, Any]:
    """What a person filters runs by: the model, the cluster, the batch, and what the plan promises."""
    return {
        "model": plan.model.name,
        "parameters": plan.model.parameters,
        "cluster": plan.cluster.label,
        "world_size": plan.cluster.world_size,
        "precision": plan.precision,
        "optimizer": plan.optimizer,
        "micro_batch": plan.batch_size,
        "accumulation": plan.accumulation,
        "global_batch": plan.global_batch,
        "predicted_samples_per_second": plan.predicted.samples_per_second,
        "predicted_peak_bytes": plan.predicted.peak_bytes,
        "limit_bytes": plan.predicted.limit_bytes,
    }


def open_writers(targets: CurveTargets, *, leads: bool, stack: ExitStack) -> CurveWriters:
    """All ranks find a missing package; rank 0 writes. The stack closes what is opened."""
    tensorboard = wandb = None
    if targets.tensorboard is not None:
        writer = _tensorboard_writer(targets.tensorboard)
        tensorboard = stack.enter_context(writer(str(targets.tensorboard))) if leads else None
    if targets.wandb is not None:
        package = _wandb_package(targets.wandb)
        wandb = stack.enter_context(_wandb_run(package, targets.wandb)) if leads else None
    return CurveWriters(tensorboard, wandb)


def _tensorboard_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError(f"--tensorboard {folder} needs the package tensorboard: pip install tensorboard") from None
    return SummaryWriter


def _wandb_package(project: str) -> Any:
    try:
        import wandb
    except ImportError:
        raise UsageError(f"--wandb {project} needs the package wandb: pip install wandb") from None
    return wandb


def _wandb_run(package: Any, project: str) -> Any:
    try:
        return package.init(project=project)
    except package.Error as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"--wandb {project}: W&B starts no run ({reason}); log in with `wandb login`,"
            " or set WANDB_MODE=offline and send the run later with `wandb sync`"
        ) from None
