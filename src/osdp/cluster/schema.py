"""What numbers of machines may be; see [Note: Declared types] in osdp.files.

Lower bounds keep times finite: a rate of 1e-320 bytes per second would make them infinite. Upper bounds are far beyond
any machine and keep products of a few such numbers within 64 bits.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MOST_DEVICES = 1 << 20
MOST_MEMORY_BYTES = 1 << 60

Count = Annotated[int, Meta(ge=1, le=MOST_DEVICES)]
MemoryBytes = Annotated[int, Meta(ge=1, le=MOST_MEMORY_BYTES)]
PerSecond = Annotated[float, Meta(ge=1, le=1e18)]
HostRate = Annotated[float, Meta(ge=0, le=1e18)]
Efficiency = Annotated[float, Meta(ge=1e-3, le=1)]
Part = Annotated[float, Meta(ge=0, le=1)]
Traffic = Annotated[float, Meta(ge=0, le=1e6)]
ReservedBytes = Annotated[int, Meta(ge=0, le=MOST_MEMORY_BYTES)]
Reserve = Annotated[float, Meta(ge=0, lt=1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
HostSeconds = Annotated[float, Meta(ge=0, lt=1)]
