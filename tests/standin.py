"""A stand-in for an accelerator: streams, events and an allocator that only record, and a look-out for races.

torch lets Python stand in for a device (`PrivateUse1`). Fake tensors on it have shapes and no values, a fake process
group has no peers, and FSDP2 and osdp run on it as they do on CUDA, every stream and event of theirs ours.

[Note: Races]
Every stream has a clock that ticks with each operation given to it. A wait hands over all that the other stream, or
event, knows. An operation may read what was written, and write what was read or written, only by operations that its
stream knows of. Memory that is freed goes back to the stream that allocated it: that stream's next operation, which may
be given the same memory, must know of every operation that used it. That is what torch's sanitizer for CUDA checks on a
device.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import backend_registration

from osdp._torch import FakeTensorMode, TorchDispatchMode, tree_leaves

NAME = "standin"


class Stream:
    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.number = next(DEVICE.numbers)
        self.known = {self.number: 0}
        self.freed: list[_Used] = []  # what it allocated, and may allocate again

    def wait_stream(self, other: Stream) -> None:
        DEVICE.note("wait", self.number, other.number)
        self._learn(other.known)

    def wait_event(self, event: Event) -> None:
        DEVICE.note("wait", self.number, event.recorded_on)
        self._learn(event.known)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def _learn(self, known: dict[int, int]) -> None:
        DEVICE.look_for_freed()
        if not DEVICE.is_deaf:
            for number, clock in known.items():
                self.known[number] = max(clock, self.known.get(number, 0))


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing, self.recorded_on, self.known = enable_timing, -1, dict[int, int]()

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or DEVICE.current_stream()
        self.recorded_on, self.known = stream.number, dict(stream.known)
        DEVICE.note("record", stream.number, stream.number)

    def elapsed_time(self, other: Event) -> float:
        assert self.enable_timing and other.enable_timing
        return 2.5


class Device:
    """What `torch.<device>` is; `is_deaf` streams do not hear what they wait for, to see that races are found."""

    Stream, Event = Stream, Event

    def __init__(self) -> None:
        self.numbers, self.calls, self.is_deaf = itertools.count(), list[tuple[Any, ...]](), False
        self.races: list[str] = []
        self._streams: list[Stream] = []
        self._used: dict[int, _Used] = {}

    def note(self, *call: Any) -> None:
        self.calls.append(call)

    def current_stream(self, device: object = None) -> Stream:
        if not self._streams:
            self._streams.append(Stream())
        return self._streams[-1]

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.current_stream()
        self._streams.append(stream)
        try:
            yield
        finally:
            self._streams.pop()

    def synchronize(self, device: object = None) -> None:
        self.note("synchronize")

    def reset_peak_memory_stats(self, device: object) -> None:
        self.note("reset_peak_memory_stats")

    def max_memory_allocated(self, device: object) -> int:
        return 3 << 20

    def max_memory_reserved(self, device: object) -> int:
        return 5 << 20

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        self.note("seed", seed)

    def current_device(self) -> int:
        return 0

    def set_device(self, index: object) -> None:
        self.note("set_device", index)

    def device_count(self) -> int:
        return 1

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def ran(self, name: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        """An operation on the current stream."""
        self.look_for_freed()
        stream = self.current_stream()
        for used in stream.freed:
            for number, last in used.all.items():
                if stream.known.get(number, 0) < last:
                    self.races.append(f"{name} on stream {stream.number} may take memory that stream {number} uses")
        stream.freed.clear()
        clock = stream.known[stream.number] = stream.known[stream.number] + 1
        for tensors, writes in ((read, False), (written, True)):
            for tensor in tensors:
                used = self._use_of(tensor, stream)
                for number, last in (used.all if writes else used.writes).items():
                    if stream.known.get(number, 0) < last:
                        self.races.append(f"{name} on stream {stream.number} does not wait for stream {number}")
                used.all[stream.number] = clock
                if writes:
                    used.writes = {stream.number: clock}

    def look_for_freed(self) -> None:
        for key in [key for key, used in self._used.items() if used.is_free()]:
            used = self._used.pop(key)
            used.stream.freed.append(used)

    def _use_of(self, tensor: torch.Tensor, stream: Stream) -> _Used:
        storage = tensor.untyped_storage()
        return self._used.setdefault(storage._cdata, _Used(storage, stream))


class _Used:
    """Who used a storage, by stream, up to which clock; freed when nobody holds it any more, or by FSDP2's resize."""

    def __init__(self, storage: torch.UntypedStorage, stream: Stream) -> None:
        self.stream, self.all, self.writes = stream, dict[int, int](), dict[int, int]()
        self._weak, self._bytes = StorageWeakRef(storage), storage.nbytes()

    def is_free(self) -> bool:
        return self._weak.expired()


class LookOut(TorchDispatchMode):
    """Tells the stand-in of every operation on its tensors."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        named = [*zip(operation._schema.arguments, args, strict=False)]
        named += [(a, kwargs[a.name]) for a in operation._schema.arguments if kwargs and a.name in kwargs]
        read, written = list[torch.Tensor](), list[torch.Tensor]()
        for argument, value in named:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            (written if writes else read).extend(filter(_is_ours, tree_leaves(value)))
        known = {t.untyped_storage()._cdata for t in (*read, *written)}
        made = [t for t in tree_leaves(result) if _is_ours(t) and t.untyped_storage()._cdata not in known]
        is_view = any(
            each.alias_info is not None and not each.alias_info.is_write for each in operation._schema.returns
        )
        if not is_view and (read or written or made):
            DEVICE.ran(operation._schema.name, read, [*written, *made])
        return result


def _is_ours(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == NAME


DEVICE = Device()


def stand_in() -> torch.device:
    """Makes the stand-in this process's accelerator, for good."""
    backend_registration._setup_privateuseone_for_python_backend(rename=NAME, backend_module=DEVICE)
    return torch.device(NAME, 0)


@contextlib.contextmanager
def makes_tensors(mode: FakeTensorMode) -> Iterator[None]:
    """Within it the device makes tensors, fake ones of this mode: FSDP2 makes an empty one for every group."""

    def empty(size: Any, dtype: Any = None, layout: Any = None, device: Any = None, *more: Any, **options: Any) -> Any:
        with mode:
            return torch.empty(size, dtype=dtype, device=device)

    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    try:
        yield
    finally:
        library._destroy()
