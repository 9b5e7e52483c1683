"""Real values beside fake tensors, wherever they follow from the inputs.

[Note: Values]
Fake tensors have no values, and models ask for some: whether a mask hides anything, how many image tokens there are,
which expert a token goes to. A value that follows from the example inputs, or from constants, is computed beside the
fake tensor, on small tensors only, so that such questions get the true answer. Where a value follows from weights or
random numbers, the answer is what training usually sees: nothing is dropped, nothing is infinite, masks hide nothing,
tokens are spread evenly over experts, alike in every sample. Each answer of that kind is noted as an assumption when
the model asks.
"""

from __future__ import annotations

import math
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from osdp._torch import (
    DataDependentOutput,
    DynamicOutputShape,
    FakeTensor,
    TorchDispatchMode,
    tree_leaves,
    tree_map_only,
    without_fake_mode,
)
from osdp.errors import OsdpError

LARGEST = 1 << 21  # elements of a tensor whose values are computed
_KNOWN = "_osdp_known"
_OWN = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_PYTHON = sysconfig.get_paths()["stdlib"]
_aten = torch.ops.aten

EVEN_LOAD = "tokens are spread evenly over the experts"
FINITE = "no value is infinite or not a number"
NOT_DROPPED = "a random draw drops nothing"
NOTHING_HIDDEN = "masks hide nothing"


class ValueNeeded(OsdpError):
    """The model asks for a value that neither its inputs nor usual training tells."""


class _Storage:
    """Shared by the values of all views of one tensor: `valid` until something unknown is written into one."""

    __slots__ = ("valid",)

    def __init__(self) -> None:
        self.valid = True


@dataclass(frozen=True)
class Known:
    value: Tensor
    storage: _Storage
    assumed: frozenset[str] = frozenset()


def known(tensor: Tensor) -> Known | None:
    """The tensor's value; a tensor that is not fake is its own."""
    if not isinstance(tensor, FakeTensor):
        return None if tensor.is_meta or tensor.numel() > LARGEST else Known(tensor, _Storage())
    found: Known | None = getattr(tensor, _KNOWN, None)
    return found if found is not None and found.storage.valid else None


def attach(fake: Tensor, value: Tensor, assumed: frozenset[str] = frozenset()) -> Tensor:
    setattr(fake, _KNOWN, Known(value, _Storage(), assumed))
    return fake


def fake_of(tensor: Tensor) -> Tensor:
    """A fake tensor like this one, under a fake mode; it has the value of a small one that is real."""
    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    if tensor.is_meta or isinstance(tensor, FakeTensor) or tensor.numel() > LARGEST:
        return fake
    with without_fake_mode():
        value = tensor.detach().to("cpu").clone()
    return attach(fake, value)


def is_foreign(frame: FrameType) -> bool:
    """Whether the frame is of neither torch nor this package."""
    path = frame.f_code.co_filename
    return not path.startswith((_OWN, _TORCH, "<")) and (not path.startswith(_PYTHON) or "-packages" in path)


def named_place(frame: FrameType, line: int) -> str:
    owner = frame.f_locals.get("self")
    kind = f"{type(owner).__name__}, " if isinstance(owner, nn.Module) else ""
    return f"{kind}{Path(frame.f_code.co_filename).name}:{line}"


def place_of(frame: FrameType | None) -> str:
    """The innermost place outside torch and this package, as 'Module, file:line'."""
    while frame is not None:
        if is_foreign(frame):
            return named_place(frame, frame.f_lineno)
        frame = frame.f_back
    return "an unknown place"


class Values(TorchDispatchMode):
    """Answers what a model asks its tensors; see [Note: Values]. Enter it within a fake mode."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch
        self.assumptions: dict[str, None] = {}  # in the order of the questions
        self._special: dict[Any, Callable[..., Any]] = {
            **dict.fromkeys((_aten.topk, _aten.argmax, _aten.max, _aten.sort, _aten.argsort), self._chosen),
            **dict.fromkeys((_aten.isinf, _aten.isnan), self._finite),
            **dict.fromkeys((_aten.eq, _aten.ne), self._compared),
            **dict.fromkeys((_aten.all, _aten.any), self._summed_up),
            **dict.fromkeys((_aten.rand, _aten.uniform_), self._drawn),
            **dict.fromkeys(_LIKE, self._like),
            _aten.index: self._indexed,
            _aten.masked_select: self._selected,
            _aten._ctc_loss: self._aligned,
            _aten._ctc_loss_backward: self._aligned_backward,
            _aten._grouped_mm: self._grouped,
            _aten._pack_padded_sequence: self._packed,
            _aten.mkldnn_rnn_layer_backward: self._one_bias,
        }

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        special = self._special.get(func._overloadpacket) if hasattr(func, "_overloadpacket") else None
        values = _values(args, kwargs)
        if special is not None and (values is None or special in (self._drawn, self._packed)):
            return special(func, args, kwargs)
        if values is None:
            return self._unknown(func, args, kwargs)
        return self._computed(func, args, kwargs, *values)

    def note(self, assumed: str) -> None:
        self.assumptions.setdefault(f"{assumed} ({place_of(sys._getframe(1))})")

    # ---- all inputs known

    def _computed(self, func: Any, args: Any, kwargs: Any, args_: Any, kwargs_: Any, found: list[Known]) -> Any:
        assumed = frozenset().union(*(each.assumed for each in found)) if found else frozenset()
        if func.tags and (torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags):
            with without_fake_mode():
                real = func(*args_, **kwargs_)
            for each in assumed:
                self.note(each)
            return tree_map_only(Tensor, lambda t: attach(_empty_like(t), t, assumed), real)
        out = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        random = torch.Tag.nondeterministic_seeded in func.tags and func._overloadpacket not in _DRAWS
        if random or func._overloadpacket in _UNSET or any(t.numel() > LARGEST for t in outputs):
            _spoil(func, args, kwargs)
            return out
        try:
            with without_fake_mode():
                real = func(*args_, **kwargs_)
        except Exception:  # an assumed value may not be possible here: then nothing is known
            _spoil(func, args, kwargs)
            return out
        for fake, value in zip(outputs, (t for t in tree_leaves(real) if isinstance(t, Tensor)), strict=True):
            _inherit(fake, value, found, assumed)
        return out

    # ---- some input unknown

    def _unknown(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func._schema.is_mutable:
            _spoil(func, args, kwargs)
        try:
            return func(*args, **kwargs)
        except (DataDependentOutput, DynamicOutputShape):
            return self._guess(func, args, kwargs)

    def _guess(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        if func is _aten._local_scalar_dense.default and not (tensor.dtype == torch.bool or tensor.is_floating_point()):
            raise ValueNeeded(
                f"{place_of(sys._getframe(0))} reads a whole number from a tensor that only data has: "
                "pass example inputs with real values, as the training data has them"
            )
        if func is _aten._local_scalar_dense.default:
            answer = False if tensor.dtype == torch.bool else 1.0
            self.note(f"a value that only data has is taken as {answer}")
            return answer
        if func is _aten.nonzero.default:
            self.note(NOTHING_HIDDEN)
            with without_fake_mode():
                every = torch.ones(tensor.shape, dtype=torch.bool).nonzero()
            return attach(_empty_like(every), every)
        raise ValueNeeded(
            f"{place_of(sys._getframe(0))} makes a tensor whose size depends on values that only data has "
            f"({func}): pass example inputs with real values, or give it a fixed size"
        )

    def _chosen(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Which entries are largest, where nobody knows: each as often as the others, alike in every sample."""
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and func._overloadpacket is _aten.max:
            return out  # values, not places
        indices = out if isinstance(out, Tensor) else out[1]
        if indices.numel() > LARGEST or args[0].dim() == 0:
            return out
        dim = _dimension(func, args, kwargs) % args[0].dim()
        kept = indices.dim() == args[0].dim()
        with without_fake_mode():
            value = self._spread(indices.shape, dim if kept else -1, args[0].shape[dim])
        attach(indices, value, frozenset({EVEN_LOAD}))
        return out

    def _spread(self, shape: Any, dim: int, choices: int) -> Tensor:
        rest = [size for place, size in enumerate(shape) if place != dim]
        taken = shape[dim] if dim >= 0 else 1
        rows = math.prod(rest)
        per_sample = rows // self.batch if rows % self.batch == 0 else rows
        row = torch.arange(rows) % max(per_sample, 1)
        chosen = (row.unsqueeze(1) * taken + torch.arange(taken)) % choices
        return chosen.view([*rest, taken]).movedim(-1, dim).contiguous() if dim >= 0 else chosen.view(rest)

    def _finite(self, func: Any, args: Any, kwargs: Any) -> Any:
        return _uniform(func(*args, **kwargs), False, FINITE)

    def _compared(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = self._unknown(func, args, kwargs)
        same = func._overloadpacket is _aten.eq
        other = args[1]
        if isinstance(other, float) and math.isinf(other):
            return _uniform(out, not same, FINITE)
        if other is args[0]:
            return _uniform(out, same, FINITE)
        if out.numel() == 1:
            return _uniform(out, same, "two counts are equal")
        return out

    def _summed_up(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = self._unknown(func, args, kwargs)
        return _uniform(out, func._overloadpacket is _aten.all, NOTHING_HIDDEN)

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One uniform number decides whether something is dropped: the highest one drops nothing."""
        if func._overloadpacket is _aten.uniform_:
            _spoil(func, args, kwargs)
        out = func(*args, **kwargs)
        return _uniform(out, 1 - 1e-6, NOT_DROPPED) if out.numel() == 1 else out

    def _like(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What depends on the first input's shape alone."""
        out = func(*args, **kwargs)
        values = _values(args[1:], kwargs)
        if out.numel() > LARGEST or values is None:
            return out
        rest, named, found = values
        with without_fake_mode():
            stand_in = torch.empty(args[0].shape, dtype=args[0].dtype)
            return attach(out, func(stand_in, *rest, **named), frozenset().union(*(each.assumed for each in found)))

    def _indexed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Masks become places: their number is what a fake index needs."""
        places: list[Tensor | None] = []
        for each in args[1]:
            places.extend(self._places(each) if _is_mask(each) else [each])
        values = _values((args[0], places), kwargs)
        if values is None:
            return func(args[0], places, **kwargs)
        return self._computed(func, (args[0], places), kwargs, *values)

    def _places(self, mask: Tensor) -> list[Tensor]:
        found = known(mask)
        if found is None:
            self.note(NOTHING_HIDDEN)
        else:
            for each in found.assumed:
                self.note(each)
        with without_fake_mode():
            value = torch.ones(mask.shape, dtype=torch.bool) if found is None else found.value.bool()
            places = value.nonzero(as_tuple=True)
        return [attach(_empty_like(place), place) for place in places]

    def _selected(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor, mask = args
        expanded = mask.expand(torch.broadcast_shapes(tensor.shape, mask.shape))
        count = self._places(expanded if known(expanded) or known(mask) is None else mask)[0].shape[0]
        return torch.empty(count, dtype=tensor.dtype)

    def _aligned(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Connectionist temporal classification: its table is as long as the longest target."""
        log_probs, targets, _, lengths = args[:4]
        found = known(lengths) if isinstance(lengths, Tensor) else None
        if found is not None:
            with without_fake_mode():
                longest = int(found.value.max())
        else:
            longest = max(lengths) if not isinstance(lengths, Tensor) else targets.shape[-1]
        steps, samples = log_probs.shape[0], log_probs.shape[1] if log_probs.dim() == 3 else 1
        return log_probs.new_empty(samples), log_probs.new_empty(samples, steps, 2 * longest + 1)

    def _grouped(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Products of groups: the fake kernel takes 16 bits only, the real one on CPUs others too."""
        first, second = args[:2]
        if first.dtype == torch.bfloat16:
            return func(*args, **kwargs)
        shape = [first.shape[-2], second.shape[-1]]
        if first.dim() == second.dim() == 2:  # groups lie along the depth: their ends say how many there are
            shape.insert(0, (args[2] if len(args) > 2 else kwargs["offs"]).shape[0])
        elif first.dim() == second.dim() == 3:
            shape.insert(0, first.shape[0])
        return torch.empty(shape, dtype=first.dtype)

    def _packed(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise ValueNeeded(
            f"{place_of(sys._getframe(0))} packs sequences, whose steps are of other numbers of samples in every batch:"
            " give the recurrent module the padded tensor, and leave the padding out of the loss with a mask"
        )

    def _one_bias(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Both biases of a recurrent layer have one gradient: torch's cache of fake results makes two tensors of it."""
        first, second = 3, 4
        out = list(func(*args, **kwargs))
        out[second] = out[first]
        return tuple(out)

    def _aligned_backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        return torch.empty_like(args[1])


_LIKE = (
    *(_aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.zero_, _aten.fill_),
    *(_aten.new_zeros, _aten.new_ones, _aten.new_full),
)
_UNSET = (_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided)
_DRAWS = (_aten.randint, _aten.randperm)  # their values steer sizes at most, so any will do


def _values(args: Any, kwargs: Any) -> tuple[Any, Any, list[Known]] | None:
    """The values of all tensors among the arguments; None where one is unknown."""
    found: list[Known] = []
    for leaf in tree_leaves((args, kwargs)) if kwargs or any(isinstance(a, (list, tuple)) for a in args) else args:
        if isinstance(leaf, Tensor):
            each = known(leaf)
            if each is None:
                return None
            found.append(each)
    if not found:
        return args, kwargs, found
    replaced = iter(found)
    args_, kwargs_ = tree_map_only(Tensor, lambda _: next(replaced).value, (args, kwargs))
    return args_, kwargs_, found


def _inherit(fake: Tensor, value: Tensor, found: list[Known], assumed: frozenset[str]) -> None:
    for each in found:
        if value.untyped_storage()._cdata == each.value.untyped_storage()._cdata:
            setattr(fake, _KNOWN, Known(value, each.storage, assumed))
            return
    attach(fake, value, assumed)


def _spoil(func: Any, args: Any, kwargs: Any) -> None:
    """What an unknown value is written into is unknown from now on, with all its views."""
    for argument, given in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(given, Tensor):
            found = getattr(given, _KNOWN, None)
            if found is not None:
                found.storage.valid = False
    for given in (kwargs or {}).values():
        if (
            isinstance(given, Tensor)
            and (found := getattr(given, _KNOWN, None)) is not None
            and func._schema.is_mutable
        ):
            found.storage.valid = False


def _empty_like(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="cpu")


def _uniform(fake: Tensor, answer: float, assumed: str) -> Tensor:
    """One value everywhere: it takes no memory, however large the tensor is."""
    with without_fake_mode():
        return attach(fake, torch.tensor(answer).to(fake.dtype).expand(fake.shape), frozenset({assumed}))


def _is_mask(index: object) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _dimension(func: Any, args: Any, kwargs: Any) -> int:
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dim":
            value = args[place] if place < len(args) else kwargs.get("dim", argument.default_value)
            return value if isinstance(value, int) else -1
    return -1
