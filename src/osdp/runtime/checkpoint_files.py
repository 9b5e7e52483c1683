"""A folder of checkpoints on the disk: what is whole, what is left over, and how one comes to be; see [Note: Whole]."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from osdp.errors import OsdpError, UsageError
from osdp.runtime.checkpoint_document import check_document
from osdp.runtime.checkpoint_metadata import METADATA, open_file
from osdp.runtime.checkpoint_states import CHECKPOINT_VERSION, difference

DOCUMENT = "checkpoint.json"

_WHOLE = re.compile(r"step-(\d{8,})(\.replaced-\w+)?")
_LEFT_OVER = re.compile(r"(step-\d{8,})\.(partial|removed|replaced)-\w+")
_CHUNK_BYTES = 1 << 22

Sums = dict[str, dict[str, int]]  # by file name


def steps_in(root: Path) -> dict[int, Path]:
    """The whole checkpoints of a folder, in the order of their steps."""
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        match = _WHOLE.fullmatch(path.name)
        if match and path.is_dir():
            found.setdefault(int(match[1]), path)  # a replaced one counts only until the new one is there
    return dict(sorted(found.items()))


def find(root: Path, step: int | None) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint, or that of a step, with what its document says."""
    steps = steps_in(root)
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise UsageError(f"{root} has no checkpoint of step {step}; there: {there}")
    if not steps:
        return None
    path = steps[max(steps) if step is None else step]
    return path, read_document(path)


def read_document(path: Path) -> dict[str, Any]:
    file = path / DOCUMENT
    try:
        with open_file(file, remedy(path)) as stream:
            document = json.loads(stream.read())
        version, checksum = document["version"], document.pop("checksum")
    except OSError as error:
        raise OsdpError(f"cannot read {file}: {error.strerror}; {remedy(path)}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise OsdpError(f"{file} is damaged: it is no JSON of a checkpoint; {remedy(path)}") from None
    if version != CHECKPOINT_VERSION:
        raise UsageError(
            f"{file} has version {version!r}, this osdp reads version {CHECKPOINT_VERSION}; load it with the osdp that"
            " saved it"
        )
    if checksum != _sum_of(document):
        raise OsdpError(f"{file} is damaged: its checksum is another; {remedy(path)}")
    check_document(document, remedy=remedy(path))
    return document


def check_file(file: Path, *, bytes: int, crc32: int) -> None:
    """Compares a file with the size and the checksum that it was written with."""
    found = 0
    try:
        with open_file(file, remedy(file.parent)) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != bytes:
                raise OsdpError(f"{file} is damaged: {size:,} bytes instead of {bytes:,}; {remedy(file.parent)}")
            while chunk := stream.read(_CHUNK_BYTES):
                found = zlib.crc32(chunk, found)
    except OSError as error:
        raise OsdpError(f"cannot read {file}: {error.strerror}; {remedy(file.parent)}") from None
    if found != crc32:
        raise OsdpError(f"{file} is damaged: its checksum is {found:08x} instead of {crc32:08x}; {remedy(file.parent)}")


class Writer:
    """Writes one checkpoint, every rank its own file; rank 0 begins it and makes it whole."""

    document: dict[str, Any]

    def __init__(self, root: Path, step: int, keep: int, rank: int) -> None:
        self.root, self.step, self.keep, self.rank = root, step, keep, rank
        self.path = self.partial = root / f"step-{step:08d}"
        self.planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._files = _SummedFiles()

    def begin(self, plans: list[tuple[int, SavePlan]]) -> list[tuple[Path, SavePlan]]:
        """On rank 0: refuses what must not be written, makes the folder, and divides the work."""
        if len({step for step, _ in plans}) > 1:
            raise UsageError(f"the ranks save steps {sorted({step for step, _ in plans})}; give all the same step")
        divided, self._metadata = self.planner.create_global_plan([plan for _, plan in plans])
        with self._explained():
            self._refuse()
            _remove_leftovers(self.root)
            self.partial = _renamed(self.path, "partial")
            self.partial.mkdir(parents=True)
        return [(self.partial, plan) for plan in FileSystemWriter(self.partial).prepare_global_plan(divided)]

    def write_own(self, plan: SavePlan) -> tuple[list[WriteResult], Sums]:
        """On every rank: writes its boxes, down to the disk."""
        with self._explained():
            results = self._storage().write_data(plan, self.planner).wait()
        return results, self._files.sums

    def commit(self, written: list[tuple[list[WriteResult], Sums]]) -> None:
        """On rank 0, when all ranks have written: makes the checkpoint whole, then removes old ones."""
        with self._explained():
            self._storage().finish(self._metadata, [results for results, _ in written])
            self._files.sums[METADATA] = self._files.sums.pop(f"{METADATA}.tmp")
            files = {name: sums for _, own in written for name, sums in own.items()} | self._files.sums
            for name, sums in files.items():
                if not (self.partial / name).is_file() or (self.partial / name).stat().st_size != sums["bytes"]:
                    raise OsdpError(
                        f"rank 0 does not see {self.partial / name} as written; share {self.root} by all nodes"
                    )
            self._write_document({**self.document, "files": files})
            self._put_in_place()
        for path in [path for step, path in steps_in(self.root).items() if step <= self.step][: -self.keep]:
            _remove(path)

    def give_up(self) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)

    def _storage(self) -> FileSystemWriter:
        storage = FileSystemWriter(self.partial)
        storage.fs = self._files
        return storage

    def _refuse(self) -> None:
        steps = steps_in(self.root)
        if steps and max(steps) > self.step:
            raise UsageError(
                f"{self.root} has step {max(steps)} already, and step {self.step} is before it; load that one, remove"
                " the later ones, or save to another folder"
            )
        for path in steps.values():
            try:
                document = read_document(path)
            except OsdpError:
                continue  # a damaged one says nothing about its model
            other = difference(document, self.document)
            if other:
                raise UsageError(f"{path} is of another model: {other}; save to another folder")

    def _write_document(self, document: dict[str, Any]) -> None:
        with (self.partial / DOCUMENT).open("w") as file:
            json.dump({**document, "checksum": _sum_of(document)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(self.partial)

    def _put_in_place(self) -> None:
        old = _renamed(self.path, "replaced")
        if self.path.exists():
            self.path.rename(old)
        self.partial.rename(self.path)
        _sync_folder(self.root)
        shutil.rmtree(old, ignore_errors=True)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Says of what the disk refuses where it was, and what is left."""
        try:
            yield
        except OSError as error:
            whole = [step for step in steps_in(self.root) if step != self.step]
            left = f"step {max(whole)} stays as it was" if whole else "there is no earlier one"
            raise OsdpError(
                f"rank {self.rank} cannot save step {self.step} to {self.root}: {error.strerror or error}; free space,"
                f" or save to another folder ({left})"
            ) from None


class _Planner(DefaultSavePlanner):
    """The default one, which can also hold copies of what it will write."""

    def copy(self, plan: SavePlan) -> None:
        self._copies: dict[MetadataIndex, Tensor] = {}
        for item in plan.items:
            data = super().resolve_data(item)
            assert isinstance(data, Tensor)
            self._copies[item.index] = data.detach().to("cpu", copy=True)
        self.state_dict = {}

    def resolve_data(self, write_item: WriteItem) -> Any:
        copies = getattr(self, "_copies", None)
        return super().resolve_data(write_item) if copies is None else copies.pop(write_item.index)


class _SummedFiles(FileSystem):
    """Files whose sizes and checksums are known once they are written."""

    def __init__(self) -> None:
        self.sums: Sums = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with Path(path).open(mode) as file:
            stream = _Summed(file)  # type: ignore[arg-type]
            try:
                yield stream
            except Exception as error:
                raise stream.error or error from None
        self.sums[Path(path).name] = {"bytes": stream.bytes, "crc32": stream.crc32}


class _Summed:
    """A stream that counts and sums what passes; `error` is why a write failed, which torch.save does not say."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.bytes = self.crc32 = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.bytes += memoryview(data).nbytes
        self.crc32 = zlib.crc32(data, self.crc32)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def remedy(path: Path) -> str:
    """What to do about a damaged checkpoint."""
    before = [step for step, other in steps_in(path.parent).items() if other.name < path.name]
    return f"remove {path}" + (f", the one before is step {max(before)}" if before else ", there is none before it")


def _sum_of(document: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())


def _renamed(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}.{suffix}-{secrets.token_hex(4)}")


def _remove(path: Path) -> None:
    """Takes a checkpoint its name first: half of it must not pass for a whole."""
    with contextlib.suppress(OSError):
        shutil.rmtree(path.rename(_renamed(path, "removed")), ignore_errors=True)


def _remove_leftovers(root: Path) -> None:
    """Removes what killed saves left; what was renamed to be replaced, and was not, gets its name back."""
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        match = _LEFT_OVER.fullmatch(path.name)
        if match and match[2] == "replaced" and not path.with_name(match[1]).exists():
            path.rename(path.with_name(match[1]))
        elif match:
            shutil.rmtree(path, ignore_errors=True)


def _sync_folder(path: Path) -> None:
    """Brings a folder's names to the disk, as fsync of a file does not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
