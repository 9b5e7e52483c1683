"""Weights out of a model that runs a plan, as `from_pretrained` reads them; see [Note: Weights in parts]."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from osdp.errors import OsdpError
from osdp.runtime.checkpoint import Ranks
from osdp.runtime.checkpoint_states import States
from osdp.runtime.safetensors_files import Entry, StreamWriter, shard_names
from osdp.runtime.scalars import scalar_names
from osdp.runtime.weights import ONE_FILE, Held, shape_of, targets_of

SHARD_BYTES = 5 * 10**9  # of a file, as transformers has it


@torch.no_grad()
def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a model's weights as safetensors that `from_pretrained` reads, with its configuration if it has one.

    Call it on every rank; see [Note: Weights in parts]. `dtype` casts, `shard_bytes` is the most that one file holds.
    Of a model with adapters (peft), the adapters alone are written, as peft reads them.
    """
    ranks = Ranks.all()
    ranks.agree(lambda: bool(States(model, None)), lambda _: [None] * ranks.size)
    targets, names = _written(model)
    scalars = scalar_names(model)
    entries = [
        Entry(names[name], () if name in scalars else shape_of(*held), dtype or held[0][0].dtype)
        for name, held in targets.items()
    ]
    one_file = "adapter_model.safetensors" if hasattr(model, "peft_config") else ONE_FILE
    opened: list[_Writer] = []

    def begin(_: object) -> list[None]:
        opened.append(_Writer(Path(folder), entries, one_file, shard_bytes))
        return [None] * ranks.size

    ranks.agree(lambda: None, begin)
    failed: OsdpError | None = None
    for name, held in targets.items():
        whole = gathered(*held, dtype)
        if failed is not None:
            continue  # the other ranks gather with this one, whatever becomes of its file
        try:
            for writer in opened:
                writer.write(names[name], whole)
        except OSError as error:
            failed = OsdpError(f"cannot write {folder}: {error.strerror or error}; make room, and save again")

    def finish(_: object) -> list[None]:
        (writer,) = opened
        if failed is not None:
            writer.give_up()
            raise failed
        writer.finish()
        _write_config(model, Path(folder), dtype)
        return [None] * ranks.size

    ranks.agree(lambda: None, finish)


def _written(model: nn.Module) -> tuple[dict[str, Held], dict[str, str]]:
    """What is written, and under which names."""
    targets = targets_of(model)
    if not hasattr(model, "peft_config"):
        return targets, {name: name for name in targets}
    from osdp.integrations.hf_conversion import adapter_names

    names = adapter_names(model, list(targets))
    return {name: targets[name] for name in names}, names


def gathered(tensors: Sequence[Tensor], dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """A parameter as it is in the plain model, on the CPU: a collective for each slice that is sharded."""
    found = []
    for tensor in tensors:
        cast = tensor.detach() if dtype is None or not tensor.is_floating_point() else tensor.detach().to(dtype)
        found.append((cast.full_tensor() if isinstance(cast, DTensor) else cast).cpu())
    return found[0] if len(found) == 1 else torch.cat(found, dim)


class _Writer:
    """The files of a folder on rank 0, in the order in which parameters come; all are there in the end, or none."""

    def __init__(self, folder: Path, entries: Sequence[Entry], one_file: str, shard_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._one_file = folder, one_file
        self._shards = shard_names(entries, one_file, shard_bytes)
        self._files = self._each()
        self._now: StreamWriter | None = None

    def _each(self) -> Iterator[StreamWriter]:
        for name, entries in self._shards.items():
            yield StreamWriter(self._folder / f"{name}.partial", entries)

    def write(self, name: str, tensor: Tensor) -> None:
        if self._now is None or self._now.is_complete:
            self._now = next(self._files)
        self._now.write(name, tensor)

    def finish(self) -> None:
        """Puts the files in place, removes those of an earlier save, and writes the index last."""
        old = self._folder.glob(f"{Path(self._one_file).stem}*.safetensors")
        for path in [*old, self._folder / f"{self._one_file}.index.json"]:
            path.unlink(missing_ok=True)
        for name in self._shards:
            os.replace(self._folder / f"{name}.partial", self._folder / name)
        if len(self._shards) > 1:
            total = sum(entry.size for entries in self._shards.values() for entry in entries)
            files = {entry.name: name for name, entries in self._shards.items() for entry in entries}
            index = {"metadata": {"total_size": total}, "weight_map": files}
            (self._folder / f"{self._one_file}.index.json").write_text(json.dumps(index, indent=2))

    def give_up(self) -> None:
        if self._now is not None:
            self._now.close()
        for name in self._shards:
            (self._folder / f"{name}.partial").unlink(missing_ok=True)


def _write_config(model: nn.Module, folder: Path, dtype: torch.dtype | None) -> None:
    """What transformers or peft reads beside the weights."""
    for adapter in getattr(model, "peft_config", {}).values():
        adapter.save_pretrained(folder)
        return
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    own = next(cls for cls in type(model).__mro__ if not cls.__name__.startswith("FSDP"))
    held = next(model.parameters()).dtype
    before = config.architectures, getattr(config, "dtype", None)
    config.architectures, config.dtype = [own.__name__], dtype or held
    config.save_pretrained(folder)
    config.architectures, config.dtype = before
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)
