"""Hugging Face Trainer, and TRL's trainers: a mixin that goes before the trainer's class.

    class MyTrainer(osdp.integrations.trainer.TrainerMixin, transformers.Trainer): ...

    osdp.parallelize(model, plan)
    MyTrainer(model, TrainingArguments(...), train_dataset=...).train()

The model runs its plan when the trainer gets it. Clipping, accumulation, saving, resuming and the best model at the end
then are those of a plan; folders hold what `from_pretrained` reads. A model that runs no plan is the trainer's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from osdp.errors import UsageError
from osdp.integrations.accelerate import FOLDER, adopt, check_ranks
from osdp.runtime.checkpoint import load_checkpoint, save_checkpoint
from osdp.runtime.planned import own_optimizer, runs_a_plan
from osdp.runtime.weights import load_pretrained
from osdp.runtime.weights_out import save_pretrained

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

# Arguments of a trainer that decide what a plan decides already, each with what decides it.
_DECIDED = {
    "fsdp": "sharding is the plan's",
    "deepspeed": "sharding is the plan's",
    "gradient_checkpointing": "what is recomputed is the plan's",
    "bf16": "precision is the plan's",
    "fp16": "precision is the plan's",
    "bf16_full_eval": "precision is the plan's, in evaluation too",
    "fp16_full_eval": "precision is the plan's, in evaluation too",
    "torch_compile": "what is compiled is the plan's (osdp plan --compiled)",
}
SCHEDULER = "scheduler.pt"  # as transformers names them
ARGUMENTS = "training_args.bin"


class TrainerMixin(_Trainer):
    """See the head of this file."""

    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, model: Any = None, *given: Any, **named: Any) -> None:
        if runs_a_plan(model):
            for each in (*given, *named.values()):
                check_arguments(each)
        super().__init__(model, *given, **named)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        adopt(self.accelerator)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not runs_a_plan(model):
            super()._move_model_to_device(model, device)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if not runs_a_plan(model):
            return super()._wrap_model(model, training, dataloader)
        check_ranks(self.accelerator)
        return model

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return (
            False if runs_a_plan(model) else super()._has_mixed_mesh_grads(model)
        )  # the accelerator knows how to clip

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not runs_a_plan(self.model):
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(output_dir or self.args.output_dir or ".")
        save_pretrained(self.model, folder)
        if self.args.should_save:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, folder / ARGUMENTS)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not runs_a_plan(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        step = self.state.global_step
        save_checkpoint(Path(output_dir) / FOLDER, self.model, own_optimizer(self.model, [self.optimizer]), step=step)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if runs_a_plan(self.model):
            _load_weights(self.model, Path(resume_from_checkpoint))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not runs_a_plan(self.model):
            super()._load_optimizer_and_scheduler(checkpoint)
        elif checkpoint is not None:
            folder = Path(checkpoint)
            if load_checkpoint(folder / FOLDER, self.model, own_optimizer(self.model, [self.optimizer])) is None:
                raise UsageError(
                    f"{folder} holds weights and no optimizer; load the weights, and train without resuming"
                )
            self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER, weights_only=True))

    def _load_best_model(self) -> None:
        if runs_a_plan(self.model):
            _load_weights(self.model, Path(self.state.best_model_checkpoint or ""))
        else:
            super()._load_best_model()


def check_arguments(arguments: object) -> None:
    """Refuses a trainer's arguments that would change how a model runs its plan; anything else is let through."""
    from transformers import TrainingArguments

    if not isinstance(arguments, TrainingArguments):
        return
    given = [name for name in _DECIDED if getattr(arguments, name, None)]
    if given:
        why = "; ".join(dict.fromkeys(_DECIDED[name] for name in given))
        off = ", ".join(f"{name}={None if name in ('fsdp', 'deepspeed') else False}" for name in given)
        raise UsageError(
            f"the model runs a plan, and the arguments set {' and '.join(given)}: {why}; give"
            f" {type(arguments).__name__}({off})"
        )


def _load_weights(model: nn.Module, folder: Path) -> None:
    """Of a checkpoint the whole model, of a folder that was saved with `save_only_model` what is there."""
    if not (folder / FOLDER).is_dir() or load_checkpoint(folder / FOLDER, model) is None:
        load_pretrained(model, folder)
