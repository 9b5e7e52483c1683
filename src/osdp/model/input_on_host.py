"""A block's input on the host between the block's two forwards: as tracing and the runtime both run it.

[Note: Input on the host]
A block that is recomputed in full keeps its inputs and nothing else. Of these the hidden states are its own: the first
tensor that it is given, and what the block before it put out. Everything else (masks, rotary embeddings, an encoder's
output) all blocks share, so it stays where it is. torch's checkpoint saves the tensors that it is given by position as
autograd saves any tensor, so hooks for saved tensors see them: one copies the hidden states to the host as the block
begins, one copies them back as its second forward begins. Both copies run on the stream of the computation, in order.

The first block of a row has its input from outside: the frame that made it often keeps it for all of forward. That one
stays on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Host(Protocol):
    """Takes a tensor away from the device, and makes one like it there again."""

    def put(self, tensor: Tensor) -> Any: ...

    def get(self, held: Any) -> Tensor: ...


class RealHost:
    """Copies; on an accelerator through pinned memory, beside what the host does."""

    def put(self, tensor: Tensor) -> tuple[torch.device, Tensor]:
        pinned = is_pinned(tensor)
        there = torch.empty_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)
        there.copy_(tensor.detach(), non_blocking=pinned)
        return tensor.device, there

    def get(self, held: tuple[torch.device, Tensor]) -> Tensor:
        device, there = held
        return there.to(device, non_blocking=there.device != device)


def is_pinned(tensor: Tensor) -> bool:
    """Whether the host's memory for a tensor is pinned."""
    return tensor.device.type != "cpu"


class _InputOnHost(saved_tensors_hooks):
    """For one call of a checkpointed block: the first floating tensor that is saved goes to the host."""

    def __init__(self, host: Host) -> None:
        self._host, self._is_put = host, False
        super().__init__(self._put, self._get)

    def _put(self, tensor: Tensor) -> tuple[bool, Any]:
        if self._is_put or not tensor.is_floating_point():
            return False, tensor.detach()
        self._is_put = True
        return True, self._host.put(tensor)

    def _get(self, held: tuple[bool, Any]) -> Tensor:
        is_put, value = held
        return self._host.get(value) if is_put else value


def with_input_on_host(checkpointed: Callable[..., Any], host: Host) -> Callable[..., Any]:
    """A checkpointed forward whose first tensor is on the host in between; see [Note: Input on the host]."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _InputOnHost(host):  # inside, the checkpoint's own hooks take its place
            return checkpointed(*args, **kwargs)

    return run
