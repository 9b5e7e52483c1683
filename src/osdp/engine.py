"""The engines that can run a plan, as values: what each does beside FSDP2's own order of things."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EngineName = Literal["fsdp2", "async-gloo"]  # in plan and cluster files


@dataclass(frozen=True)
class Engine:
    """How collectives are carried out.

    `gathers_before_waiting`: forward issues the next unit's gather before it waits for its own.
    `reduces_before_waiting`: a reduction begins before the one before it is waited for.
    """

    name: EngineName
    gathers_before_waiting: bool
    reduces_before_waiting: bool


STOCK = Engine("fsdp2", gathers_before_waiting=False, reduces_before_waiting=False)
ASYNC_GLOO = Engine("async-gloo", gathers_before_waiting=True, reduces_before_waiting=True)
ENGINES: dict[str, Engine] = {engine.name: engine for engine in (STOCK, ASYNC_GLOO)}


def engine_for(*, is_cpu: bool, backend: str = "gloo") -> Engine:
    """The engine where none is named. On CPUs stock FSDP2 waits for every collective of gloo's."""
    return ASYNC_GLOO if is_cpu and backend == "gloo" else STOCK
