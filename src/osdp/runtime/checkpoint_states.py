"""What a checkpoint holds of a model and its optimizer, in plain names; see [Note: Plain names]."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from osdp.errors import UsageError
from osdp.runtime.apply import applied_to
from osdp.runtime.split import JoinedTensor, held_parameters
from osdp.runtime.state_tensors import state_zeros

CHECKPOINT_VERSION = 1
KINDS = ("parameters", "buffers")


class States:
    """The tensors of a model and its optimizer, by their plain names."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # gathered copies may be left from a forward without backward
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                raise UsageError(f"{type(module).__name__} has extra state, which is not saved; save it through extra")
        self.model, self.optimizer = model, optimizer
        self.held = held_parameters(model)
        self.buffers = {
            f"{prefix}.{key}" if prefix else key: buffer
            for prefix, module in model.named_modules()
            for key, buffer in module._buffers.items()
            if buffer is not None and key not in module._non_persistent_buffers_set
        }
        self.names = {parameter: name for name, (parameters, _) in self.held.items() for parameter in parameters}
        meta = [name for name, (parameters, _) in self.held.items() if parameters[0].is_meta]
        if meta:
            raise UsageError(f"{meta[0]} is on the meta device; call osdp.initialize(model) first")

    def shapes(self) -> dict[str, dict[str, list[int]]]:
        parameters = {name: list(_join(*held).shape) for name, held in self.held.items()}
        return {"parameters": parameters, "buffers": {name: list(b.shape) for name, b in self.buffers.items()}}

    def model_tensors(self) -> dict[str, Tensor]:
        found = {name: _join(*held) for name, held in self.held.items()} | self.buffers
        return {f"model.{name}": tensor for name, tensor in found.items()}

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold this model: all, but in a pipeline those of its stage."""
        try:
            return applied_to(self.model).ranks
        except UsageError:
            return (0,)

    def tensors(self, rank: int) -> dict[str, Tensor]:
        """Everything that a rank saves as tensors, under the names it has in the checkpoint.

        Buffers may differ by rank, as a batch norm's running statistics do: those of the first rank that has the model
        are saved, all of them.
        """
        found = self.model_tensors()
        for name in self.buffers if rank != self.ranks[0] else ():
            del found[f"model.{name}"]
        for name, state in self.optimizer_states():
            found |= {f"optimizer.{name}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
        return found

    def optimizer_states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """What the optimizer keeps for each parameter, joined as the parameter is; numbers are those of slice 0."""
        if self.optimizer is None:
            return
        for name, (parameters, dim) in self.held.items():
            states = [self.optimizer.state.get(parameter, {}) for parameter in parameters]
            if any(set(state) != set(states[0]) for state in states):
                raise UsageError(f"the optimizer has states for some slices of {name} only; save after a step of all")
            joined: dict[str, Any] = {}
            for key, value in states[0].items():
                if not isinstance(value, Tensor) or value.ndim == 0:
                    joined[key] = value
                elif all(state[key].shape == p.shape for state, p in zip(states, parameters, strict=True)):
                    joined[key] = _join([state[key] for state in states], dim)
                elif len(parameters) == 1 and value.ndim == parameters[0].ndim:  # factors and scales
                    joined[key] = value
                else:
                    raise UsageError(
                        f"{key} of {name} has shape {list(value.shape)}: of {type(self.optimizer).__name__} only states"
                        " with the parameter's dimensions and single numbers can be saved; choose another optimizer"
                    )
            yield name, joined

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups, by the parameters' names."""
        groups = []
        for group in self.optimizer.param_groups if self.optimizer else ():
            if not all(parameter in self.names for parameter in group["params"]):
                raise UsageError("the optimizer has a parameter that the model lacks; make it of model.parameters()")
            names = list(dict.fromkeys(self.names[parameter] for parameter in group["params"]))
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({"parameters": names, "settings": {key: _plain(value) for key, value in settings.items()}})
        return groups

    def check_optimizer(self, path: Path, document: Mapping[str, Any]) -> None:
        """Refuses a checkpoint of another optimizer."""
        if self.optimizer is None:
            return
        saved, kind = document["optimizer"], type(self.optimizer).__name__
        if saved is None or saved["kind"] != kind:
            has = "no optimizer" if saved is None else saved["kind"]
            raise UsageError(f"{path} was saved with {has}, not {kind}; load it without the optimizer, or with its own")
        self._settings_of(document)

    def _settings_of(self, document: Mapping[str, Any]) -> list[dict[str, Any]]:
        """For each group of the optimizer, the settings of the saved group with its parameters."""
        saved = {name: group["settings"] for group in document["optimizer"]["groups"] for name in group["parameters"]}
        groups = [group["parameters"] for group in self.groups()]
        own = {name for names in groups for name in names}
        other = own - set(saved) or {name for name in saved if name in self.held and name not in own}
        if other:
            raise UsageError(f"only one of checkpoint and optimizer has {min(other)}; give it the same parameters")
        found: list[dict[str, Any]] = []
        for names in groups:
            if any(saved[name] != saved[names[0]] for name in names):
                raise UsageError(
                    f"the parameter group of {names[0]} was several in the checkpoint; group them as there"
                )
            found.append(saved[names[0]] if names else {})
        return found

    @torch.no_grad()
    def read(self, path: Path, document: Mapping[str, Any], metadata: Metadata) -> None:
        """Reads what this rank holds, in place; states that the optimizer lacks yet are made."""
        reader, planner = FileSystemReader(path), DefaultLoadPlanner(False, False)
        states = self._states_like(metadata, document) if self.optimizer else {}
        targets = self.model_tensors()
        for name, values in states.items():
            targets |= {f"optimizer.{name}.{key}": _join(*value) for key, value in values.items()}
        planner.set_up_planner(targets, metadata)
        reader.set_up_storage_reader(metadata, False)
        reader.read_data(planner.create_local_plan(), planner).wait()
        if self.optimizer:
            self._take_over(states, document)

    def _states_like(self, metadata: Metadata, document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """For each saved state, tensors to read it into, one for each slice: the optimizer's own where it has them."""
        assert self.optimizer is not None
        made: dict[str, dict[str, Any]] = {}
        for name, saved in document["optimizer"]["states"].items():
            if name not in self.held:  # it is another stage's
                continue
            parameters, dim = self.held[name]
            dtype = metadata.state_dict_metadata[f"model.{name}"].properties.dtype  # type: ignore[union-attr]
            made[name] = {}
            for key in saved["tensors"]:
                entry: Any = metadata.state_dict_metadata[f"optimizer.{name}.{key}"]
                if not entry.size:
                    made[name][key] = [torch.zeros((), dtype=entry.properties.dtype)], 0
                    continue
                own = [self.optimizer.state.get(parameter, {}).get(key) for parameter in parameters]
                if len(parameters) == 1 and tuple(entry.size) != tuple(parameters[0].shape):  # factors and scales
                    made[name][key] = [_state_like(own[0], parameters[0], entry)], 0
                    continue
                # A state in the parameter's dtype follows the parameter to another one.
                like = None if entry.properties.dtype == dtype else entry.properties.dtype
                pairs = zip(own, parameters, strict=True)
                made[name][key] = [old if _fits(old, p) else torch.zeros_like(p, dtype=like) for old, p in pairs], dim
        return made

    def _take_over(self, states: Mapping[str, Mapping[str, Any]], document: Mapping[str, Any]) -> None:
        assert self.optimizer is not None
        for group, settings in zip(self.optimizer.param_groups, self._settings_of(document), strict=True):
            group |= {key: _as_before(group.get(key), value) for key, value in settings.items()}
            on_device = group.get("fused") or group.get("capturable")
            for parameter in group["params"]:
                name = self.names[parameter]
                index = next(i for i, p in enumerate(self.held[name][0]) if p is parameter)
                state = dict(document["optimizer"]["states"].get(name, {"values": {}})["values"])
                for key, (tensors, _) in states.get(name, {}).items():
                    if tensors[0].ndim == 0:  # slices count on their own
                        state[key] = tensors[0].to(parameter.device if on_device else "cpu", copy=True)
                    else:
                        state[key] = tensors[index]
                self.optimizer.state[parameter] = state
                if not state:
                    del self.optimizer.state[parameter]


def _join(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Of slices one tensor, which names them; not a copy, so that what is read into it is in the slices."""
    tensors = [tensor.detach() for tensor in tensors]
    return tensors[0] if len(tensors) == 1 else JoinedTensor(tensors, dim)


def _state_like(own: Any, parameter: Tensor, entry: Any) -> Tensor:
    """The optimizer's own state of this size, or a new one."""
    if isinstance(own, Tensor) and own.shape == entry.size:
        return own
    return state_zeros(parameter, entry.size, entry.properties.dtype)


def _fits(state: Any, parameter: Tensor) -> bool:
    return isinstance(state, Tensor) and state.shape == parameter.shape and not state.is_meta


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _as_before(own: Any, value: Any) -> Any:
    """A setting as JSON has it, in the form that the optimizer has."""
    if isinstance(own, Tensor):
        return own.fill_(value)
    return tuple(value) if isinstance(own, tuple) else value


def difference(left: Mapping[str, Any], right: Mapping[str, Any]) -> str:
    """The first name or shape in which a checkpoint (left) and a model (right) differ."""
    for kind in KINDS:
        there, here = left[kind], right[kind]
        for name in [*there, *here]:
            if there.get(name) != here.get(name):
                return f"{name} is {there.get(name, 'missing')} there and {here.get(name, 'missing')} here"
    return ""


def check_model(path: Path, document: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]]) -> None:
    """Refuses a checkpoint of another model; `shapes` are every rank's, which together have all of it."""
    whole = {kind: {name: shape for own in shapes for name, shape in own[kind].items()} for kind in KINDS}
    other = difference(document, whole)
    if other:
        raise UsageError(f"{path} is of another model: {other}; load it into the model it was saved from")


def merged(documents: Sequence[tuple[tuple[int, ...], dict[str, Any]]]) -> dict[str, Any]:
    """One document of every rank's, with the ranks that have its model: stages of a pipeline have parts of it."""
    stages = {ranks: document for ranks, document in reversed(documents)}
    whole, *others = [document for _, document in sorted(stages.items())]
    for other in others:
        for kind in KINDS:
            twice = next((name for name in other[kind] if name in whole[kind]), None)
            if twice is not None:
                raise UsageError(
                    f"{twice} is in two stages of the pipeline; name modules in every stage as in the whole model, so"
                    " that a checkpoint can hold them all"
                )
            whole[kind] = whole[kind] | other[kind]
        if whole["optimizer"] is not None and other["optimizer"] is not None:
            whole["optimizer"]["groups"] += other["optimizer"]["groups"]
            whole["optimizer"]["states"] |= other["optimizer"]["states"]
    return whole


def document_of(states: States, step: int, ranks: int, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """What `checkpoint.json` says, but for the files."""
    try:
        plan = applied_to(states.model).plan
    except UsageError:
        plan = None
    kept = {
        name: {
            "tensors": [key for key, value in state.items() if isinstance(value, Tensor)],
            "values": {key: value for key, value in state.items() if not isinstance(value, Tensor)},
        }
        for name, state in states.optimizer_states()
        if state
    }
    document = {
        "version": CHECKPOINT_VERSION,
        "step": step,
        "world_size": ranks,
        "model": plan.model.name if plan else type(states.model).__name__,
        "plan": plan.digest if plan else None,
        "torch": torch.__version__,
        **states.shapes(),
        "optimizer": {"kind": type(states.optimizer).__name__, "groups": states.groups(), "states": kept}
        if states.optimizer
        else None,
        "extra": dict(extra or {}),
    }
    try:
        return json.loads(json.dumps(document))
    except (TypeError, ValueError) as error:
        raise UsageError(f"extra and the optimizer's settings must be JSON: {error}") from None
