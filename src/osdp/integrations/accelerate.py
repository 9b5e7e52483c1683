"""Hugging Face Accelerate: an `Accelerator` that leaves a model alone which runs a plan, and treats it as it must be.

    accelerator = osdp.integrations.accelerate.Accelerator()
    osdp.parallelize(model, plan)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

Accelerate itself would wrap such a model in DDP, save rank 0's shards as if they were the model, and wait for every
micro-batch's reduction. Precision is the plan's: `mixed_precision` of the accelerator does not touch such a model.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import torch.distributed as dist
from torch import Tensor, nn

from osdp.errors import UsageError
from osdp.runtime.accumulate import reduced_later
from osdp.runtime.checkpoint import load_checkpoint, save_checkpoint
from osdp.runtime.clip import clip_grad_norm_
from osdp.runtime.planned import own_optimizer, runs_a_plan, whole_state_dict

FOLDER = "osdp"  # in a folder of Accelerate's: the checkpoints of models that run a plan


class Accelerator(accelerate.Accelerator):
    """See the head of this file; models that run no plan are treated as Accelerate does."""

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        plugins = ("fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin")
        plugin = next((name for name in plugins if getattr(self.state, name, None) is not None), None)
        if plugin is not None and any(map(runs_a_plan, args)):
            raise UsageError(
                f"the Accelerator has a {plugin}, and the model runs a plan, which shards it already; leave out the"
                " plugin, and in `accelerate config` choose no FSDP, DeepSpeed or Megatron"
            )
        return super().prepare(*args, **kwargs)

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if not runs_a_plan(model):
            return super().prepare_model(model, *args, **kwargs)
        check_ranks(self)
        if all(model is not other for other in self._models):
            self._models.append(model)
        return model

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        if not any(runs_a_plan(model) for model in self._models):
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:  # type: ignore[override]
        with reduced_later(model) if runs_a_plan(model) else super().no_sync(model):
            yield

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The whole model on rank 0, and nothing on the others; call it on every rank."""
        if not runs_a_plan(model):
            return super().get_state_dict(model, unwrap)
        return whole_state_dict(model, on_this_rank=self.is_main_process)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        with self._without_planned() as planned:
            location = super().save_state(output_dir, safe_serialization, **kwargs)
        for name, (model, optimizer) in planned.items():
            save_checkpoint(Path(location) / FOLDER / name, model, optimizer, step=self.step, keep=1)
        return location

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        with self._without_planned() as planned:
            if planned and input_dir is None:
                raise UsageError("load_state needs the folder that save_state returned; give it as input_dir")
            super().load_state(input_dir, load_kwargs, **kwargs)
        for name, (model, optimizer) in planned.items():
            folder = Path(os.fspath(input_dir or "")) / FOLDER / name
            if load_checkpoint(folder, model, optimizer) is None:
                raise UsageError(
                    f"{folder} holds no checkpoint; give a folder that this Accelerator's save_state wrote"
                )

    @contextlib.contextmanager
    def _without_planned(self) -> Iterator[dict[str, tuple[nn.Module, Any]]]:
        """Hides models that run a plan, and their optimizers, from what Accelerate would save of rank 0 alone."""
        models, optimizers = self._models, self._optimizers
        planned = {
            f"model_{index}": (model, own_optimizer(model, optimizers))
            for index, model in enumerate(models)
            if runs_a_plan(model)
        }
        own = [optimizer for _, optimizer in planned.values() if optimizer is not None]
        self._models = [model for model in models if not runs_a_plan(model)]
        self._optimizers = [each for each in optimizers if getattr(each, "optimizer", each) not in own]
        try:
            yield planned
        finally:
            self._models, self._optimizers = models, optimizers


def check_ranks(accelerator: accelerate.Accelerator) -> None:
    """On CPUs Accelerate counts ranks only if it is told that it runs there; else every rank would take all samples."""
    counted, ranks = accelerator.num_processes, dist.get_world_size()
    if counted != ranks:
        raise UsageError(
            f"Accelerate counts {counted} process where the process group has {ranks} ranks, so that every rank would"
            " train on all samples; on CPUs give Accelerator(cpu=True), or TrainingArguments(use_cpu=True) to a"
            " Trainer; elsewhere start the ranks with torchrun"
        )


def adopt(accelerator: accelerate.Accelerator) -> Accelerator:
    """Makes one of the class above of an accelerator that exists already, as FSDP2 does with modules."""
    if not isinstance(accelerator, Accelerator):
        accelerator.__class__ = Accelerator
    assert isinstance(accelerator, Accelerator)
    return accelerator
