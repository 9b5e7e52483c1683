"""A plan in Accelerate and in Hugging Face's Trainer: the same weights as after our own loop, clipping included.

- Accelerate leaves a model alone that runs a plan, clips it right, accumulates, saves its state and goes on from it.
- Where Accelerate does not count the ranks, so that each would train on all samples, training is refused.
- Trainer trains, evaluates, saves what `from_pretrained` reads, resumes to the same weights, and the model generates.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import tiny
from frameworks import (
    ACCUMULATION,
    BATCH,
    CLIP,
    RANKS,
    RATE,
    STEPS,
    adamw,
    as_torchrun_starts_it,
    mixed_plan,
    own_loop,
    planned_model,
    samples,
)
from planned import whole_parameters
from ranks import run_ranks
from torch import Tensor, nn

import osdp
from osdp.planfile import Plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights, as a user has one."""
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(1)
    tiny("llama").build().save_pretrained(folder)
    return folder


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.allclose(first[key], second[key], rtol=1e-5, atol=1e-6) for key in first
    )


# Accelerate


def counted_alone(plan: Plan, folder: Path, out: Path) -> None:
    """Where Accelerate is not told that it runs on CPUs, each rank would train on all samples."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    from osdp.integrations.accelerate import Accelerator

    with pytest.raises(osdp.UsageError, match=r"counts 1 process where the process group has 2 ranks.*cpu=True"):
        Accelerator().prepare(planned_model(plan, folder))
    with pytest.raises(osdp.UsageError, match="counts 1 process"):
        trainer_of(plan, folder, out, use_cpu=False).train()
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(osdp.UsageError, match=r"what is recomputed is the plan's; give TrainingArguments"):
        trainer_of(plan, folder, out, gradient_checkpointing=True)
    sharding = Accelerator(cpu=True)
    sharding.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    with pytest.raises(osdp.UsageError, match="the Accelerator has a fsdp_plugin, and the model runs a plan"):
        sharding.prepare(planned_model(plan, folder))
    AcceleratorState._reset_state(reset_partial_state=True)


def accelerated(plan: Plan, folder: Path, out: Path) -> dict[str, bool]:
    as_torchrun_starts_it()
    from osdp.integrations.accelerate import Accelerator

    def prepared() -> tuple[Any, nn.Module, Any, Any]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
        model = planned_model(plan, folder)
        loader = torch.utils.data.DataLoader(samples(), batch_size=BATCH)  # type: ignore[arg-type]
        return accelerator, *accelerator.prepare(model, adamw(model), loader)

    def steps(accelerator: Any, model: nn.Module, optimizer: Any, batches: Any) -> None:
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()

    expected = whole_parameters(own_loop(plan, folder)[0])
    counted_alone(plan, folder, out)
    accelerator, model, optimizer, loader = prepared()
    left_alone = accelerator.num_processes == RANKS and type(model).__name__ == "FSDPLlamaForCausalLM"
    half = STEPS * ACCUMULATION // 2
    batches = list(loader)
    steps(accelerator, model, optimizer, batches[:half])
    where = accelerator.save_state(str(out))
    steps(accelerator, model, optimizer, batches[half:])
    trained = same(whole_parameters(model), expected)
    state = accelerator.get_state_dict(model)
    whole = same({k: v for k, v in state.items() if k in expected}, expected) if dist.get_rank() == 0 else not state
    accelerator, model, optimizer, _ = prepared()
    accelerator.load_state(where)
    steps(accelerator, model, optimizer, batches[half:])
    return {
        "left alone": left_alone,
        "trained": trained,
        "whole": whole,
        "resumed": same(whole_parameters(model), expected),
        "clipped": float(osdp.clip_grad_norm_(model.parameters(), CLIP)) == 0.0,  # zeroed, not left over
    }


# Trainer


def trainer_of(plan: Plan, folder: Path, out: Path, **changes: Any) -> Any:
    import transformers

    from osdp.integrations.trainer import TrainerMixin

    class InOrder(TrainerMixin, transformers.Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *unused: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    arguments = {
        **{"output_dir": str(out), "use_cpu": True, "max_steps": STEPS, "learning_rate": RATE, "max_grad_norm": CLIP},
        **{"per_device_train_batch_size": BATCH, "gradient_accumulation_steps": ACCUMULATION, "logging_steps": 1},
        **{"lr_scheduler_type": "constant", "weight_decay": 0.0, "save_steps": 2, "report_to": "none", "seed": 1},
        **{"disable_tqdm": True, "per_device_eval_batch_size": BATCH, "optim": "adamw_torch"},
    }
    data = samples()
    return InOrder(
        planned_model(plan, folder),
        transformers.TrainingArguments(**{**arguments, **changes}),  # type: ignore[arg-type]
        train_dataset=data,  # type: ignore[arg-type]
        eval_dataset=data[:8],  # type: ignore[arg-type]
    )


def trained(plan: Plan, folder: Path, out: Path) -> dict[str, Any]:
    as_torchrun_starts_it()
    expected, losses = own_loop(plan, folder)
    trainer = trainer_of(plan, folder, out)
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = whole_parameters(trainer.model)
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(out / "final"))
    prompt = samples()[0]["input_ids"][None, :4]
    with torch.no_grad():
        written = trainer.model.eval().generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    again = trainer_of(plan, folder, out)
    again.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    return {
        "losses": (losses, logged),
        "trained": same(weights, whole_parameters(expected)),
        "resumed": same(whole_parameters(again.model), weights) and again.state.global_step == STEPS,
        "evaluated": evaluated,
        "written": written.tolist(),
    }


# Both in one start of ranks: importing the packages is most of the time


def both(plan: Plan, folder: Path, out: Path) -> tuple[dict[str, bool], dict[str, Any]]:
    return accelerated(plan, folder, out / "state"), trained(plan, folder, out)


@pytest.fixture(scope="module")
def found(folder: Path) -> list[tuple[dict[str, bool], dict[str, Any]]]:
    return run_ranks(RANKS, both, mixed_plan(), folder, folder / "run", timeout_seconds=280)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"gradient_checkpointing": True}, "recomputed is the plan's; give SFTConfig(gradient_checkpointing=False)"),
        ({"bf16": True, "torch_compile": True}, "give SFTConfig(bf16=False, torch_compile=False)"),
        ({"fsdp": True}, "sharding is the plan's; give SFTConfig(fsdp=None)"),
        ({}, ""),
    ],
)
def test_arguments_that_a_plan_decides_are_refused(given: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    import transformers

    from osdp.integrations.trainer import check_arguments

    class SFTConfig(transformers.TrainingArguments):
        """TRL's own has two of them on from the start."""

    arguments = SFTConfig(output_dir=str(tmp_path), use_cpu=True)
    for name, value in given.items():  # not through __init__, which asks for a process group
        setattr(arguments, name, value)
    if not sentence:
        check_arguments(arguments)
        return
    with pytest.raises(osdp.UsageError, match=re.escape(sentence)):
        check_arguments(arguments)


def test_accelerate_trains_a_plan_as_our_own_loop_does(found: Any) -> None:
    for accelerate, _ in found:
        assert all(accelerate.values()), accelerate


def test_trainer_trains_evaluates_saves_resumes_and_generates(found: Any, folder: Path) -> None:
    (_, first), (_, second) = found
    assert first["trained"] and second["trained"] and first["resumed"] and second["resumed"]
    own, logged = first["losses"]
    assert logged == pytest.approx(own, abs=1e-5) and first["evaluated"] < own[0] - 0.1  # it has seen these samples
    saved = type(tiny("llama").build()).from_pretrained(folder / "run" / "final").eval()
    batch = {key: torch.stack([each[key] for each in samples()[:8]]) for key in ("input_ids", "labels")}
    with torch.no_grad():
        assert first["evaluated"] == second["evaluated"] == pytest.approx(saved(**batch).loss.item(), abs=1e-5)
    prompt = samples()[0]["input_ids"][None, :4]
    assert first["written"] == saved.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()
