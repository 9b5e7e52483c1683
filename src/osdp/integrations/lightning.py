"""Lightning: a mixin for a `LightningModule` whose `configure_model` applies a plan.

    class Mine(osdp.integrations.lightning.PlanMixin, lightning.LightningModule):
        def configure_model(self):
            osdp.parallelize(self.model, plan)

    lightning.Trainer(strategy=ModelParallelStrategy(), gradient_clip_val=1.0).fit(Mine())

`gradient_clip_val` then clips over all units, however each is held; Lightning's own clipping fails where they differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from osdp.errors import UsageError
from osdp.runtime.clip import clip_grad_norm_
from osdp.runtime.planned import runs_a_plan

if TYPE_CHECKING:
    from lightning import LightningModule as _Module
else:
    _Module = object


class PlanMixin(_Module):
    """See the head of this file."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        if not any(runs_a_plan(module) for module in self.modules()):
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        if gradient_clip_val is None:
            return
        algorithm = getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm) or "norm"
        if algorithm != "norm":
            raise UsageError(f"gradient_clip_algorithm is {algorithm!r}; with a plan only 'norm' is there, choose it")
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        clip_grad_norm_(parameters, gradient_clip_val)
