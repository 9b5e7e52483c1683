"""The dtype that a model sees of a parameter, by whether its unit is gathered.

[Note: Held dtype]
Under mixed precision FSDP2 holds parameters in one dtype (fp32) and gathers them in another (bf16). Models ask for it:
`x.to(self.wo.weight.dtype)`, `self.dtype`. While no unit has the parameter gathered the answer is the dtype that it is
held in, and what is cast to that is twice as large. So which units there are decides: a block that is gathered whole
has all of its parameters in bf16 while it runs, one that is gathered by operators only those of the operator that runs.
The trace answers for blocks that are gathered whole. Where the answer would be another one for smaller units, or where
a smaller unit would cast what it is given, the model is traced with those units too (`differs`). A unit counts as not
gathered once it is left, also where the plan keeps it: then the prediction may be too high, never too low. Dtypes that
C++ code reads off a parameter by itself (`x.to(parameter)`, `type_as`) are those of the gathered one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from osdp._torch import FakeTensor, tree_leaves
from osdp.model.graph import is_gathered_alone
from osdp.model.structure import find_parts, operators_below, owns_parameters
from osdp.model.values import is_foreign
from osdp.planfile import GRANULARITIES, OPERATORS, PARTS, WHOLE, Granularity

Units = Mapping[Granularity, frozenset[str]]


def units_by_granularity(model: nn.Module, blocks: Sequence[str], not_units: Set[str]) -> Units:
    """The modules that are units, the model itself apart: as [Note: Granularity] in osdp.cost.units has them."""
    modules = dict(model.named_modules())
    inside = {name for block in blocks for name in operators_below(modules[block], block)}
    outside = {name for name, m in modules.items() if name and owns_parameters(m) and name not in inside}
    smaller: dict[Granularity, set[str]] = {WHOLE: set(), PARTS: set(), OPERATORS: set()}
    for block in filter(None, blocks):
        total = sum(p.numel() for p in modules[block].parameters())
        smaller[PARTS].update(find_parts(modules[block], block))
        for name in operators_below(modules[block], block):
            own = sum(p.numel() for p in modules[name]._parameters.values() if p is not None)
            if name != block and is_gathered_alone(own, total):
                smaller[OPERATORS].add(name)
    return {each: frozenset((outside | {*filter(None, blocks)} | smaller[each]) - not_units) for each in GRANULARITIES}


class _Held(FakeTensor):
    """A parameter that answers the model as FSDP2's would; torch and this package are told what it is."""

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        own: torch.dtype = Tensor.dtype.__get__(self)  # type: ignore[attr-defined]
        asks: HeldDtypes = vars(self)["_osdp_held"]
        return asks.answer(self, own) if is_foreign(sys._getframe(1)) else own


class HeldDtypes:
    """Answers for one traced step; see [Note: Held dtype]."""

    def __init__(
        self,
        held: torch.dtype,
        computed: torch.dtype,
        units: Units,
        granularity: Granularity,
        *,
        compiled: Sequence[str] = (),
    ) -> None:
        """`compiled` are blocks whose parameters nobody asks: torch.compile reads their code."""
        self.differs: set[Granularity] = set()
        self.units, self.granularity = units, granularity
        self._held, self._computed, self._compiled = held, computed, {*compiled}
        self._inside: Sequence[str] = ()
        self._in_backward = False
        self._owners: dict[int, set[str]] = {}

    @contextmanager
    def seen(self, model: nn.Module, inside: Sequence[str]) -> Iterator[None]:
        """Within it the model's parameters answer so; `inside` has the names of the modules that run."""
        if self._held == self._computed:
            yield
            return
        self._inside, self._in_backward = inside, False
        parameters: list[Any] = []
        handles = [
            module.register_forward_pre_hook(self._look_at(name), with_kwargs=True)
            for name, module in model.named_modules()
            if any(name in self.units[each] for each in GRANULARITIES)
            and name not in self.units[WHOLE]
            and _innermost(name, self._compiled) == ""
        ]
        for name, parameter in model.named_parameters(remove_duplicate=False):
            owner = name.rpartition(".")[0]
            asked = _innermost(owner, self._compiled) == "" and parameter.is_floating_point()
            if asked and type(parameter) in (FakeTensor, _Held):
                self._owners.setdefault(id(parameter), set()).add(owner)
                vars(parameter)["_osdp_held"] = self
                parameters.append(parameter)
                parameters[-1].__class__ = _Held
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for parameter in parameters:
                parameter.__class__ = FakeTensor

    def turn(self) -> None:
        """Backward begins: a block that runs once more is gathered."""
        self._in_backward = True

    def answer(self, parameter: Tensor, own: torch.dtype) -> torch.dtype:
        owners = self._owners[id(parameter)]
        gathered = self._is_gathered(owners, self.granularity)
        if not self._in_backward:
            self.differs.update(each for each in GRANULARITIES if self._is_gathered(owners, each) != gathered)
        return own if gathered else self._held

    def _is_gathered(self, owners: Set[str], granularity: Granularity) -> bool:
        units = self.units[granularity]
        return any(self._runs(_innermost(owner, units)) for owner in owners)

    def _runs(self, unit: str) -> bool:
        """The model's own unit runs from begin to end; in backward so does that of the block that runs once more."""
        return not unit or unit in self._inside or (self._in_backward and unit in self.units[WHOLE])

    def _look_at(self, name: str) -> Any:
        """Notes units of blocks that would cast what they are given."""

        def look(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = (t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
            if not self._in_backward and any(t.is_floating_point() and t.dtype != self._computed for t in given):
                self.differs.update(each for each in GRANULARITIES if name in self.units[each])

        return look


def _innermost(owner: str, units: Set[str]) -> str:
    """The unit that holds what a module owns; '' is the model itself."""
    parts = owner.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in units), "")
