"""Where a model comes from: a preset, a Hugging Face config.json or name, or a function of the user's.

Importing this file imports neither torch nor transformers: listing the presets is immediate.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import os
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osdp.errors import UsageError
from osdp.files import read_json
from osdp.model.fork_worker import no_garbage_collection
from osdp.model.hub import config_of, is_hub_id

if TYPE_CHECKING:
    from torch import Tensor, nn

    from osdp.cluster import Device
    from osdp.model.graph import ModelGraph

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

# A config.json that names no length trains at its maximum, up to this one: rotary models state huge maxima.
LONGEST_DEFAULT = 2048

# The shape of the labels follows from the head that the architecture's name ends with.
TOKEN_HEADS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
SAMPLE_HEADS = ("ForSequenceClassification", "ForImageClassification")

# Weights beside a config.json, as transformers stores them.
WEIGHTS = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)

# Above these, building a model would not end, or its sizes would pass 64 bits. Masks are filled with floats of -1e38.
COUNTED = ("layers", "n_layer", "experts", "blocks", "depth", "depths", "stages")
MOST_COUNTED = 10_000
MOST_SIZE = 10**12
MOST_FLOAT = 1e40

# Positions of these start after the padding index, so that many of their embeddings are out of reach.
PADDED_POSITIONS = ("roberta", "xlm-roberta", "camembert")


@dataclass(frozen=True)
class Preset:
    """One entry of presets.toml."""

    name: str
    kind: str
    description: str
    parameters: int
    source: str
    config: Mapping[str, Any]
    seq_len: int | None = None


@dataclass(frozen=True)
class ModelSource:
    """How to build a model and feed it.

    `build` constructs the module, in float32, on whatever device is current; `inputs(batch_size)` gives the
    arguments of one forward as meta tensors; `loss` maps the forward's output to a scalar. `seq_len` and
    `sample_tokens` (all tokens of a sample, encoder's and decoder's) are None where a sample is not text. `pretrained`
    is the folder in which weights are stored beside its configuration; None where there are none.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    loss: Callable[[Any], Tensor]
    seq_len: int | None
    sample_tokens: int | None
    published_parameters: int | None
    description: str
    pretrained: Path | None = None

    def build_on_meta(self) -> nn.Module:
        """The module with every tensor on the meta device: it has shapes and takes no memory."""
        import torch

        with torch.device("meta"):
            return _move_to_meta(self.build())

    def capture(
        self,
        compute_dtype: str,
        *,
        held_dtype: str = "fp32",
        device: Device | None = None,
        name: str | None = None,
        compiled: bool = False,
        on_host: bool = False,
    ) -> ModelGraph:
        """What the planner knows of the model on a device, by default this CPU, under its own name or another."""
        from osdp.model.capture import capture

        return capture(
            self.build_on_meta(),
            self.inputs,
            loss=self.loss,
            name=name or self.name,
            compute_dtype=compute_dtype,
            held_dtype=held_dtype,
            seq_len=self.seq_len,
            device=device,
            compiled=compiled,
            on_host=on_host,
        )


@cache
def presets() -> Mapping[str, Preset]:
    """Every preset by name, in the order of the file. Needs no torch."""
    text = resources.files("osdp.model").joinpath("presets.toml").read_text(encoding="utf-8")
    return {name: Preset(name=name, **entry) for name, entry in tomllib.loads(text).items()}


def load_model(spec: str, *, seq_len: int | None = None) -> ModelSource:
    """The model that `spec` names: a preset, a config.json or its folder, ORG/NAME, or `package.module:function`.

    Raises:
        UsageError: the spec names nothing that can be built, or `seq_len` does not suit the model.
    """
    if seq_len is not None and seq_len < 1:
        raise UsageError(f"sequence length {seq_len} is below 1; give a positive number of tokens")
    with no_garbage_collection():  # torch and transformers are mostly imported here
        return _load(spec, seq_len)


def _load(spec: str, seq_len: int | None) -> ModelSource:
    if spec in presets():
        preset = presets()[spec]
        if preset.kind == "gpt":
            return _from_gpt(preset, seq_len)
        # sdpa explicitly, so that a plan does not depend on which attention kernels happen to be installed.
        fields = {"attn_implementation": "sdpa", **preset.config}
        source = _from_hf(spec, fields, seq_len or preset.seq_len, preset.description)
        return replace(source, published_parameters=preset.parameters)
    path = Path(spec)
    if is_hub_id(spec) and not _exists(path):
        return replace(_from_hf_file(config_of(spec), seq_len), name=spec)
    if _exists(path) or spec.endswith(".json") or (os.sep in spec and ":" not in spec):
        return _from_hf_file(path, seq_len)
    if ":" in spec:
        return _from_function(spec, seq_len)
    close = difflib.get_close_matches(spec, presets(), n=3)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise UsageError(
        f"unknown model {spec[:200]!r}: {hint}`osdp models` lists the presets; "
        "a path to a config.json, ORG/NAME of the Hub and package.module:function are accepted too"
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long
        return False


# ---- our own GPT


def _from_gpt(preset: Preset, seq_len: int | None) -> ModelSource:
    from osdp.model.gpt import GPT, GPTConfig

    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in preset.config.items()
    }
    config = GPTConfig(**fields)
    length = _checked_length(preset.name, seq_len or preset.seq_len or config.positions, config.positions)

    def inputs(batch_size: int) -> Inputs:
        return (_meta_tokens(batch_size, length), _meta_tokens(batch_size, length)), {}

    return ModelSource(
        name=preset.name,
        build=partial(GPT, config),
        inputs=inputs,
        loss=output_loss,
        seq_len=length,
        sample_tokens=length,
        published_parameters=preset.parameters,
        description=preset.description,
    )


# ---- Hugging Face


def _from_hf_file(path: Path, seq_len: int | None) -> ModelSource:
    file = path / "config.json" if path.is_dir() else path
    fields = read_json(file, remedy="give a Hugging Face config.json or its folder")
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise UsageError(f"{file} has no model_type; give a Hugging Face config.json")
    _check_sizes(fields, file)
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    source = _from_hf(name, fields, seq_len, f"{fields['model_type']} of {file}")
    if not path.is_dir() or not any((path / stored).exists() for stored in WEIGHTS):
        return source
    return replace(source, pretrained=path)


def _check_sizes(value: Any, file: Path, key: str = "") -> None:
    """Refuses numbers that no model has."""
    if isinstance(value, dict):
        for inner, each in value.items():
            _check_sizes(each, file, f"{key}.{inner}" if key else inner)
    elif isinstance(value, list):
        for each in value:
            _check_sizes(each, file, key)
    elif isinstance(value, (int, float)):
        most = MOST_FLOAT if isinstance(value, float) else MOST_COUNTED if key.endswith(COUNTED) else MOST_SIZE
        last = key.rpartition(".")[2]
        is_size = last.startswith(("num_", "n_")) or (last.endswith("_size") and "window" not in last)
        least = 0 if is_size else -most
        if not least <= value <= most:
            raise UsageError(f"{file}: {key} is {value!r:.40} but must be from {least:,} to {most:,}; correct it")


def _from_hf(name: str, fields: Mapping[str, Any], seq_len: int | None, description: str) -> ModelSource:
    config, architecture = _hf_config_and_class(name, fields)
    length = None
    if architecture.main_input_name == "input_ids":
        text = config.get_text_config()
        learned = _learned_positions(text)
        stated = learned or getattr(text, "max_position_embeddings", None) or LONGEST_DEFAULT
        length = _checked_length(name, seq_len or min(stated, LONGEST_DEFAULT), learned)
    elif seq_len is not None:
        raise UsageError(f"{name} takes images, not a sequence of {seq_len} tokens; leave --seq-len out")
    return ModelSource(
        name=name,
        build=partial(_hf_build, name, architecture, config),
        inputs=partial(_hf_inputs, architecture.__name__, config, length),
        loss=output_loss,
        seq_len=length,
        sample_tokens=length * (2 if config.is_encoder_decoder else 1) if length else None,
        published_parameters=None,
        description=description,
    )


class _NeverDropped:
    """A layerdrop of 0 for which `torch.rand([]) < layerdrop` is False without reading the tensor's value."""

    def __gt__(self, other: object) -> bool:
        return False


def _hf_build(name: str, architecture: Any, config: Any) -> nn.Module:
    try:
        # A copy, because constructing a model writes into its config.
        model = architecture(copy.deepcopy(config)).train()
    except Exception as error:  # sizes that do not fit together raise many types
        raise UsageError(f"{name}: {architecture.__name__} rejects the config: {_first_line(error)}") from error
    if architecture.__name__.endswith("LMHeadModel"):
        model.loss_type = "ForCausalLM"  # what transformers falls back to, with a warning, for this name
    for path, module in model.named_modules():
        rate = getattr(module, "layerdrop", None)
        if isinstance(rate, (int, float)):
            if rate > 0:
                raise UsageError(f"{name}: {path} skips layers at random, layerdrop {rate}; set it to 0")
            module.layerdrop = _NeverDropped()
    return model


def _hf_config_and_class(name: str, fields: Mapping[str, Any]) -> tuple[Any, Any]:
    """The config object, and the class that its `architectures` names (else the causal language model)."""
    try:
        import transformers
    except ImportError:
        raise UsageError(f"{name} needs transformers: pip install osdp-torch[hf]") from None
    try:
        config = transformers.AutoConfig.for_model(**fields)
    except Exception as error:  # transformers' validators raise many types; all mean a bad config
        raise UsageError(f"{name}: transformers rejects the config: {_first_line(error)}") from error
    if hasattr(config, "use_cache"):
        config.use_cache = False
    listed = config.architectures or [None]
    if not isinstance(listed, list) or not isinstance(listed[0], (str, type(None))):
        raise UsageError(f"{name}: `architectures` is {listed!r:.80} but must be a list of texts; correct it")
    named: Any = listed[0]
    if named is None:
        architecture: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        named = f"causal language model of type {config.model_type}"
    else:
        architecture = getattr(transformers, named, None)
    if architecture is None:
        version = transformers.__version__
        raise UsageError(f"{name}: transformers {version} has no {named}; correct `architectures`")
    heads = TOKEN_HEADS + SAMPLE_HEADS
    known_input = getattr(architecture, "main_input_name", None) in ("input_ids", "pixel_values")
    if not (known_input and architecture.__name__.endswith(heads)):
        raise UsageError(
            f"{name}: {architecture.__name__} computes no loss from tokens or pixels and labels alone; "
            f"choose a class that ends in {', '.join(heads)}, or pass package.module:function"
        )
    return config, architecture


def _learned_positions(config: Any) -> int | None:
    """How many positions have an embedding; None where positions are rotary or relative and have no end."""
    if getattr(config, "rope_parameters", None):
        return None
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and config.model_type in PADDED_POSITIONS:
        limit -= config.pad_token_id + 1
    return limit


def _hf_inputs(architecture: str, config: Any, length: int | None, batch_size: int) -> Inputs:
    import torch

    if length is None:
        size = getattr(config, "image_size", None) or 224
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        channels = getattr(config, "num_channels", 3)
        pixels = torch.empty(_checked_batch(batch_size), channels, height, width, device="meta")
        return (), {"pixel_values": pixels, "labels": _meta_tokens(batch_size)}
    labels = _meta_tokens(batch_size, *(() if architecture.endswith(SAMPLE_HEADS) else (length,)))
    return (), {"input_ids": _meta_tokens(batch_size, length), "labels": labels}


# ---- package.module:function


def _from_function(spec: str, seq_len: int | None) -> ModelSource:
    import torch

    if seq_len is not None:
        raise UsageError(f"{spec} sets the length of its inputs, not to {seq_len}; leave --seq-len out")
    function = _import_function(spec)
    with torch.device("meta"):
        _, example, loss = _call(spec, function)
    args, kwargs = ((), example) if isinstance(example, dict) else (tuple(example), {})
    values = (*args, *kwargs.values())
    batches = [value.shape[0] for value in values if isinstance(value, torch.Tensor) and value.dim()]
    if not batches:
        raise UsageError(f"{spec}: no example input is a tensor with a batch dimension; return one")

    def scaled(value: Any, batch_size: int) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        batched = value.dim() > 0 and value.shape[0] == batches[0]
        shape = (_checked_batch(batch_size), *value.shape[1:]) if batched else value.shape
        return torch.empty(shape, dtype=value.dtype, device="meta")

    def inputs(batch_size: int) -> Inputs:
        scaled_args = tuple(scaled(value, batch_size) for value in args)
        return scaled_args, {key: scaled(value, batch_size) for key, value in kwargs.items()}

    return ModelSource(
        name=spec,
        build=lambda: _call(spec, function)[0],
        inputs=inputs,
        loss=loss or output_loss,
        seq_len=None,
        sample_tokens=None,
        published_parameters=None,
        description=_first_line(function.__doc__ or f"built by {spec}"),
    )


def _import_function(spec: str) -> Callable[[], Any]:
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise UsageError(f"{spec!r} is not package.module:function; give both names")
    # An installed command does not look into the folder it is run in; the user's module is usually there.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), attribute, None)
    except Exception as error:  # the user's module may raise anything while it is imported
        raise UsageError(
            f"cannot import {module_name!r} ({type(error).__name__}: {_first_line(error)}); "
            "run from its folder or install it"
        ) from error
    if not callable(function):
        raise UsageError(f"{module_name!r} has no function {attribute!r}; correct the name")
    return function


def _call(spec: str, function: Callable[[], Any]) -> tuple[nn.Module, Any, Callable[[Any], Tensor] | None]:
    from torch import nn

    try:
        result = function()
    except Exception as error:  # the user's code may raise anything
        raise UsageError(
            f"{spec} raised {type(error).__name__}: {_first_line(error)}; "
            "it is called without arguments and must also work under torch.device('meta')"
        ) from error
    want = "(module, example_inputs) or (module, example_inputs, loss)"
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        size = f" of {len(result)}" if isinstance(result, tuple) else ""
        raise UsageError(f"{spec} returned {type(result).__name__}{size}; return {want}")
    module, example, loss = (*result, None)[:3]
    if not isinstance(module, nn.Module):
        raise UsageError(f"{spec} returned {type(module).__name__} first, not an nn.Module; return {want}")
    if not isinstance(example, (tuple, list, dict)):
        raise UsageError(f"{spec} returned {type(example).__name__} as inputs; return a tuple or a dict")
    if loss is not None and not callable(loss):
        raise UsageError(f"{spec} returned {type(loss).__name__} as loss; return a function of the output")
    return module, example, loss


# ---- shared


def output_loss(output: Any) -> Tensor:
    """The scalar that a model's output is, or holds; see osdp.model.inputs."""
    from osdp.model import inputs

    return inputs.output_loss(output)


def _move_to_meta(module: nn.Module) -> nn.Module:
    """Replace tensors that were built on a real device; unlike `Module.to`, tied parameters stay tied."""
    import torch
    from torch import nn

    moved: dict[Any, Tensor] = {}
    for child in module.modules():
        for key, parameter in child._parameters.items():
            if parameter is not None and not parameter.is_meta:
                fresh = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                child._parameters[key] = moved.setdefault(parameter, fresh)  # type: ignore[assignment]
        for key, buffer in child._buffers.items():
            if buffer is not None and not buffer.is_meta:
                child._buffers[key] = moved.setdefault(buffer, torch.empty_like(buffer, device="meta"))
    return module


def _meta_tokens(batch_size: int, *shape: int) -> Tensor:
    import torch

    return torch.empty(_checked_batch(batch_size), *shape, dtype=torch.long, device="meta")


def _checked_batch(batch_size: int) -> int:
    if batch_size < 1:
        raise UsageError(f"batch size {batch_size} is below 1; give a positive number of samples")
    return batch_size


def _checked_length(name: str, length: int, positions: int | None) -> int:
    if positions is not None and length > positions:
        raise UsageError(
            f"sequence length {length} exceeds the {positions} learned positions of {name}; give at most {positions}"
        )
    return length


def _first_line(value: object) -> str:
    return " ".join(str(value).split("\n\n")[0].split())[:200]
