"""Fewer blocks for the same model: those that a capture, or a clock, need not run.

[Note: Depth]
A deep model repeats one block, or a few in turn (five with a sliding window, then one without). The captures run a copy
in which every such repetition is cut to its first period, one more and what comes last; the second period stands for
those left out. The first one is needed: its blocks free what all of their kind share. Whole periods are cut, so that a
model which looks a block's kind up by its index finds the same. One capture at full depth, at a third batch size,
checks both that and [Note: Growth], kernel by kernel. Where it disagrees, it says which blocks are alike, and the model
is cut again by that; where that disagrees too, or no shortened model runs, every capture is taken at full depth. The
check runs beside the others, on a second core: it takes as long as they.

[Note: Alike]
Blocks are alike if they have the same classes and parameter shapes, and the same plain attributes (a window, a flag)
but for those that number the blocks: different in every one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn

from osdp.model.structure import signature

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_LONGEST_PERIOD = 16


@dataclass(frozen=True)
class Short:
    """A shortening: for each block of the full model the block of the short one that stands for it."""

    stands_for: dict[str, str]
    keep: dict[str, list[str]]  # container -> keys of the children to keep, in order

    def left_out(self, model: nn.Module) -> list[nn.Module]:
        """The blocks of the full model that the short one does not have, but for those that have other names too."""
        named = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
        return [
            child
            for container, keys in self.keep.items()
            for key, child in model.get_submodule(container).named_children()
            if key not in keys and named[id(child)] == 1
        ]

    def cut(self, model: nn.Module) -> None:
        """Cuts a copy of the full model to the short one."""
        for container, keys in self.keep.items():
            module = model.get_submodule(container)
            kept = [module._modules[key] for key in keys]
            module._modules.clear()
            module._modules.update({str(index): child for index, child in enumerate(kept)})

    def name(self, name: str) -> str:
        """What stands in the short model for a module, or parameter, of the full one."""
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            prefix = ".".join(parts[:length])
            if prefix in self.stands_for:
                return ".".join([self.stands_for[prefix], *parts[length:]])
        return name


def shortened(model: nn.Module, blocks: Sequence[str], kinds: Sequence[Hashable] = ()) -> Short | None:
    """A shortening of the model; None where nothing is repeated. Blocks of equal `kinds` are alike, by default as
    [Note: Alike] says.
    """
    modules = dict(model.named_modules())
    alike = dict(zip(blocks, kinds or _kinds([modules[block] for block in blocks]), strict=True))
    stands_for: dict[str, str] = {}
    keep: dict[str, list[str]] = {}
    for container, group in groupby(blocks, key=lambda block: block.rpartition(".")[0]):
        names = list(group)
        whole = len(names) == len(modules[container]._modules)
        places = _places([alike[name] for name in names]) if whole else []
        first: dict[int, str] = {}
        for name, place in zip(names, places, strict=whole):
            first.setdefault(place, name)
        if not whole or len(first) == len(names):  # nothing is cut here, and names stay
            stands_for |= {name: name for name in names}
            continue
        stands_for |= {name: f"{container}.{place}" for name, place in zip(names, places, strict=True)}
        keep[container] = [first[place].rpartition(".")[2] for place in sorted(first)]
    return Short(stands_for, keep) if keep else None


def _kinds(blocks: Sequence[nn.Module]) -> list[Hashable]:
    """What each block is, equal for those that are alike; see [Note: Alike]."""
    shapes = [signature(block) for block in blocks]
    plain = [dict(_attributes(block)) for block in blocks]
    values: dict[tuple[Hashable, Hashable], list[Hashable]] = {}
    for shape, mine in zip(shapes, plain, strict=True):
        for key, value in mine.items():
            values.setdefault((shape, key), []).append(value)
    numbering = {key for key, found in values.items() if len(found) > 2 and len(set(found)) == len(found)}
    return [
        (shape, tuple((key, value) for key, value in mine.items() if (shape, key) not in numbering))
        for shape, mine in zip(shapes, plain, strict=True)
    ]


def _attributes(block: nn.Module) -> Iterable[tuple[Hashable, Hashable]]:
    for name, module in block.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, _PLAIN):
                yield (name, key), (type(value), value)


def _places(kinds: Sequence[Hashable]) -> list[int]:
    """For every block the place, in the short list, of the one that stands for it; see [Note: Depth]."""
    places: list[int] = []
    base = at = 0
    while at < len(kinds):
        period, length = max(_repetitions(kinds[at:]), key=lambda found: (_left_out(*found), -found[0]))
        out = _left_out(period, length)
        if not out:
            places.append(base)
            base, at = base + 1, at + 1
            continue
        last = length - 1 - (length - 1) % period  # from here on they stand for themselves
        inner = [period + number % period for number in range(period, last)]
        places += [base + place for place in (*range(period), *inner, *range(last - out, length - out))]
        base, at = base + length - out, at + length
    return places


def _repetitions(kinds: Sequence[Hashable]) -> Iterable[tuple[int, int]]:
    """Periods with which the list begins, each with how far it goes."""
    for period in range(1, min(_LONGEST_PERIOD, len(kinds)) + 1):
        length = period
        while length < len(kinds) and kinds[length] == kinds[length - period]:
            length += 1
        yield period, length


def _left_out(period: int, length: int) -> int:
    """How many blocks a repetition can do without: whole periods, but for one, between the first and its last block."""
    return max(0, (length - 1) // period - 2) * period
