"""Example inputs at any batch size, and the loss in whatever a model returns.

[Note: Samples]
The batch of an example is the commonest first size among its tensors. At another batch size every tensor with that
first size is scaled: with the example's own samples in turn where it is real and small, else without values. Some
models take the parts of all samples in one row (patches of images): where nothing else runs, tensors whose first size
is a multiple of the batch are scaled too.

Detectors take a list with an entry for each sample: a tensor, or a dict of tensors. Lists are taken so where the first
sizes of their tensors differ, or are not the batch that the tensors outside lists have while the lists' length is.
Then as many entries are given as samples are asked for.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from osdp._torch import tree_leaves, tree_map_only
from osdp.errors import OsdpError, UsageError
from osdp.model.values import LARGEST

Inputs = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]


class CaptureError(OsdpError):
    """The model ran, but not in a way that can be planned."""


def _is_value(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, (type, Mapping))


def map_tensors(change: Callable[[Tensor], Any], tree: Any) -> Any:
    """The same tree with every tensor changed; dataclasses are looked into as dicts, lists and tuples are."""

    def inner(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        fields = {f.name: map_tensors(change, getattr(leaf, f.name)) for f in dataclasses.fields(leaf) if f.init}
        return dataclasses.replace(leaf, **fields)

    return tree_map_only(lambda leaf: isinstance(leaf, Tensor) or _is_value(leaf), inner, tree)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif _is_value(leaf):
            yield from tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])


def as_call(example: Any, model: nn.Module | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An example as positional and keyword inputs. A list is one input where the model takes one."""
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, Tensor) or _is_value(example):
        return (example,), {}
    if isinstance(example, list) and model is not None and _positional(model) < len(example):
        return (example,), {}
    return tuple(example), {}


def _positional(model: nn.Module) -> float:
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return float("inf")
    return sum(k in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for k in kinds)


def _lists_in(tree: Any) -> Iterator[list[Any]]:
    """The outermost lists that have tensors."""
    if isinstance(tree, list) and any(True for _ in tensors_in(tree)):
        yield tree
    elif isinstance(tree, (list, tuple, Mapping)):
        for each in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _lists_in(each)


def _outside_lists(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Mapping):
        tree = tuple(tree.values())
    if isinstance(tree, tuple):
        for each in tree:
            yield from _outside_lists(each)
    elif not isinstance(tree, list):
        yield from tensors_in(tree)


def _entries(call: tuple[tuple[Any, ...], dict[str, Any]]) -> int | None:
    """The number of samples where lists have an entry for each, else None; see [Note: Samples]."""
    lists = list(_lists_in(call))
    lengths = {len(each) for each in lists}
    if len(lengths) != 1:
        return None
    (length,) = lengths
    firsts = [[t.shape[0] for t in tensors_in(each) if t.dim()] for each in lists]
    outside = Counter(t.shape[0] for t in _outside_lists(call) if t.dim()).most_common(1)
    if outside:
        batch = outside[0][0]
        return length if batch == length and any(size != batch for sizes in firsts for size in sizes) else None
    return length if length > 1 and any(len(set(sizes)) > 1 for sizes in firsts) else None


def example_batch(example: Any, model: nn.Module | None = None) -> int:
    """The number of samples in an example; see [Note: Samples]."""
    entries = _entries(as_call(example, model))
    if entries is not None:
        return entries
    sizes = [tensor.shape[0] for tensor in tensors_in(as_call(example)) if tensor.dim() > 0]
    if not sizes:
        raise CaptureError("example_inputs hold no tensor with a batch dimension; pass a tuple or dict of tensors")
    return Counter(sizes).most_common(1)[0][0]


def has_rows(example: Any) -> bool:
    """Whether some tensor's first size is a larger multiple of the batch."""
    batch = example_batch(example)
    return any(t.dim() > 0 and t.shape[0] > batch and t.shape[0] % batch == 0 for t in tensors_in(as_call(example)))


def scaled_inputs(example: Any, *, model: nn.Module | None = None, rows: bool = False) -> Inputs:
    """Inputs at any batch size from an example; with `rows` multiples of its batch grow too; see [Note: Samples]."""
    args, kwargs = as_call(example, model)
    samples, entries = example_batch(example, model), _entries((args, kwargs))

    def at(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def scale(tensor: Tensor) -> Tensor:
            each, rest = divmod(tensor.shape[0], samples) if tensor.dim() else (0, 1)
            if rest or (each != 1 and not rows) or not each:
                return tensor
            shape = (batch * each, *tensor.shape[1:])
            if tensor.is_meta or tensor[:1].numel() * shape[0] > LARGEST:
                return torch.empty(shape, dtype=tensor.dtype, device="meta")
            return tensor.detach()[torch.arange(shape[0], device=tensor.device) % tensor.shape[0]]

        return _scaled((args, kwargs), scale, None if entries is None else batch)

    return at


def _scaled(tree: Any, scale: Callable[[Tensor], Tensor], entries: int | None) -> Any:
    """The same tree with every tensor scaled, or, with `entries`, with lists of so many entries."""
    if entries is None:
        return map_tensors(scale, tree)
    if isinstance(tree, list) and any(True for _ in tensors_in(tree)):
        return [tree[place % len(tree)] for place in range(entries)]
    if isinstance(tree, dict):
        return {key: _scaled(value, scale, entries) for key, value in tree.items()}
    if type(tree) is tuple:
        return tuple(_scaled(each, scale, entries) for each in tree)
    return map_tensors(scale, tree)


def output_loss(output: Any) -> Tensor:
    """The scalar that a model's output is, or holds: `.loss`, ["loss"], the first of a tuple, or its only scalar."""
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif not isinstance(output, Tensor):
        found = getattr(output, "loss", None)
        if found is None and isinstance(output, (tuple, list)) and output:
            scalars = [each for each in output if isinstance(each, Tensor) and each.numel() == 1]
            found = scalars[0] if len(scalars) == 1 else output[0]
    if not isinstance(found, Tensor) or found.numel() != 1:
        shape = f", loss of shape {tuple(found.shape)}" if isinstance(found, Tensor) else ""
        raise UsageError(
            f"the model's output ({type(output).__name__}{shape}) is no scalar loss and has none: give it labels, "
            "or pass loss=, a function that makes one of the output"
        )
    return found.reshape(())
