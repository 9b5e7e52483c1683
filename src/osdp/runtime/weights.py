"""Weights in and out of a model that runs a plan, as Hugging Face writes and reads them: safetensors.

[Note: Weights in parts]
No rank ever holds the whole model. To load, every rank reads from the files the boxes that it holds, and nothing else:
safetensors can read a part of a tensor. Weights that the files have in another form (experts one by one where the model
has them stacked) are put together one parameter at a time. To save, one parameter after another is gathered, and rank 0
appends it to the file, whose header was written first: all sizes are known before.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from osdp.errors import UsageError
from osdp.files import read_json
from osdp.runtime.apply import template_of
from osdp.runtime.checkpoint import Ranks
from osdp.runtime.initialize import initialize
from osdp.runtime.split import JoinedTensor, held_parameters, parts_of

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


@torch.no_grad()
def load_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    strict: bool = True,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> nn.Module:
    """Loads the safetensors of a folder into a model, on every rank: parallelized or not, with memory or on `meta`.

    See [Note: Weights in parts]. Values are cast to the model's dtype. A parameter that the files lack is an error;
    with `strict=False` it keeps its value, or on `meta` gets the one that the model's own initialisation gives it, as a
    new head does.
    """
    ranks = Ranks.all()
    source = ranks.agree(lambda: None, lambda _: [_Source.of(Path(folder))] * ranks.size)
    given: list[_Given] = []
    ranks.agree(lambda: given.append(_matched(model, source, strict)), lambda _: [None] * ranks.size)
    if any(parameter.is_meta for parameter in model.parameters()):
        initialize(model, seed=seed, device=device, init=_init_of_the_rest(model, given[0].names))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # what is gathered would be stale
    held = targets_of(model)

    def read() -> None:
        with _Reader(source) as reader:
            for name, key in given[0].direct.items():
                _read_boxes(reader, key, name, *held[name])
            for keys, convert in given[0].converted:
                for name, whole in convert(reader.whole, keys).items():
                    _copy_whole(whole, name, *held[name])

    ranks.agree(read, lambda _: [None] * ranks.size)
    return model


@dataclass(frozen=True)
class _Source:
    """The keys of a folder's safetensors, each with its file."""

    folder: Path
    files: Mapping[str, str]

    @staticmethod
    def of(folder: Path) -> _Source:
        if (folder / INDEX).is_file():
            document = read_json(folder / INDEX, remedy="download the weights again")
            files = document.get("weight_map") if isinstance(document, dict) else None
            named = isinstance(files, dict) and all(isinstance(file, str) for file in files.values())
            if not named or any(Path(file).name != file for file in files.values()):
                raise UsageError(f"{folder / INDEX} has no weight_map of file names; download the weights again")
            missing = [file for file in sorted(set(files.values())) if not (folder / file).is_file()]
            if missing:
                raise UsageError(f"{folder} lacks {missing[0]}, which its index names; download the weights again")
            return _Source(folder, files)
        if not (folder / ONE_FILE).is_file():
            raise UsageError(
                f"{folder} has neither {ONE_FILE} nor {INDEX}; give a folder as save_pretrained writes it, or fetch one"
                " with `hf download ORG/NAME --local-dir FOLDER`"
            )
        with _opened(folder / ONE_FILE) as file:
            return _Source(folder, dict.fromkeys(file.keys(), ONE_FILE))


def _opened(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise UsageError("weights need safetensors: pip install osdp-torch[hf]") from None
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} is no safetensors file ({error}); download it again") from None


class _Reader:
    """Open files, each opened when it is first asked for."""

    def __init__(self, source: _Source) -> None:
        self._source, self._stack = source, ExitStack()
        self._open: dict[str, Any] = {}

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def slice(self, key: str) -> Any:
        name = self._source.files[key]
        if name not in self._open:
            self._open[name] = self._stack.enter_context(_opened(self._source.folder / name))
        return self._open[name].get_slice(key)

    def whole(self, key: str) -> Tensor:
        return self.slice(key)[...]


Convert = Callable[[Callable[[str], Tensor], Sequence[str]], dict[str, Tensor]]


@dataclass(frozen=True)
class _Given:
    """What the files give: parameters and buffers by the key that holds each, and those to be made of several."""

    direct: Mapping[str, str]
    converted: Sequence[tuple[Sequence[str], Convert]]
    names: set[str]


def _matched(model: nn.Module, source: _Source, strict: bool) -> _Given:
    """Which key is whose; refuses what is missing, unknown or of another shape before anything is changed."""
    targets, aliases = targets_of(model), _aliases(model)
    direct: dict[str, str] = {}
    others: list[str] = []
    for key in source.files:
        name = aliases.get(key, key)
        if name not in targets:
            others.append(key)
        elif name not in direct or key == name:  # a tied parameter may be there under each of its names
            direct[name] = key
    converted: list[tuple[Sequence[str], Convert]] = []
    names = set(direct)
    if others and hasattr(model, "base_model_prefix"):
        from osdp.integrations.hf_conversion import conversions

        renamed, converted, made, others = conversions(_named_as_before(model), set(targets), others)
        direct |= {aliases.get(name, name): key for name, key in renamed.items()}
        names = set(direct) | {aliases.get(name, name) for name in made}
    missing = [name for name in targets if name not in names]
    known = _may_be_left(model)
    unknown = [key for key in others if not any(re.search(pattern, key) for pattern in known)]
    if missing and strict:
        raise UsageError(
            f"{source.folder} lacks {_some(missing)}, which the model has;"
            " give the weights of this model, or strict=False to initialise the rest"
        )
    if unknown and strict:
        raise UsageError(
            f"{source.folder} has {_some(unknown)}, which the model lacks; give the weights of this model, or"
            " strict=False to leave them out"
        )
    with _Reader(source) as reader:
        for name, key in direct.items():
            found, wanted = tuple(reader.slice(key).get_shape()), shape_of(*targets[name])
            if found != wanted and (_numel(found) != 1 or _numel(wanted) != 1):
                raise UsageError(
                    f"{name} is {list(found)} in {source.folder} and {list(wanted)} in the model; give its weights"
                )
    return _Given(direct, converted, names)


def _may_be_left(model: nn.Module) -> list[str]:
    """Patterns of keys that a model need not take: those it names itself, and buffers that are not saved any more."""
    own = [
        re.escape(f"{prefix}.{key}" if prefix else key) + "$"
        for prefix, module in model.named_modules()
        for key in module._non_persistent_buffers_set
    ]
    return [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), *own]


def _some(names: Sequence[str]) -> str:
    return f"{names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _numel(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


Held = tuple[Sequence[Tensor], int]


def targets_of(model: nn.Module) -> dict[str, Held]:
    """All that is loaded and saved, by its name in the plain model: what holds it, one tensor for each slice."""
    buffers: dict[str, Held] = {
        f"{prefix}.{key}" if prefix else key: ((buffer,), 0)
        for prefix, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and key not in module._non_persistent_buffers_set
    }
    return {**held_parameters(model), **buffers}


def _aliases(model: nn.Module) -> dict[str, str]:
    """For every name of a tied parameter its first one."""
    first: dict[Tensor, str] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[name] = first.setdefault(parameter, name)
    return {name: to for name, to in found.items() if name != to}


def shape_of(tensors: Sequence[Tensor], dim: int) -> tuple[int, ...]:
    sizes = list(tensors[0].shape)
    if len(tensors) > 1:
        sizes[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return tuple(sizes)


def _named_as_before(model: nn.Module) -> nn.Module:
    """The model with the classes it had: a plan's modules have names of FSDP2's in front of theirs."""
    try:
        return template_of(model)
    except UsageError:
        return model


def _read_boxes(reader: _Reader, key: str, name: str, tensors: Sequence[Tensor], dim: int) -> None:
    """Reads what this rank holds of a parameter, and nothing else."""
    part = reader.slice(key)
    if _numel(part.get_shape()) == 1:
        _copy_whole(reader.whole(key), name, tensors, dim)
        return
    for box, local in JoinedTensor(tensors, dim).local_boxes():
        at = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
        local.copy_(part[at])


def _copy_whole(whole: Tensor, name: str, tensors: Sequence[Tensor], dim: int) -> None:
    shape = shape_of(tensors, dim)
    if tuple(whole.shape) != shape and (whole.numel() != 1 or _numel(shape) != 1):
        raise UsageError(f"{name} is {list(whole.shape)} in the files and {list(shape)} in the model; give its weights")
    if not shape:
        tensors[0].copy_(whole.reshape(()))
        return
    for tensor, piece in zip(tensors, parts_of(whole.reshape(shape), tensors, dim), strict=True):
        tensor.copy_(piece)


def _init_of_the_rest(model: nn.Module, given: set[str]) -> Callable[[nn.Module], None] | None:
    """The model's own initialisation for modules that have a value which no file gives."""
    template = template_of(model)
    own = getattr(template, "_init_weights", None)
    if own is None:
        return None
    aliases = _aliases(template)
    rest = set()
    for prefix, module in template.named_modules():
        names = [f"{prefix}.{key}" if prefix else key for key, _ in module.named_parameters(remove_duplicate=False)]
        if any(True for _ in module.buffers()) or any(aliases.get(name, name) not in given for name in names):
            rest.add(module)
    return lambda module: own(module) if module in rest else None
