"""Parameters that forward uses outside of their own module's call, and those that it writes into.

[Note: Used outside]
FSDP2 gathers a unit's parameters while the unit's modules run. A model may use a parameter elsewhere: `x @
self.tokens.weight.T` in its own forward, a penalty on all weights. Then no module below the one that runs there can
be a unit that holds the parameter: such modules are not units, and the innermost unit around them gathers it. What
forward writes into a parameter would be written into a gathered copy, and lost: that is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from osdp.model.inputs import CaptureError
from osdp.model.values import place_of


class ParameterUses:
    """Sees every kernel of a forward; `inside` are the names of the modules that run, the innermost last."""

    def __init__(self, model: nn.Module, inside: Sequence[str]) -> None:
        self.outside: dict[str, str] = {}  # modules that cannot be units, each with the place that says so
        self._inside = inside
        names: dict[int, list[str]] = {}
        self._storages: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
            self._storages.setdefault(parameter.untyped_storage()._cdata, name)
        self._names = names

    def seen(self, func: Any, args: Sequence[Any]) -> None:
        for tensor in _tensors(args):
            if (names := self._names.get(id(tensor))) is not None:
                self._used(names)
        if func._schema.is_mutable:
            self._refuse_writes(func, args)

    def _used(self, names: Sequence[str]) -> None:
        owners = [name.rpartition(".")[0] for name in names]
        if any(not owner or owner in self._inside for owner in owners):
            return
        around = [module for module in self._inside if all(_is_below(owner, module) for owner in owners)]
        limit = max(map(len, around), default=0)
        place = place_of(sys._getframe(2))
        for owner in owners:
            parts = owner.split(".")
            for module in (".".join(parts[:length]) for length in range(1, len(parts) + 1)):
                if len(module) > limit:
                    self.outside.setdefault(module, place)

    def _refuse_writes(self, func: Any, args: Sequence[Any]) -> None:
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in _tensors([given]):
                if (name := self._storages.get(tensor.untyped_storage()._cdata)) is not None:
                    raise CaptureError(
                        f"{place_of(sys._getframe(2))} writes into the parameter {name} in forward: ranks would write"
                        " into a gathered copy, and the next step would not see it; write under torch.no_grad() after"
                        " the optimizer's step, or keep the tensor as a buffer"
                    )


def said_of(not_units: Mapping[str, str]) -> list[str]:
    """A line for every place that uses parameters outside of their modules."""
    modules: dict[str, list[str]] = {}
    for name, place in not_units.items():
        modules.setdefault(place, []).append(name)
    return [
        f"parameters of {max(names, key=len)}{' and others' if len(names) > 1 else ''} are used outside of the module's"
        f" own call, so the unit around it gathers them ({place})"
        for place, names in modules.items()
    ]


def _tensors(args: Sequence[Any]) -> Iterator[Tensor]:
    for each in args:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _tensors(each)


def _is_below(name: str, module: str) -> bool:
    return f"{name}.".startswith(f"{module}.")
