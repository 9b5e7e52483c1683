"""Writes safetensors files tensor by tensor: the library's own writer needs all tensors of a file at once.

The format: the header's length in 8 bytes, the header in JSON (each tensor's dtype, shape and place), the tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from osdp.errors import UsageError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Entry:
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def shard_names(entries: Sequence[Entry], one_file: str, most_bytes: int) -> dict[str, list[Entry]]:
    """Which file holds which tensors, in their order: as few files as that allows, named as transformers does."""
    shards: list[list[Entry]] = [[]]
    for entry in entries:
        if shards[-1] and sum(other.size for other in shards[-1]) + entry.size > most_bytes:
            shards.append([])
        shards[-1].append(entry)
    if len(shards) == 1:
        return {one_file: shards[0]}
    stem, suffix = Path(one_file).stem, Path(one_file).suffix
    return {f"{stem}-{i:05d}-of-{len(shards):05d}{suffix}": found for i, found in enumerate(shards, 1)}


class StreamWriter:
    """One file: the header at once, then every tensor in the order of the entries."""

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        self._left = list(reversed(entries))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for entry in entries:
            if entry.dtype not in DTYPES:
                raise UsageError(f"{entry.name} is {entry.dtype}, which safetensors lacks; save it in another dtype")
            start, end = end, end + entry.size
            header[entry.name] = {
                "dtype": DTYPES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    @property
    def is_complete(self) -> bool:
        return not self._left

    def write(self, name: str, tensor: Tensor) -> None:
        entry = self._left.pop()
        data = tensor.to(entry.dtype).contiguous().reshape(-1).view(torch.uint8)
        assert entry.name == name and data.numel() == entry.size
        data.numpy().tofile(self._file)
        if self.is_complete:
            self.close()

    def close(self) -> None:
        self._file.close()
