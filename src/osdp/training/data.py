"""Training data: files of text or tokens, cut into windows, in an order that does not depend on the ranks.

[Note: Order of samples]
A run's samples are numbered from its first step on. With n windows, sample g belongs to epoch g // n and is the window
at place g % n of that epoch's shuffle, which depends on the seed and the epoch alone. Step s of global batch G takes
the samples s * G to (s + 1) * G - 1, whoever computes them. A run that goes on with other ranks, and the same global
batch, so sees the same samples in the same steps, and only the step must be remembered.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from osdp.errors import UsageError
from osdp.files import read_file, require_regular

Array = np.ndarray[Any, np.dtype[Any]]

TOKEN_DTYPES = ("uint16", "uint32")
_ROUNDS = 4  # of the Feistel network: what Luby and Rackoff need for a permutation that looks random
_LOOKED_AT = 1 << 26  # tokens that are looked at before training starts; every batch is looked at later
_EDGE_BYTES = 1 << 20
_FEW = 64  # tokens, of which half may be 0 by chance
_MOST_ENCODED_BYTES = 4 << 30
_JSON_LINES = (".jsonl", ".ndjson")
_LINE = '{"text": "..."}'
_NO_TEXT = (
    ".json",
    ".csv",
    ".tsv",
    ".npz",
    ".parquet",
    ".arrow",
    ".gz",
    ".zst",
    ".xz",
    ".bz2",
    ".zip",
    ".pdf",
)


def demo_text() -> Path:
    """A book in the public domain that comes with the package."""
    return Path(str(resources.files("osdp.training").joinpath("text", "alice.txt")))


def open_tokens(path: Path, *, tokenizer: Path | None = None, dtype: str = "uint16") -> Array:
    """The tokens of one file: .npy and .bin hold them and are mapped into memory; any other file is text.

    The tokens of a text are its bytes, or what the tokenizer makes of it. A .jsonl file has an object with a "text" on
    every line: the texts follow each other, with a newline between two.
    """
    remedy = "give a file of text or tokens with --data"
    try:
        status = path.stat()
        require_regular(path, status, remedy=remedy)
        if status.st_size == 0:
            raise UsageError(f"{path}: it is empty; {remedy}")
        if path.suffix == ".npy":
            return _npy(path)
        if path.suffix == ".bin":
            return _bin(path, status.st_size, np.dtype(dtype))
        _require_text(path)
        if tokenizer is None and path.suffix.lower() not in _JSON_LINES:
            return np.memmap(path, np.uint8, "r")
        text = _text(path, status.st_size)
        return _encoded(text, tokenizer) if tokenizer else np.frombuffer(text.encode(), np.uint8)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path!s:.200}: it cannot be read ({reason}); {remedy}") from None


def _require_text(path: Path) -> None:
    """Refuses what is no text by its name or its first bytes: bytes of an archive would be trained on as letters."""
    if path.suffix.lower() in _NO_TEXT:
        raise UsageError(
            f"{path}: {path.suffix} is no text; write the texts alone to a .txt file, or their tokens to a .npy file"
        )
    with path.open("rb") as file:
        if b"\0" in file.read(_EDGE_BYTES):
            raise UsageError(
                f"{path}: it has zero bytes, which text has not; give UTF-8 text, or tokens in .npy or .bin"
            )


def _npy(path: Path) -> Array:
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # a header that was changed raises many types
        raise UsageError(f"{path} is cut short or is no .npy file ({str(error)[:200]}); write it again") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        raise UsageError(
            f"{path} holds {tokens.dtype} of shape {tokens.shape}; give one dimension of whole numbers, such as uint16"
        )
    return tokens


def _bin(path: Path, size_bytes: int, dtype: np.dtype[Any]) -> Array:
    if size_bytes % dtype.itemsize:
        raise UsageError(
            f"{path} has {size_bytes:,} bytes, which is no whole number of {dtype} tokens: it is cut short, or its "
            f"tokens have another type; write it again, or give --token-dtype"
        )
    tokens = np.memmap(path, dtype, "r")
    first = tokens[: _EDGE_BYTES // dtype.itemsize]
    if dtype.itemsize == 2 and len(first) >= _FEW and not (first[::2].any() and first[1::2].any()):
        raise UsageError(f"{path}: every other token is 0, as if its tokens were uint32; give --token-dtype uint32")
    return tokens


def _text(path: Path, size_bytes: int) -> str:
    """The text of a whole file, of .jsonl the texts that it holds."""
    if size_bytes > _MOST_ENCODED_BYTES:
        raise UsageError(
            f"{path}: it has {size_bytes:,} bytes, and at most {_MOST_ENCODED_BYTES:,} are encoded at the start; "
            "encode it before, and give the tokens as .npy or .bin"
        )
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix.lower() not in _JSON_LINES:
        return text
    lines = enumerate(text.split("\n"), start=1)
    return "\n".join(_text_of_line(line, f"{path}, line {number}") for number, line in lines if line.strip())


def _text_of_line(line: str, where: str) -> str:
    try:
        document = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: it is no JSON ({error}); write one object a line, as {_LINE}") from None
    text = document.get("text") if isinstance(document, dict) else None
    if not isinstance(text, str):
        found = f"has {', '.join(map(str, document))[:80]}" if isinstance(document, dict) else "is no object"
        raise UsageError(f'{where} {found} and no "text"; write one object a line, as {_LINE}')
    return text


def _encoded(text: str, tokenizer: Path) -> Array:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UsageError(f"--tokenizer {tokenizer} needs the package tokenizers: pip install tokenizers") from None
    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    text_of_tokenizer = read_file(file, remedy="give a tokenizer.json or its folder with --tokenizer")
    try:
        reader = Tokenizer.from_str(text_of_tokenizer.decode())
    except Exception as error:  # the library raises Exception itself
        raise UsageError(f"{file} is no tokenizer ({error}); give a tokenizer.json or its folder") from None
    return np.asarray(reader.encode(text, add_special_tokens=False).ids, np.uint32)


@dataclass(frozen=True)
class Windows:
    """Files of tokens as one row of windows of `length` tokens.

    A window starts at the last token of the one before, so that every token but the first is predicted once. Windows
    do not cross from file to file, and what does not fill the last one of a file is left out.
    """

    files: tuple[Array, ...]
    length: int

    @cached_property
    def _first(self) -> list[int]:
        """The number of every file's first window, and the number of windows in all."""
        return [0, *np.cumsum([max(0, len(tokens) - 1) // (self.length - 1) for tokens in self.files]).tolist()]

    def __len__(self) -> int:
        return self._first[-1]

    def __getitem__(self, number: int) -> Array:
        file = int(np.searchsorted(self._first, number, side="right")) - 1
        start = (number - self._first[file]) * (self.length - 1)
        _refuse_shrunk(self.files[file])
        return np.asarray(self.files[file][start : start + self.length], np.int64)

    def batch(self, numbers: Sequence[int], *, vocab: int | None) -> Array:
        """Windows one above the other; tokens that the model does not have are refused."""
        batch = np.stack([self[number] for number in numbers])
        if vocab is not None and (batch.max() >= vocab or batch.min() < 0):
            raise UsageError(_too_many(int(batch.max() if batch.max() >= vocab else batch.min()), vocab))
        return batch

    def check(self, vocab: int | None) -> None:
        """Refuses data with less than one window, or with tokens that the model does not have."""
        if len(self) == 0:
            tokens = sum(map(len, self.files))
            raise UsageError(
                f"the data ends after {tokens:,} tokens, and one window has {self.length:,}; give more data or a "
                "shorter --seq-len"
            )
        for tokens in self.files:
            first = tokens[:_LOOKED_AT]
            highest, lowest = (int(first.max()), int(first.min())) if len(first) else (0, 0)
            if lowest < 0 or (vocab is not None and highest >= vocab):
                raise UsageError(_too_many(lowest if lowest < 0 else highest, vocab))

    @property
    def digest(self) -> str:
        """Tells data apart by its lengths, its beginnings and its ends."""
        known = [self.length]
        for tokens in self.files:
            edges = (tokens[: _EDGE_BYTES // tokens.itemsize], tokens[-(_EDGE_BYTES // tokens.itemsize) :])
            known += [len(tokens), *(zlib.crc32(np.ascontiguousarray(edge).tobytes()) for edge in edges)]
        return hashlib.sha256(repr(known).encode()).hexdigest()[:16]


def _refuse_shrunk(tokens: Array) -> None:
    """A mapped file that was cut meanwhile: reading beyond its end would end the process, without a word."""
    if not isinstance(tokens, np.memmap) or tokens.filename is None:
        return
    with contextlib.suppress(FileNotFoundError):  # what is removed stays mapped
        size_bytes, mapped_bytes = os.path.getsize(tokens.filename), tokens.offset + tokens.nbytes
        if size_bytes < mapped_bytes:
            raise UsageError(
                f"the data {tokens.filename} was cut to {size_bytes:,} of {mapped_bytes:,} bytes while it was read; "
                "restore it, and go on with --resume"
            )


def _too_many(token: int, vocab: int | None) -> str:
    if token < 0 or vocab is None:
        return f"the data has token {token:,}, and tokens are numbered from 0; write the data again"
    return (
        f"the data has token {token:,}, and the model knows {vocab:,} (0 to {vocab - 1:,}); train a model with a "
        "larger vocabulary, or make the tokens with its own --tokenizer"
    )


@dataclass(frozen=True)
class Order:
    """Which windows a run takes, in which order; see [Note: Order of samples]."""

    windows: int
    seed: int

    def window(self, sample: int) -> int:
        epoch, place = divmod(sample, self.windows)
        return shuffled(place, self.windows, key=struct.pack("<QQ", self.seed % (1 << 64), epoch))

    def of_rank(self, step: int, micro: int, *, rank: int, ranks: int, batch: int, accumulation: int) -> list[int]:
        """The windows of one micro-batch of one rank."""
        first = ((step * accumulation + micro) * ranks + rank) * batch
        return [self.window(first + index) for index in range(batch)]


def shuffled(place: int, size: int, *, key: bytes) -> int:
    """The element at a place of a shuffle of range(size), without making the shuffle.

    A Feistel network permutes the numbers of 2 * half bits; one that is not below `size` is permuted again.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        left, right = place >> half, place & ((1 << half) - 1)
        for turn in range(_ROUNDS):
            mixed = hashlib.blake2b(struct.pack("<QB", right, turn), key=key, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(mixed, "little") & ((1 << half) - 1))
        place = left << half | right
        if place < size:
            return place
