"""The errors a user sees: each says the value, the limit and the remedy in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any


class OsdpError(Exception):
    """Base of every error that this package raises on purpose."""


class UsageError(OsdpError):
    """Bad input: a value that the caller can correct."""


@dataclass(frozen=True)
class Remedy:
    """One change that would make a plan fit, and the smallest peak that it reaches.

    `limit_bytes` is the limit after the change, where the change is one of the limit itself. An `estimate` is not
    computed as a plan's peak is; see [Note: Remedies] in osdp.infeasible.
    """

    change: str
    peak_bytes: int
    limit_bytes: int | None = None
    estimate: bool = False


class DoesNotFit(OsdpError):
    """No plan fits the memory: the smallest reachable peak, what it is made of, and what would help."""

    def __init__(
        self,
        message: str,
        *,
        peak_bytes: int,
        limit_bytes: int,
        peak_at: str,
        memory_parts: Mapping[str, int],
        remedies: tuple[Remedy, ...],
    ) -> None:
        super().__init__(message)
        self.peak_bytes = peak_bytes
        self.limit_bytes = limit_bytes
        self.peak_at = peak_at
        self.memory_parts = memory_parts
        self.remedies = remedies

    def __reduce__(self) -> tuple[Any, ...]:  # ranks send it to each other
        return partial(DoesNotFit, **self.__dict__), self.args
