"""Claim: a checkpoint is data; whatever is in its files, loading it runs no code of theirs.

Each file of a checkpoint that torch unpickles is poisoned in turn, with sizes and checksums to match. Each poison is
shown to work on torch's own readers first: there it makes a file. Loading refuses it with a sentence, changes nothing,
and makes no file. Pipes and devices in place of a file are refused, and not waited for;
so is a document whose words make no sense.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import everything, loaded_small, same, save_small, small
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from osdp.cli.main import main
from osdp.errors import OsdpError, UsageError
from osdp.runtime.checkpoint import load_checkpoint, save_checkpoint
from osdp.runtime.checkpoint_files import DOCUMENT
from osdp.training.checkpointing import Checkpointing, CheckpointSettings

STEP = "step-00000120"


class Poison:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def put(folder: Path, name: str, content: bytes) -> None:
    """Writes a file of a checkpoint, and its size and checksums where they stand."""
    (folder / name).write_bytes(content)
    document = json.loads((folder / "checkpoint.json").read_text())
    del document["checksum"]
    document["files"][name] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    checksum = zlib.crc32(json.dumps(document, sort_keys=True).encode())
    (folder / "checkpoint.json").write_text(json.dumps({**document, "checksum": checksum}))


def metadata_of(folder: Path) -> Metadata:
    return FileSystemReader(folder).read_metadata()


def only_poison(folder: Path, mark: Path) -> None:
    put(folder, ".metadata", pickle.dumps(Poison(mark)))


def poison_in_a_field(folder: Path, mark: Path) -> None:
    metadata = metadata_of(folder)
    metadata.planner_data = Poison(mark)
    put(folder, ".metadata", pickle.dumps(metadata))


def in_bytes(folder: Path, mark: Path) -> None:
    """The metadata says that a parameter is not a tensor but bytes, which torch unpickles."""
    stream, metadata = io.BytesIO(), metadata_of(folder)
    torch.save(Poison(mark), stream)
    metadata.state_dict_metadata["model.weight"] = BytesStorageMetadata()
    for index, stored in metadata.storage_data.items():
        if index.fqn == "model.weight":
            stored.offset, stored.length = 0, len(stream.getvalue())
            metadata.storage_data = {**metadata.storage_data, type(index)("model.weight"): stored}
            break
    put(folder, "__0_0.distcp", stream.getvalue())
    put(folder, ".metadata", pickle.dumps(metadata))


def in_tensors(folder: Path, mark: Path, *, zipped: bool = True) -> None:
    """The boxes of all tensors are objects."""
    stream, metadata = io.BytesIO(), metadata_of(folder)
    torch.save(Poison(mark), stream, _use_new_zipfile_serialization=zipped)
    for stored in metadata.storage_data.values():
        stored.offset, stored.length = 0, len(stream.getvalue())
    put(folder, "__0_0.distcp", stream.getvalue())
    put(folder, ".metadata", pickle.dumps(metadata))


def in_old_tensors(folder: Path, mark: Path) -> None:
    in_tensors(folder, mark, zipped=False)


def read_by_torch(folder: Path) -> None:
    with contextlib.suppress(AttributeError):  # what it gets may be no metadata
        metadata_of(folder)


def loaded_by_torch(folder: Path) -> None:
    states = {"model.weight": small(0)[0].get_parameter("weight").detach()}
    reader, planner = FileSystemReader(folder), DefaultLoadPlanner(False, False)
    planner.set_up_planner(states, metadata_of(folder))
    reader.set_up_storage_reader(metadata_of(folder), False)
    reader.read_data(planner.create_local_plan(), planner).wait()


def unpickled_by_torch(folder: Path) -> None:
    torch.load(folder / "__0_0.distcp", weights_only=False)


FORBIDDEN = r"\.metadata names \S+, which no checkpoint has, and could run code: remove \S+, the one before is step 100"
NO_TENSOR = rf"{STEP} holds more than tensors, which could run code: remove \S+, the one before is step 100$"
POISONS: dict[str, tuple[Callable[[Path, Path], None], Callable[[Path], None], str]] = {
    "metadata": (only_poison, read_by_torch, FORBIDDEN),
    "a field of metadata": (poison_in_a_field, read_by_torch, FORBIDDEN),
    "bytes": (in_bytes, loaded_by_torch, FORBIDDEN),
    "tensors": (in_tensors, unpickled_by_torch, NO_TENSOR),
    "old tensors": (in_old_tensors, unpickled_by_torch, NO_TENSOR),
}


@pytest.mark.parametrize("kind", POISONS)
def test_poison_is_refused_and_does_nothing(kind: str, tmp_path: Path) -> None:
    mark, folder = tmp_path / "mark", tmp_path / "run"
    poison, by_torch, message = POISONS[kind]
    save_small(folder, 100)
    save_small(folder, 120)
    poison(folder / STEP, mark)
    by_torch(folder / STEP)
    assert mark.exists(), "the poison does nothing"
    mark.unlink()
    model, optimizer = small(7)
    before = everything(model, optimizer)
    with pytest.raises(OsdpError, match=message):
        load_checkpoint(folder, model, optimizer)
    assert not mark.exists()
    assert same(everything(model, optimizer), before)
    assert loaded_small(folder, 100) == 100


def beyond_the_folder(metadata: Metadata) -> None:
    for stored in metadata.storage_data.values():
        stored.relative_path = "../step-00000100/__0_0.distcp"


def beyond_the_end(metadata: Metadata) -> None:
    for stored in metadata.storage_data.values():
        stored.length = 10**12


def of_another_type(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.weight"] = "a tensor"  # type: ignore[assignment]


def negative(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.weight"].chunks[0].offsets = torch.Size([-1, 0])  # type: ignore[union-attr]


def half(metadata: Metadata) -> None:
    entry = metadata.state_dict_metadata["model.weight"]
    (rows, columns), *_ = [chunk.sizes for chunk in entry.chunks]  # type: ignore[union-attr]
    entry.chunks[0].sizes = torch.Size([rows // 2, columns])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (half, "the boxes of a tensor of size"),
        (beyond_the_folder, "is no file of the checkpoint"),
        (beyond_the_end, "__0_0.distcp ends before byte"),
        (of_another_type, "str instead of TensorStorageMetadata"),
        (negative, "-1 is negative"),
    ],
)
def test_metadata_that_makes_no_sense_is_refused(
    change: Callable[[Metadata], None], message: str, tmp_path: Path
) -> None:
    save_small(tmp_path, 100)
    save_small(tmp_path, 120)
    metadata = metadata_of(tmp_path / STEP)
    change(metadata)
    put(tmp_path / STEP, ".metadata", pickle.dumps(metadata))
    with pytest.raises(OsdpError, match=rf"\.metadata is damaged: .*{message}.*; remove"):
        loaded_small(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("step", -3, "step is -3 but must be a whole number of at least 0"),
        ("step", "120", "step is '120' but must be a whole number"),
        ("extra", [1], "extra is .* but must be a table"),
        ("parameters", {"weight": [1 << 70]}, "but must be"),
        ("files", {"../../elsewhere": {"bytes": 0, "crc32": 0}}, "files"),
        ("files", {"__0_0.distcp": {"bytes": 1e300, "crc32": 0}}, "1e\\+300.* but must be a whole number"),
        ("optimizer", {"kind": "SGD", "groups": [3], "states": {}}, "groups.* is 3 but must be a table"),
        ("surprise", 1, "unknown field 'surprise'"),
    ],
)
def test_a_document_that_makes_no_sense_is_refused(field: str, value: object, message: str, tmp_path: Path) -> None:
    """Its checksum says that it is whole."""
    save_small(tmp_path, 120)
    document = json.loads((tmp_path / STEP / DOCUMENT).read_text())
    del document["checksum"]
    document[field] = value
    checksum = zlib.crc32(json.dumps(document, sort_keys=True).encode())
    (tmp_path / STEP / DOCUMENT).write_text(json.dumps({**document, "checksum": checksum}))
    with pytest.raises(OsdpError, match=rf"checkpoint.json.*{message}.*; remove") as refusal:
        loaded_small(tmp_path)
    assert not isinstance(refusal.value, UsageError)


@pytest.mark.parametrize(
    "change", [{"scale": 0.0}, {"scale": float("nan")}, {"_growth_tracker": "x"}, {"surprise": 1}, {"scale": None}]
)
def test_a_gradient_scalers_state_that_makes_no_sense_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    """It comes with the run's own words in a checkpoint."""
    model, optimizer = small(120)
    scaler = torch.amp.GradScaler("cpu")
    state = scaler.state_dict()
    save_checkpoint(tmp_path, model, optimizer, step=120, extra={"gradient scaler": {**state, **change}})
    settings = CheckpointSettings(tmp_path, resume=True)
    run = Checkpointing(settings, model, optimizer, identity={}, watch=lambda _: None, scaler=scaler)
    with pytest.raises(OsdpError, match=r"gradient scaler of .*; remove"):
        run.resumed()
    save_checkpoint(tmp_path, model, optimizer, step=121, extra={"gradient scaler": {**state, "scale": 8.0}})
    assert run.resumed() == 121
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("name", [DOCUMENT, ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("what", ["a pipe", "a device"])
def test_what_never_ends_is_not_read(what: str, name: str, tmp_path: Path) -> None:
    """In place of any file of a checkpoint; its document says that it is empty, as its size is."""
    save_small(tmp_path, 100)
    save_small(tmp_path, 120)
    if name != DOCUMENT:
        put(tmp_path / STEP, name, b"")
    (tmp_path / STEP / name).unlink()
    if what == "a pipe":
        os.mkfifo(tmp_path / STEP / name)
    else:
        (tmp_path / STEP / name).symlink_to("/dev/zero")
    with pytest.raises(OsdpError, match=f"it is {what} and not a file; remove"):
        loaded_small(tmp_path)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_the_command_refuses_poison_with_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark, folder = tmp_path / "mark", tmp_path / "run"
    options = ["tiny_lm:build", "--checkpoint", str(folder), "--resume", "--quiet", "--steps"]
    assert main(["train", *options, "2"]) == 0
    only_poison(folder / "step-00000002", mark)
    capsys.readouterr()
    assert main(["train", *options, "3"]) == 1
    assert "could run code" in capsys.readouterr().err
    assert not mark.exists()
