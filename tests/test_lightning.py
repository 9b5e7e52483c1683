"""A plan in Lightning's ModelParallelStrategy: our own loop's weights, with `gradient_clip_val` and accumulation."""

from __future__ import annotations

from pathlib import Path

import torch
from architectures import tiny
from frameworks import (
    ACCUMULATION,
    CLIP,
    RANKS,
    STEPS,
    adamw,
    as_torchrun_starts_it,
    micro_batch,
    mixed_plan,
    own_loop,
    planned_model,
)
from planned import whole_parameters
from ranks import run_ranks
from torch import Tensor

from osdp.planfile import Plan

# Lightning reduces at every micro-batch, our loop some units once a step: AdamW would turn the rounding between the two
# into steps of full size where gradients are next to zero.
EPS = 1e-4


def trained(plan: Plan, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float], list[float]]:
    as_torchrun_starts_it()
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    from osdp.integrations.lightning import PlanMixin

    class Module(PlanMixin, lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []
            self.model: torch.nn.Module | None = None

        def configure_model(self) -> None:
            if self.model is None:
                self.model = planned_model(plan, folder)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss = self.model(**micro_batch(index)).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.model, EPS)

    own, losses = own_loop(plan, folder, EPS)
    module = Module()
    trainer = lightning.Trainer(
        **{"accelerator": "cpu", "devices": RANKS, "max_steps": STEPS, "gradient_clip_val": CLIP, "logger": False},
        **{"enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False},
        accumulate_grad_batches=ACCUMULATION,
        strategy=ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1),
        use_distributed_sampler=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(range(STEPS * ACCUMULATION), batch_size=1))  # type: ignore[arg-type]
    return whole_parameters(own), whole_parameters(module.model), losses, module.losses


def test_lightning_trains_a_plan_as_our_own_loop_does(tmp_path: Path) -> None:
    torch.manual_seed(1)
    tiny("llama").build().save_pretrained(tmp_path)
    found = run_ranks(RANKS, trained, mixed_plan(), tmp_path, timeout_seconds=250)
    for own, weights, _, _ in found:
        assert all(torch.allclose(own[name], weights[name], rtol=1e-5, atol=1e-6) for name in own)
    over_ranks = [sum(each) / RANKS for each in zip(*(losses for *_, losses in found), strict=True)]
    steps = [sum(over_ranks[i : i + ACCUMULATION]) / ACCUMULATION for i in range(0, len(over_ranks), ACCUMULATION)]
    torch.testing.assert_close(steps, found[0][2], rtol=1e-5, atol=1e-5)
