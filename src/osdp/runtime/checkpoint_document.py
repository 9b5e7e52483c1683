"""What `checkpoint.json` may say, which a stranger may have written; see [Note: Declared types] in osdp.files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from osdp.errors import OsdpError, UsageError
from osdp.files import convert

Whole = Annotated[int, Meta(ge=0, le=1 << 60)]
FileName = Annotated[str, Meta(pattern="^[^/]+$", max_length=255)]  # in the checkpoint's own folder
Shapes = Mapping[str, tuple[Whole, ...]]


@dataclass(frozen=True)
class StoredFile:
    bytes: Whole
    crc32: Annotated[int, Meta(ge=0, lt=1 << 32)]


@dataclass(frozen=True)
class StoredGroup:
    """A parameter group of the optimizer, by the parameters' names."""

    parameters: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class StoredState:
    """What the optimizer keeps for one parameter: names of tensors, and plain values."""

    tensors: tuple[str, ...]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class StoredOptimizer:
    kind: str
    groups: tuple[StoredGroup, ...]
    states: Mapping[str, StoredState]


@dataclass(frozen=True)
class Document:
    version: Whole
    step: Whole
    world_size: Whole
    model: str
    plan: str | None
    torch: str
    parameters: Shapes
    buffers: Shapes
    optimizer: StoredOptimizer | None
    extra: Mapping[str, Any]
    files: Mapping[FileName, StoredFile]


def check_document(document: Mapping[str, Any], *, remedy: str) -> None:
    """Raises OsdpError with a sentence unless a checkpoint's document is as declared."""
    try:
        convert(Document, document, name="checkpoint.json", remedy=remedy)
    except UsageError as error:
        raise OsdpError(str(error)) from None
