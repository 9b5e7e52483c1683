"""Fewer blocks for the same model: those that a capture, or a clock, need not run.

[Note: Depth]
A deep model repeats one block. The captures run a copy in which every run of more than four equal blocks is cut to
four, and the inner two, whose traces must be equal, stand for those left out. One capture at full depth, at a third
batch size, checks both that and [Note: Growth], kernel by kernel; where it disagrees, or the shortened model does not
run, every capture is taken at full depth. The check runs beside the others, on a second core: it takes as long as they.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import nn

from osdp.model.structure import signature

_KEPT = 4  # blocks that stand for a longer run of equal ones; see [Note: Depth]


@dataclass(frozen=True)
class Short:
    """A shortening: for each block of the full model the block of the short one that stands for it."""

    stands_for: dict[str, str]
    keep: dict[str, list[str]]  # container -> keys of the children to keep, in order

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


def shortened(model: nn.Module, blocks: Sequence[str]) -> Short | None:
    stands_for: dict[str, str] = {}
    keep: dict[str, list[str]] = {}
    modules = dict(model.named_modules())
    for container, group in groupby(blocks, key=lambda block: block.rpartition(".")[0]):
        names = list(group)
        kept: list[str] = []
        for _, run_of_equals in groupby(names, key=lambda block: signature(modules[block])):
            run = list(run_of_equals)
            chosen = run if len(run) <= _KEPT else [run[0], run[1], run[2], run[-1]]
            base = len(kept)
            for position, block in enumerate(run):
                place = position if position < 3 or len(run) <= _KEPT else (3 if position + 1 == len(run) else 2)
                stands_for[block] = f"{container}.{base + place}"
            kept.extend(chosen)
        if len(kept) < len(names) and len(names) == len(modules[container]._modules):
            keep[container] = [block.rpartition(".")[2] for block in kept]
    return Short(stands_for, keep) if keep else None
