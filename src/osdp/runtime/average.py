"""An exponential moving average (EMA) of a model's weights, sharded as the model is.

`copy.deepcopy` of a sharded model is refused by FSDP2, and would double what is planned. An average holds one more copy
of what each rank holds of the parameters, in their dtype, and no more: leave room for it with `osdp.plan(memory=...)`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from osdp.errors import UsageError
from osdp.runtime.local import local_tensor
from osdp.runtime.split import held_parameters


class MovingAverage:
    """`average = decay * average + (1 - decay) * weights` at every `update`, for each parameter that is trained::

        average = MovingAverage(model, decay=0.999)
        ...
        optimizer.step(); average.update()
        with average.applied():          # the model has the average's weights, and its own again after
            evaluate(model)              # or osdp.save_pretrained(model, folder)

    An average takes as much memory as this rank's part of the trained parameters.
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        if not 0.0 <= decay <= 1.0:
            raise UsageError(f"decay is {decay} but must be from 0 to 1; 0.999 is usual")
        self._model, self.decay = model, decay
        self._averages = {name: local_tensor(tensor).clone() for name, tensor in self._trained()}

    @torch.no_grad()
    def update(self) -> None:
        """Call it after each step of the optimizer, on every rank. No collectives."""
        for name, tensor in self._trained():
            self._averages[name].lerp_(local_tensor(tensor), 1.0 - self.decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Within it the model has the average's weights; no second copy is made."""
        self._swap()
        try:
            yield self._model
        finally:
            self._swap()

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's part, to be saved by each rank and loaded under the same plan; or save the model in `applied`."""
        return dict(self._averages)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, average in self._averages.items():
            if name not in state or state[name].shape != average.shape:
                raise UsageError(f"the average of {name} is missing or of another plan; load it under its own")
            average.copy_(state[name])

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        for name, (parameters, _) in held_parameters(self._model).items():
            for index, parameter in enumerate(parameters):
                if parameter.requires_grad:
                    yield f"{name}#{index}", parameter.detach()

    @torch.no_grad()
    def _swap(self) -> None:
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a gathered copy would be of the other weights
        for name, tensor in self._trained():
            own, average = local_tensor(tensor), self._averages[name]
            before = own.clone()
            own.copy_(average)
            average.copy_(before)
