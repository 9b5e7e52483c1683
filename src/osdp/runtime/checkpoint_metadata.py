"""Reads a checkpoint's `.metadata` as data: a pickle that may come from a stranger.

[Note: Metadata]
torch.distributed.checkpoint writes its metadata as a pickle, and a pickle can call anything that it names. Here it can
name only what torch's checkpoint planner writes, and even that is not called: each name stands for a plain record, made
anew for every file. torch's own objects are then made of the records, field by field, with their types and ranges
checked. Tensors alone are admitted: an entry of bytes would be a pickle of its own, which torch loads without a check.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from osdp.errors import OsdpError, UsageError
from osdp.files import open_regular

T = TypeVar("T")

METADATA = ".metadata"

_PLANNER = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    (_PLANNER, "Metadata"),
    (_PLANNER, "MetadataIndex"),
    (_PLANNER, "TensorStorageMetadata"),
    (_PLANNER, "TensorProperties"),
    (_PLANNER, "ChunkStorageMetadata"),
    (_PLANNER, "StorageMeta"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_VALUES: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    (_PLANNER, "_MEM_FORMAT_ENCODING"): int,
    ("pathlib", "PosixPath"): lambda *parts: "/".join(parts),
    ("pathlib", "WindowsPath"): lambda *parts: "\\".join(parts),
}
_DTYPES = {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


@dataclass(frozen=True)
class Stored:
    """Where a box of a tensor is; what torch's reader asks for."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


def open_file(file: Path, remedy: str) -> BinaryIO:
    """A file of a checkpoint; a pipe or a device in its place is damage, and is never waited for."""
    try:
        return open_regular(file, remedy=remedy)
    except UsageError as error:
        raise OsdpError(str(error)) from None


def read_metadata(path: Path, files: Mapping[str, Mapping[str, int]], remedy: str) -> Metadata:
    """The metadata of the checkpoint at `path`, whose files have the given sizes; `remedy` says what to do if not."""
    file = path / METADATA
    try:
        with open_file(file, remedy) as stream:
            return _metadata(_Records(stream).load(), files)
    except OSError as error:
        raise OsdpError(f"cannot read {file}: {error.strerror}; {remedy}") from None
    except OsdpError:
        raise
    except _Forbidden as error:
        raise OsdpError(f"{file} names {error}, which no checkpoint has, and could run code: {remedy}") from None
    except Exception as error:  # whatever a damaged pickle meets
        raise OsdpError(f"{file} is damaged: {type(error).__name__}: {error}; {remedy}") from None


class _Forbidden(Exception):
    pass


class _Record:
    """What a pickle says of one object."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Records(pickle.Unpickler):
    """Makes records and plain values; see [Note: Metadata]."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._made = {key: type(key[1], (_Record,), {}) for key in _RECORDS}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        key = module_name, global_name
        found = self._made.get(key) or _VALUES.get(key) or _DTYPES.get(key)
        if found is None:
            raise _Forbidden(f"{module_name}.{global_name}")
        return found

    def persistent_load(self, pid: Any) -> Any:
        raise _Forbidden(f"persistent object {pid!r}")


def _metadata(record: Any, files: Mapping[str, Mapping[str, int]]) -> Metadata:
    fields = _fields(record, "Metadata")
    tensors = _of(dict, fields["state_dict_metadata"])
    stored = _of(dict, fields["storage_data"])
    return Metadata(
        state_dict_metadata={_of(str, name): _tensor(entry) for name, entry in tensors.items()},
        storage_data={_index(index): _stored(entry, files) for index, entry in stored.items()},
        storage_meta=StorageMeta(),
    )


def _tensor(record: Any) -> TensorStorageMetadata:
    fields = _fields(record, "TensorStorageMetadata")
    dtype, *_ = _of(tuple, _state(fields["properties"], "TensorProperties"))
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in _of(list, fields["chunks"])]
    size, boxes = _size(fields["size"]), [(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks]
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(size):
        raise ValueError(
            f"the boxes of a tensor of size {list(size)} are not all of it"
        )  # the rest would stay as it is
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=_of(torch.dtype, dtype)),
        size=size,
        chunks=[ChunkStorageMetadata(offsets, sizes) for offsets, sizes in boxes],
    )


def _index(record: Any) -> MetadataIndex:
    fields = _fields(record, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _of(str, fields["fqn"]),
        None if offset is None else _size(offset),
        None if index is None else _number(index),
    )


def _stored(record: Any, files: Mapping[str, Mapping[str, int]]) -> Stored:
    fields = _fields(record, "_StorageInfo")
    if fields.get("transform_descriptors"):
        raise ValueError(f"files are transformed by {fields['transform_descriptors']}")
    stored = Stored(_of(str, fields["relative_path"]), _number(fields["offset"]), _number(fields["length"]))
    if stored.relative_path not in files:
        raise ValueError(f"{stored.relative_path!r} is no file of the checkpoint")
    if stored.offset + stored.length > files[stored.relative_path]["bytes"]:
        raise ValueError(f"{stored.relative_path} ends before byte {stored.offset + stored.length:,}")
    return stored


def _state(record: Any, kind: str) -> Any:
    if not isinstance(record, _Record) or type(record).__name__ != kind:
        raise ValueError(f"{type(record).__name__} instead of {kind}")
    return record.state


def _fields(record: Any, kind: str) -> dict[str, Any]:
    return _of(dict, _state(record, kind))


def _size(value: Any) -> torch.Size:
    return torch.Size(_number(each) for each in _of(tuple, value))


def _number(value: Any) -> int:
    if _of(int, value) < 0:
        raise ValueError(f"{value} is negative")
    return value


def _of(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise ValueError(f"{type(value).__name__} instead of {kind.__name__}")
    return value
