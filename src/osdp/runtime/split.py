"""Splits large operators into slices: child modules with parameters of their own, which FSDP2 gathers one at a time.

[Note: Slices]
An operator is split along its outputs, so that slices compute on their own and their outputs are put side by side: of a
sum nothing could be said to the bit, and every slice would hold a whole output. Each goes to its place in the joined
output as soon as it is there: concatenated in the end, all of them would be held twice. A slice is an operator of the
same kind with its part of the weight and of the bias. The operator stays where it is and what it is: its class becomes
a subclass made for it, as FSDP2 makes `FSDPLinear`, because then its type, its hooks, copies and pickles work as
before, and what overrides `forward` and calls `super().forward` in between still does its work.

[Note: Joined]
To the outside a split operator has its old names and shapes. Plain slices are concatenated in `state_dict`. Slices that
FSDP2 has sharded are not gathered: `JoinedTensor` names them as one tensor and tells torch.distributed.checkpoint which
boxes of it lie on this rank. The boxes are the shards themselves, so what is loaded is in the model at once.

[Note: Anchor]
FSDP2 frees and reduces a unit when backward has passed its inputs, and where none of them requires a gradient, as with
the tokens of an embedding, at the end of backward: then all slices would be whole at once. Such slices get an anchor, a
number that requires a gradient; backward reaches it when it has passed the slice, with nothing to add.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from osdp._torch import FakeTensor
from osdp.errors import UsageError
from osdp.model.structure import split_dim
from osdp.runtime.local import local_tensor

_ANCHOR = "_anchor"
_aten = torch.ops.aten
_PIECEWISE = (
    _aten.detach.default,
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.empty_like.default,
    _aten.zeros_like.default,
)
# By kind of operator: what a slice has less of, and what else it needs.
_SIZE_AND_SETTINGS = {
    "Linear": ("out_features", ("in_features",)),
    "Embedding": (
        "embedding_dim",
        ("num_embeddings", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
    ),
    "Conv1D": ("nf", ("nx",)),
}


def split_operators(model: nn.Module, splits: Mapping[str, int]) -> dict[str, list[nn.Module]]:
    """Splits operators of a model, given by name with their number of slices; returns the slices in call order."""
    owners: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, []).append(name)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, slices in splits.items():
        if name not in modules:
            raise UsageError(f"{name!r} is to be split, but the model lacks it; plan this model again")
        _refuse(modules[name], slices, name)
        for parameter in modules[name].parameters():
            if len(owners[parameter]) > 1:
                tied = " and ".join(owners[parameter])
                raise UsageError(f"{name} cannot be split: {tied} are one parameter; plan it whole, or untie it")
    return {name: split_operator(modules[name], slices, name=name) for name, slices in splits.items()}


def split_operator(module: nn.Module, slices: int, *, name: str = "") -> list[nn.Module]:
    """Splits one operator in place; returns its slices in call order. It cannot see ties: `split_operators` does."""
    _refuse(module, slices, name)
    dim = split_dim(module)
    parameters = {key: value for key, value in module._parameters.items() if value is not None}
    cut = {key: _cut(value, slices, _dim_of(value, dim)) for key, value in parameters.items()}
    pieces = [_slice_of(module, {key: tensors[index] for key, tensors in cut.items()}) for index in range(slices)]
    for key in list(module._parameters):
        del module._parameters[key]
    module.__class__ = _split_class(type(module))
    split = cast(SplitOperator, module)
    split.weight_dim, split.slices = dim, nn.ModuleList(pieces)
    return pieces


def slice_sizes(size: int, slices: int) -> list[int]:
    """As equal as can be, the larger ones first: none exceeds size / slices, rounded up."""
    return [size // slices + (index < size % slices) for index in range(slices)]


def join(slices: Sequence[Tensor], dim: int) -> Tensor:
    """One tensor of the whole's shape: concatenated if slices are plain, else a `JoinedTensor`. No collectives."""
    if any(isinstance(tensor, (DTensor, JoinedTensor)) for tensor in slices):
        return JoinedTensor(slices, dim)
    return torch.cat(list(slices), dim)


def parts_of(whole: Tensor, slices: Sequence[Tensor], dim: int) -> list[Tensor]:
    """What each of `slices` holds of `whole`, in that slice's form: views where they can be. No collectives.

    `whole` is a plain tensor, which every rank has in full, or was itself joined from slices of the same form.
    """
    sizes = [tensor.shape[dim] for tensor in slices]
    shape = torch.Size((*slices[0].shape[:dim], sum(sizes), *slices[0].shape[dim + 1 :]))
    if whole.shape != shape:
        raise UsageError(f"its shape is {list(whole.shape)}, and that of all slices {list(shape)}; load what fits")
    if isinstance(whole, JoinedTensor):
        if whole.joined_dim == dim and [_form(t) for t in whole.slices] == [_form(t) for t in slices]:
            return list(whole.slices)
        raise UsageError("it is split or sharded in another way; save and load it with torch.distributed.checkpoint")
    if isinstance(whole, DTensor):
        raise UsageError("it is sharded but not split; save and load it with torch.distributed.checkpoint")
    return [_like(part, tensor) for part, tensor in zip(whole.split(sizes, dim), slices, strict=True)]


def held_parameters(model: nn.Module) -> dict[str, tuple[tuple[nn.Parameter, ...], int]]:
    """Every parameter once, by its name in the plain model: what holds it, one for each slice, and their dimension."""
    held: dict[str, tuple[tuple[nn.Parameter, ...], int]] = {}
    seen: set[nn.Parameter] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, SplitOperator):
            found = {key: tuple(module._of_slices(key)) for key in module._keys()}
            dim = module.weight_dim
        else:
            found = {key: (parameter,) for key, parameter in module._parameters.items() if parameter is not None}
            dim = 0
        for key, parameters in found.items():
            if parameters[0] not in seen:
                held[f"{prefix}.{key}" if prefix else key] = parameters, _dim_of(parameters[0], dim)
                seen.update(parameters)
    return held


class JoinedTensor(torch.Tensor):
    """Slices that are seen as one tensor; see [Note: Joined].

    It has the whole's shape, dtype and device, and can be copied, moved, saved and loaded, but not computed with.
    """

    slices: tuple[Tensor, ...]
    joined_dim: int

    @staticmethod
    def __new__(cls, slices: Sequence[Tensor], joined_dim: int) -> JoinedTensor:
        first = slices[0]
        size = sum(tensor.shape[joined_dim] for tensor in slices)
        joined = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            (*first.shape[:joined_dim], size, *first.shape[joined_dim + 1 :]),
            dtype=first.dtype,
            device=first.device,
            requires_grad=any(tensor.requires_grad for tensor in slices),
        )
        joined.slices, joined.joined_dim = tuple(slices), joined_dim
        return joined

    def full_tensor(self) -> Tensor:
        """The whole on every rank: a collective for each sharded slice."""
        return torch.cat([t.full_tensor() if isinstance(t, DTensor) else t for t in self.slices], self.joined_dim)

    def local_boxes(self) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
        """This rank's boxes of the whole, and the memory behind each.

        Empty ones are left out: a checkpoint tells boxes apart by their offset, and an empty one has its neighbour's.
        """
        offset = 0
        for tensor in self.slices:
            box = _box_of(tensor)
            if all(box.sizes):
                at = (*box.offsets[: self.joined_dim], offset + box.offsets[self.joined_dim])
                offsets = torch.Size((*at, *box.offsets[self.joined_dim + 1 :]))
                yield ChunkStorageMetadata(offsets, box.sizes), local_tensor(tensor).detach()
            offset += tensor.shape[self.joined_dim]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=box, properties=TensorProperties.create_from_tensor(local), size=self.size()
                ),
            )
            for box, local in self.local_boxes()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [box for box, _ in self.local_boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(local for box, local in self.local_boxes() if box.offsets == index.offset)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        whole, rest, kwargs = args[0], args[1:], kwargs or {}
        if func in _PIECEWISE:
            return JoinedTensor([func(tensor, *rest, **kwargs) for tensor in whole.slices], whole.joined_dim)
        if func is _aten.new_empty.default and torch.Size(rest[0]) == whole.shape:  # asynchronous saving asks for it
            return JoinedTensor([torch.empty_like(tensor, **kwargs) for tensor in whole.slices], whole.joined_dim)
        if func is _aten.copy_.default and isinstance(whole, JoinedTensor):
            for tensor, part in zip(whole.slices, parts_of(rest[0], whole.slices, whole.joined_dim), strict=True):
                func(tensor, part, *rest[1:], **kwargs)
            return whole
        raise UsageError(
            f"{func} needs the parameter of an operator that is split into slices; call the operator, or plan it whole"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"JoinedTensor({list(self.shape)}, {self.dtype}, {len(self.slices)} slices along {self.joined_dim})"


class SplitOperator(nn.Module):
    """What a split operator does in place of its class; see [Note: Slices]."""

    unsplit: ClassVar[type[nn.Module]]
    weight_dim: int
    slices: nn.ModuleList

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        weight: Tensor = self._of_slices("weight")[0]
        if torch.is_grad_enabled() and weight.requires_grad and not _any_requires_grad((*args, *kwargs.values())):
            kwargs[_ANCHOR] = torch.zeros((), device=weight.device, requires_grad=True)
        features = sum(part.shape[self.weight_dim] for part in self._of_slices("weight"))
        joined: Tensor | None = None
        start, last = 0, self.slices[-1]
        for piece in self.slices:
            own, (args, kwargs) = ((args, kwargs),) * 2 if piece is last else _handed_on(args, kwargs)
            output = piece(*own[0], **own[1])
            if joined is None:
                joined = output.new_empty((*output.shape[:-1], features))
            joined = _Place.apply(joined, output, start)
            start += output.shape[-1]
            del output
        assert joined is not None
        return joined

    @property
    def weight(self) -> Tensor:
        return JoinedTensor(self._of_slices("weight"), self.weight_dim)

    @property
    def bias(self) -> Tensor | None:
        if "bias" not in self.slices[0]._parameters:
            raise AttributeError("bias")
        return JoinedTensor(self._of_slices("bias"), 0) if "bias" in self._keys() else None

    def reset_parameters(self) -> None:
        for piece in self.slices:
            piece.reset_parameters()  # type: ignore[operator]

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:  # type: ignore[override]
        state = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        for key in self._keys():
            tensors = [state.pop(f"{prefix}slices.{index}.{key}") for index in range(len(self.slices))]
            state[prefix + key] = join(tensors, _dim_of(tensors[0], self.weight_dim))
        metadata = getattr(state, "_metadata", {})
        for name in [name for name in metadata if f"{name}.".startswith(f"{prefix}slices.")]:
            del metadata[name]
        return state

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for piece in self.slices:  # FSDP2 does so too, but only once the slices' parts are cut
            if isinstance(piece, FSDPModule):
                piece.reshard()
        for key in self._keys():
            tensors: list[Tensor] = self._of_slices(key)
            try:
                whole = state_dict.pop(prefix + key)
                found = parts_of(whole, tensors, _dim_of(tensors[0], self.weight_dim))
                if local_metadata.get("assign_to_params_buffers") and not isinstance(whole, JoinedTensor):
                    found = [tensor.clone(memory_format=torch.contiguous_format) for tensor in found]
                tensors = found
            except KeyError:
                if strict:
                    missing_keys.append(prefix + key)
            except UsageError as error:
                error_msgs.append(f"cannot load {prefix}{key}: {error}")
            # Slices without a part get what they have, lest their names be reported as missing.
            state_dict.update({f"{prefix}slices.{index}.{key}": tensor for index, tensor in enumerate(tensors)})
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _unpickled, (self.unsplit,), self.__dict__

    def _keys(self) -> list[str]:
        return [key for key, parameter in self.slices[0]._parameters.items() if parameter is not None]

    def _of_slices(self, key: str) -> list[Any]:
        return [piece._parameters[key] for piece in self.slices]


@functools.cache
def _split_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a split operator: below the operator's own class, if it has one, and above torch's."""
    kind = _kind(cls)
    bases = (SplitOperator, cls) if cls is kind else (cls, _split_class(kind))
    return type(f"Split{cls.__name__}", bases, {"unsplit": cls})


def _unpickled(cls: type[nn.Module]) -> nn.Module:
    split = _split_class(cls)
    return split.__new__(split)


def _kind(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that computes: torch's Linear or Embedding, or Hugging Face's Conv1D, known by name."""
    names = ("torch.nn.modules.linear", "torch.nn.modules.sparse", "transformers.pytorch_utils")
    return next(base for base in cls.__mro__ if base.__module__ in names and base.__name__ in _SIZE_AND_SETTINGS)


def _refuse(module: nn.Module, slices: int, name: str) -> None:
    """Says why an operator cannot be split so, if it cannot."""
    what = f"{name or 'the operator'} ({type(module).__name__}) cannot be split into {slices}"
    if isinstance(module, SplitOperator):
        raise UsageError(f"{what}: it has {len(module.slices)} slices already; split an operator once")
    dim = split_dim(module)
    if dim < 0:
        raise UsageError(f"{what}: only Linear, Embedding and Conv1D can be; plan it whole")
    weight = module._parameters.get("weight")
    own = [*module._parameters, *module._buffers, *module._modules]
    if weight is None or set(own) - {"weight", "bias"} or "forward" in vars(module):
        raise UsageError(f"{what}: it was wrapped or parametrized (it has {', '.join(own)}); split it before that")
    for key, parameter in module._parameters.items():
        if parameter is not None and type(parameter) not in (nn.Parameter, FakeTensor):
            kind = type(parameter).__name__
            raise UsageError(f"{what}: its {key} is a {kind}; split before parameters are sharded or quantized")
        if parameter is not None and (parameter.grad is not None or parameter._backward_hooks):
            raise UsageError(f"{what}: its {key} has a gradient or hooks, which would be lost; split before training")
    if not 2 <= slices <= weight.shape[dim]:
        raise UsageError(f"{what}: 2 to {weight.shape[dim]} slices are possible; choose a number of these")
    for option in ("max_norm", "sparse", "scale_grad_by_freq"):
        if getattr(module, option, None):
            raise UsageError(f"{what}: {option}={getattr(module, option)} needs whole rows; plan it whole")


def _slice_of(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    kind = _kind(type(module))
    size, settings = _SIZE_AND_SETTINGS[kind.__name__]
    piece = kind.__new__(kind)  # not its __init__, which would draw random numbers
    nn.Module.__init__(piece)
    piece.train(module.training)
    for key in settings:
        setattr(piece, key, getattr(module, key))
    for key in module._parameters:
        piece.register_parameter(key, parameters.get(key))
    setattr(piece, size, parameters["weight"].shape[split_dim(module)])
    piece.register_forward_pre_hook(_take_anchor, with_kwargs=True)
    piece.register_forward_hook(_reach_anchor)
    return piece


class _Place(torch.autograd.Function):
    """Writes a slice's output into the joined one, from column `start` on; its gradient is a view of the whole one."""

    @staticmethod
    def forward(ctx: Any, joined: Tensor, output: Tensor, start: int) -> Tensor:
        ctx.columns = start, output.shape[-1]
        ctx.mark_dirty(joined)
        joined.narrow(-1, *ctx.columns).copy_(output)
        return joined

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return gradient, gradient.narrow(-1, *ctx.columns), None


class _HandOn(torch.autograd.Function):
    """An input for a slice, and for those after it; its gradient is added up in place, slice by slice.

    Where a tensor goes to several modules, autograd adds their gradients out of place once a function of Python's, such
    as FSDP2's, has handed them on: a third tensor of the input's size. What comes from the slices after this one is
    made by a matrix product and belongs to nobody else.
    """

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return given.view_as(given), given.view_as(given)

    @staticmethod
    def backward(ctx: Any, own: Tensor | None, rest: Tensor | None) -> Tensor | None:  # type: ignore[override]
        if own is None or rest is None:
            return rest if own is None else own
        return rest + own if torch.is_grad_enabled() else rest.add_(own)  # a gradient of it may be asked for


def _handed_on(args: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """What one slice is called with, and what is left for those after it."""
    pairs = [_pair(value) for value in args]
    named = {key: _pair(value) for key, value in kwargs.items()}
    own, rest = ((tuple(p[i] for p in pairs), {key: p[i] for key, p in named.items()}) for i in range(2))
    return own, rest


def _pair(value: Any) -> tuple[Any, Any]:
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        return _HandOn.apply(value)
    return value, value


class _Reach(torch.autograd.Function):
    """A slice's output, from which backward goes on to the anchor too; see [Note: Anchor]."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient, gradient.new_zeros(())


def _take_anchor(piece: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Runs after FSDP2's hook, which has seen the anchor, and before a forward that does not know of it."""
    piece.__dict__[_ANCHOR] = kwargs.pop(_ANCHOR, None)
    return args, kwargs


def _reach_anchor(piece: nn.Module, args: Any, output: Tensor) -> Tensor:
    anchor = piece.__dict__.pop(_ANCHOR)
    return output if anchor is None else _Reach.apply(output, anchor)


def _any_requires_grad(values: Sequence[object]) -> bool:
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)


def _cut(parameter: nn.Parameter, slices: int, dim: int) -> list[nn.Parameter]:
    """Copies, each contiguous as FSDP2 asks for, so that sharding a slice frees its memory."""
    tensors = parameter.detach().split(slice_sizes(parameter.shape[dim], slices), dim)
    return [nn.Parameter(t.clone(memory_format=torch.contiguous_format), parameter.requires_grad) for t in tensors]


def _dim_of(tensor: Tensor, weight_dim: int) -> int:
    return weight_dim if tensor.ndim > 1 else 0


def _box_of(tensor: Tensor) -> ChunkStorageMetadata:
    """The box of a slice that lies on this rank."""
    if isinstance(tensor, DTensor):
        return tensor.__create_chunk_list__()[0]
    return ChunkStorageMetadata(torch.Size([0] * tensor.ndim), tensor.size())


def _form(tensor: Tensor) -> tuple[object, ...]:
    return (tensor.shape, *((tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()))


def _like(part: Tensor, tensor: Tensor) -> Tensor:
    """A slice's part, sharded as the slice is."""
    if not isinstance(tensor, DTensor):
        return part
    box = _box_of(tensor)
    local = part[tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))]
    return DTensor.from_local(
        local if tensor.is_meta else local.to(tensor.device),  # what is on meta takes parts by assignment
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
