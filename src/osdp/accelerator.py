"""Which device trains, and every call to its streams, its events and its allocator.

[Note: Device]
A device with streams runs what it is given later, in the order of each stream; who needs a result on another stream has
that stream wait. `DeviceCalls` has the few calls that osdp makes of such a device, by the device's own module of torch
(`torch.cuda`, `torch.xpu`), as FSDP2 does: an event of one module is not to be given to a stream of another. On CPUs
everything is done when the call returns, so the same calls do nothing.

No other module touches a stream, an event or the allocator; tests run these calls on a stand-in that records them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from osdp.engine import Engine, engine_for
from osdp.errors import UsageError

CPU = torch.device("cpu")
FAKE = "fake"  # the backend of a world in which nobody else exists


def own_device(local_rank: int | None = None) -> torch.device:
    """This process's accelerator, or the CPU where there is none: the one of its local rank, else the current one."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return CPU
    index = torch.accelerator.current_device_index() if local_rank is None else local_rank
    if index >= torch.accelerator.device_count():
        raise UsageError(
            f"local rank {index} has no {kind.type} device: this node has {torch.accelerator.device_count()};"
            " start at most as many ranks on a node"
        )
    return torch.device(kind.type, index)


def take_own_device(local_rank: int) -> torch.device:
    """Makes the accelerator of this local rank the current one, before anything is allocated; gives it, or the CPU."""
    device = own_device(local_rank)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    return device


def start() -> torch.device:
    """Takes this rank's device and starts the process group that torchrun describes, if none runs; gives the device.

    It is the accelerator of the local rank, with its own backend and gloo for the CPU, or the CPU where there is none.
    """
    if dist.is_initialized():
        return training_device()
    device = take_own_device(int(os.environ.get("LOCAL_RANK", "0")))
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backends_for(device), **alone)
    return device


def backends_for(device: torch.device) -> str:
    """What to start the process group with: gloo for what lies on the CPU, and the device's own backend."""
    gloo = str(dist.Backend.GLOO)
    return gloo if device.type == "cpu" else f"cpu:{gloo},{device.type}:{dist.get_default_backend_for_device(device)}"


def group_backend(device_type: str) -> str | None:
    """The backend by which the process group serves a kind of device; None where it does not."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config().split(","))
    return {kind: backend for kind, _, backend in pairs}.get(device_type)


def training_device(model: nn.Module | None = None, wanted: str | torch.device | None = None) -> torch.device:
    """Where a model is trained: where `wanted` says, where its weights are, or on the accelerator of the process group.

    Weights on the CPU count as not yet placed if the process group serves an accelerator by a backend of its own:
    FSDP2 moves them there. gloo alone means the CPU.
    """
    if wanted is not None:
        device = torch.device(wanted)
    else:
        placed = (p.device for p in (model.parameters() if model else ()) if p.device.type not in ("meta", "cpu"))
        device, own = next(placed, CPU), own_device()
        if device.type == "cpu" and own.type != "cpu" and not _gloo_or_none(own.type):
            device = own
    if dist.is_initialized() and group_backend(device.type) is None:
        raise UsageError(
            f"the model is to be trained on {device.type} but the process group serves {dist.get_backend_config()};"
            f" start it with dist.init_process_group({backends_for(device)!r})"
        )
    return device


def _gloo_or_none(device_type: str) -> bool:
    """Whether a process group runs that has nothing but gloo, or nothing at all, for such devices."""
    return dist.is_initialized() and group_backend(device_type) in (None, str(dist.Backend.GLOO))


def running_engine(device: torch.device) -> Engine:
    """The engine of this process group on a device."""
    return engine_for(is_cpu=device.type == "cpu", backend=group_backend(device.type) or "")


class DeviceCalls:
    """The calls of [Note: Device]; `module` stands in for the device's own module of torch in tests."""

    def __init__(self, device: torch.device, module: Any = None) -> None:
        self.device = device
        self.has_streams = device.type != "cpu" or module is not None
        self._module = module or (torch.get_device_module(device) if self.has_streams else None)

    @property
    def name(self) -> str:
        return self._module.get_device_name(self.device) if self._module else "CPU"

    @property
    def memory_bytes(self) -> int:
        """What the device has, of which a part is the driver's."""
        assert self._module, "a CPU's memory is shared; see osdp.training.run"
        return self._module.get_device_properties(self.device).total_memory

    def synchronize(self) -> None:
        """Waits until the device is done with all that it was given."""
        if self._module:
            self._module.synchronize(self.device)

    def moment(self) -> Any:
        """A moment of the current stream, or of the clock, for `seconds_between`."""
        if not self._module:
            return time.perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, first: Any, second: Any) -> float:
        """Between two moments; on a device with streams, call `synchronize` before."""
        return first.elapsed_time(second) / 1e3 if self._module else second - first

    def new_stream(self) -> Any:
        return self._module.Stream(self.device) if self._module else None

    @contextmanager
    def beside(self, stream: Any) -> Iterator[None]:
        """Within it, work is given to another stream, which begins when the current one has done what it was given."""
        assert self._module, "a CPU has no streams"
        stream.wait_stream(self._module.current_stream())
        with self._module.stream(stream):
            yield

    def join(self, stream: Any) -> None:
        """The current stream goes on when the other one has done what it was given."""
        assert self._module, "a CPU has no streams"
        self._module.current_stream().wait_stream(stream)

    def wait_for(self, event: Any) -> None:
        """The current stream goes on when the event has come; None is an event that came."""
        if event is not None and self._module:
            self._module.current_stream().wait_event(event)

    def free_cached(self) -> None:
        """Gives memory back that the caching allocator holds and nobody uses."""
        if self._module:
            self._module.empty_cache()

    def forget_peak(self) -> None:
        """Lets `peak_bytes` and `peak_reserved_bytes` begin anew."""
        if self._module:
            self._module.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        """The most that tensors took at a time."""
        assert self._module, "CPUs have no allocator that counts; see osdp.training.memory"
        return self._module.max_memory_allocated(self.device)

    def peak_reserved_bytes(self) -> int:
        """The most that the caching allocator held, in use or not."""
        assert self._module, "CPUs have no allocator that counts"
        return self._module.max_memory_reserved(self.device)

    def free_and_total_bytes(self) -> tuple[int, int]:
        """As the driver sees the device: what others took, and contexts, are in it."""
        assert self._module, "CPUs have no driver that counts"
        return self._module.mem_get_info(self.device)
