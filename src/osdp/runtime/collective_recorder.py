"""What a step really sends: every collective in the order in which it is issued, to compare it with the planned graph.

[Note: CollectiveRecord]
Where FSDP2 communicates itself, its collectives pass torch's dispatcher: a dispatch mode sees them and asks `seen`.
On the asynchronous engine one may be several sends between ranks in a communication thread: there the leaves of
osdp.runtime.collectives say what they do, with `issue`. Both name a group by its ranks. What two threads carry at once
is put into the order in which it was given: each takes its turn.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from osdp.cost.schedule import CollectiveRecord, group_name
from osdp.cost.time_model import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

# The kind of an operation of c10d, and which arguments are the tensor of the full, unsharded size, and the group.
_OPERATIONS = {
    "c10d::_allgather_base_": (ALL_GATHER, 0, 2),
    "c10d::_reduce_scatter_base_": (REDUCE_SCATTER, 1, 2),
    "c10d::allreduce_": (ALL_REDUCE, 0, 1),
}


class Recording:
    """The collectives of a segment of time, on nodes of `devices_per_node` ranks. Groups of one rank send nothing."""

    def __init__(self, devices_per_node: int) -> None:
        self._issued: list[tuple[int, CollectiveRecord]] = []
        self._devices = devices_per_node
        self._groups: dict[str, str | None] = {}

    @property
    def issued(self) -> list[CollectiveRecord]:
        """All of them, by their turns."""
        return [issued for _, issued in sorted(self._issued, key=lambda pair: pair[0])]

    def add(self, kind: str, group: dist.ProcessGroup, nbytes: int) -> None:
        name = self._name(group)
        if name is not None:
            self._issued.append((getattr(_now, "turn", 0), CollectiveRecord(kind, name, nbytes)))

    def seen(self, operation: Any, args: Sequence[Any]) -> None:
        """Adds what an operation of c10d sends; others of c10d (barriers, broadcasts) are no part of a step."""
        if operation._schema.name not in _OPERATIONS:
            return
        kind, whole, group = _OPERATIONS[operation._schema.name]
        tensors = args[whole] if isinstance(args[whole], list) else [args[whole]]
        self.add(kind, dist.ProcessGroup.unbox(args[group]), sum(_nbytes(tensor) for tensor in tensors))

    def _name(self, group: dist.ProcessGroup) -> str | None:
        if group.group_name not in self._groups:
            self._groups[group.group_name] = group_name(
                dist.get_process_group_ranks(group), dist.get_world_size(), self._devices
            )
        return self._groups[group.group_name]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


_recording: Recording | None = None
_now = threading.local()  # the turn of what this thread carries


@contextmanager
def recording(devices_per_node: int) -> Iterator[Recording]:
    """Within it, what carried collectives issue is recorded, whichever thread runs them."""
    global _recording
    before, _recording = _recording, Recording(devices_per_node)
    try:
        yield _recording
    finally:
        _recording = before


def take_turn(number: int) -> None:
    """What this thread issues from now on comes after all that was issued in turns of lower numbers."""
    _now.turn = number


def issue(kind: str, group: dist.ProcessGroup, whole: Tensor) -> None:
    """Called by a carried collective as it begins; `whole` has the full, unsharded size."""
    if _recording is not None:
        _recording.add(kind, group, _nbytes(whole))
