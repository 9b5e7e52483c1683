"""Cases of data files: `osdp train --data FILE` on a model of 256 tokens and windows of 64."""

from __future__ import annotations

import io
import random
import struct
from pathlib import Path

import numpy as np

from benchmarks.fuzz.case import Case, flipped, odd_file

TRAIN = ("train", "gpt-tiny", "--steps", "1", "--global-batch", "1", "--quiet")


def data_case(folder: Path, chance: random.Random) -> Case:
    if chance.random() > 0.97:
        path = folder / chance.choice(("tokens.npy", "tokens.bin", "text.txt"))
        tokens = np.arange(5000, dtype=np.uint16) % 128 + 1
        texts = {".npy": _saved(tokens), ".bin": tokens.tobytes(), ".txt": bytes(tokens.tolist())}
        path.write_bytes(texts[path.suffix])
        return Case(f"train --data: {path.name}", (*TRAIN, "--data", str(path)), good=True)
    make = chance.choice((_npy, _npy, _bin, _text, _odd, _tokenizer))
    what, arguments, nonsense = make(folder, chance)
    return Case(f"train --data: {what}", (*TRAIN, *arguments), nonsense)


def _saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def _npy(folder: Path, chance: random.Random) -> tuple[str, tuple[str, ...], bool]:
    path = folder / "tokens.npy"
    good = np.arange(5000, dtype=np.uint16) % 256
    archive = io.BytesIO()
    np.savez(archive, tokens=good)
    header = _saved(good)
    arrays = {
        "npz named npy": archive.getvalue(),
        "two dimensions": _saved(good.reshape(2, -1)),
        "floats": _saved(good.astype(np.float32)),
        "objects": _saved(np.array([{}, "a"], dtype=object)),
        "texts": _saved(np.array(["a", "b"])),
        "complex": _saved(good.astype(np.complex64)),
        "records": _saved(np.zeros(100, dtype=[("a", "u2")])),
        "no dimension": _saved(np.array(3, dtype=np.uint16)),
        "no tokens": _saved(good[:0]),
        "one token": _saved(good[:1]),
        "tokens above the vocabulary": _saved(good + 60_000),
        "negative tokens": _saved(-good.astype(np.int64)),
        "cut short": header[: chance.randrange(1, len(header) - 1)],
        "a larger shape": header.replace(b"(5000,)", b"(9" + b"9" * 17 + b",)"),
        "a header of code": header.replace(b"'shape': (5000,)", b"'shape': exit(),"),
        "a long header": b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**31 - 1) + b" " * 100,
        "text": b"to be or not to be " * 100,
    }
    what = chance.choice(("bytes", "bytes", *arrays))
    path.write_bytes(flipped(header, chance) if what == "bytes" else arrays[what])
    return f"npy, {what}", ("--data", str(path)), what != "bytes"


def _bin(folder: Path, chance: random.Random) -> tuple[str, tuple[str, ...], bool]:
    path = folder / "tokens.bin"
    good = (np.arange(5000, dtype=np.uint16) % 256).tobytes()
    files = {
        "half a token": good[:-1],
        "one token": good[:2],
        "tokens above the vocabulary": (np.arange(5000, dtype=np.uint16) + 60_000).tobytes(),
        "of another type": (np.arange(5000, dtype=np.uint32) % 256 << 16).tobytes(),
    }
    what = chance.choice(list(files))
    path.write_bytes(files[what])
    return f"bin, {what}", ("--data", str(path)), True


def _text(folder: Path, chance: random.Random) -> tuple[str, tuple[str, ...], bool]:
    files = {
        ".jsonl": b"to be or not to be\n" * 200,
        ".json": b'["to be or not to be"]' * 200,
        ".parquet": b"PAR1" + b"to be" * 200,
        ".npz": b"PK\x03\x04" + b"to be" * 200,
        ".gz": b"\x1f\x8b\x08" + b"to be" * 200,
        ".csv": b"to be,or not\n" * 200,
        ".zero.txt": b"to be\0or not" * 200,
        ".utf16.txt": ("to be or not " * 200).encode("utf-16"),
        ".short.txt": b"to be",
    }
    suffix = chance.choice(list(files))
    path = folder / f"text{suffix}"
    path.write_bytes(files[suffix])
    return f"text, {suffix}", ("--data", str(path)), True


def _odd(folder: Path, chance: random.Random) -> tuple[str, tuple[str, ...], bool]:
    path = folder / f"data{chance.choice(('.npy', '.bin', '.txt'))}"
    what = odd_file(path, b"to be or not to be " * 300, chance)
    free = path.suffix != ".npy" and what in (
        "cut short",
        "binary",
        "UTF-16",
        "nested deeply",
        "another form",
        "too large",
    )
    return f"{path.suffix}, {what}", ("--data", str(path)), not free


def _tokenizer(folder: Path, chance: random.Random) -> tuple[str, tuple[str, ...], bool]:
    path, text = folder / "tokenizer.json", folder / "text.txt"
    text.write_bytes(b"to be or not to be " * 300)
    what = odd_file(path, b'{"version": "1.0", "model": {"type": "WordLevel", "vocab": {}, "unk_token": "x"}}', chance)
    return f"tokenizer, {what}", ("--data", str(text), "--tokenizer", str(path)), True
