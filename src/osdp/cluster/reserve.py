"""What of a device's memory is not the plan's: reserved is more than allocated.

[Note: Reserve]
A process on an accelerator holds its context (driver and kernels' code), buffers of every communicator, workspaces of
libraries, and blocks that the caching allocator has reserved and cannot give to a tensor of another size: fragments.
The first three are bytes, the last is a part of what remains, smaller with expandable segments, which grow where they
are instead of standing beside each other. A plan for a part of a device's memory leaves that part
of each of them; a `reserve_fraction` that is given for a cluster replaces them all.
"""

from __future__ import annotations

from collections.abc import Callable

from osdp.cluster.device import Device

CONTEXT, COMMUNICATORS, WORKSPACES, FRAGMENTS = "context", "communicators", "workspaces", "fragmentation"
RESERVED = "reserved"


def reserve_of(
    device: Device, total_bytes: int, communicators: int, fraction: float | None, *, expandable: bool = False
) -> dict[str, int]:
    """Bytes of `total_bytes` by what takes them; see [Note: Reserve]."""
    if fraction is not None:
        return {RESERVED: total_bytes - int(total_bytes * (1 - fraction))}
    part = min(1.0, total_bytes / device.memory_bytes)
    fixed = {
        CONTEXT: int(device.context_bytes * part),
        COMMUNICATORS: int(device.communicator_bytes * communicators * part),
        WORKSPACES: int(device.workspace_bytes * part),
    }
    rest = total_bytes - sum(fixed.values())
    fragments = device.expandable_reserve_fraction if expandable else device.reserve_fraction
    lines = fixed | {FRAGMENTS: rest - int(rest * (1 - fragments))}
    return {name: size for name, size in lines.items() if size}


def memory_for(limit_bytes: int, reserve: Callable[[int], dict[str, int]]) -> int:
    """The least memory with at least this limit, given what is reserved of any."""

    def limit_of(size: int) -> int:
        return size - sum(reserve(size).values())

    low, high = 1, max(2, limit_bytes)
    while limit_of(high) < limit_bytes:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if limit_of(middle) < limit_bytes else (low, middle)
    return high if limit_of(low) < limit_bytes else low
