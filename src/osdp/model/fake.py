"""Models over fake tensors: every shape and dtype is there, and no memory.

[Note: Packed]
Without an attention mask transformers looks into the position ids whether sequences are packed. Fake ones cannot tell,
and it prepares for the worst: a mask of length times length, cast and saved by every layer, and keys and values
repeated for every head. Where a model numbers the positions itself, none are packed.
"""

from __future__ import annotations

import copy
import logging
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from osdp._torch import FakeTensorMode, tree_leaves
from osdp.errors import UsageError
from osdp.model.values import fake_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FINDS_PACKED = "find_packed_sequence_indices"


def fake_copy(model: nn.Module, dtype: torch.dtype, without: Sequence[nn.Module] = ()) -> nn.Module:
    """The same modules over new tensors, fake under a fake mode; floating parameters get the dtype. Ties stay.

    Modules in `without` are empty in the copy.
    """
    memo: dict[int, Any] = {id(module): nn.Module() for module in without}
    for parameter in model.parameters():
        kind = dtype if parameter.is_floating_point() else parameter.dtype
        fake = torch.empty(parameter.shape, dtype=kind, device="cpu")
        memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = fake_of(buffer)
    for tensor in _plain_tensors(model):
        memo.setdefault(id(tensor), fake_of(tensor))
    return copy_of(model, memo)


def copy_of(model: nn.Module, memo: Mapping[int, Any]) -> nn.Module:
    """A deep copy, with what `memo` has for the values of these ids; what cannot be copied is shared."""
    try:
        with torch_says_nothing():
            return copy.deepcopy(model, dict(memo))
    except Exception:
        return copy.deepcopy(model, {**memo, **{id(value): value for value in _not_copied(model, memo)}})


def _not_copied(model: nn.Module, memo: Mapping[int, Any]) -> Iterator[Any]:
    """What modules hold and nobody can copy: a lock, an open file, a generator."""
    for module in model.modules():
        for key, value in vars(module).items():
            try:
                if key != "_modules":
                    with torch_says_nothing():
                        copy.deepcopy(value, dict(memo))
            except Exception:
                yield value


def _plain_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Tensors that modules keep beside parameters and buffers: a copy of a computed one would be refused."""
    for module in model.modules():
        held = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        yield from (leaf for leaf in tree_leaves(held) if isinstance(leaf, Tensor))


def without_cache(model: nn.Module) -> nn.Module:
    """Switches a Hugging Face model's cache of keys and values off, in place.

    Only generation has a use for it, and a recomputed block would append to it twice; transformers does the same where
    it checkpoints itself.
    """
    for config in _configs(model):
        if getattr(config, "use_cache", None):
            config.use_cache = False
    return model


def without_layerdrop(model: nn.Module) -> list[str]:
    """Sets the rates with which whole layers are skipped to 0, in place; returns the modules that had one."""
    dropped = []
    for name, module in model.named_modules():
        if isinstance(rate := getattr(module, "layerdrop", None), float) and rate > 0:
            setattr(module, "layerdrop", 0.0)  # noqa: B010 - not one of the module's tensors
            dropped.append(name)
    for config in _configs(model):
        for key in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
            if isinstance(getattr(config, key, None), float):
                setattr(config, key, 0.0)
    return dropped


def refuse_own_checkpointing(model: nn.Module) -> None:
    """Refuses a Hugging Face model that recomputes layers itself: whether a block does is the plan's decision."""
    own = [name for name, module in model.named_modules() if getattr(module, "gradient_checkpointing", False) is True]
    if own:
        raise UsageError(
            f"the gradient checkpointing of this {type(model).__name__} is on, in {len(own)} modules such as {own[0]}:"
            " it would recompute blocks that the plan does not; call model.gradient_checkpointing_disable(), and osdp"
            " chooses the blocks to recompute"
        )


def refuse_sparse_gradients(model: nn.Module) -> None:
    """Refuses embeddings whose gradients are sparse: FSDP2 reduces dense ones only."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise UsageError(
                f"{name or type(model).__name__} ({type(module).__name__}) has sparse gradients, and FSDP2 reduces"
                " dense ones only; build it with sparse=False, or freeze it"
            )


def refuse_uninitialized(model: nn.Module) -> None:
    """Refuses lazy modules that have not run yet: their parameters have no shapes."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise UsageError(
                f"the parameter {name} of this {type(model).__name__} has no shape yet: run the model once on its"
                " inputs before it is planned"
            )


def settled(model: nn.Module) -> nn.Module:
    """A copy as every trace runs it: without a cache, and with every layer."""
    without_layerdrop(model)
    return without_cache(model)


def _configs(model: nn.Module) -> Iterator[Any]:
    """Every configuration object in the modules of a Hugging Face model, with those inside it, once."""
    seen: set[int] = set()
    waiting = [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    while waiting:
        config = waiting.pop()
        if id(config) in seen or not hasattr(config, "model_type"):
            continue
        seen.add(id(config))
        yield config
        waiting.extend(value for value in vars(config).values() if hasattr(value, "model_type"))


@contextmanager
def same_draws() -> Iterator[None]:
    """Random numbers of Python, NumPy and torch are the same in every trace, and the user's own go on as they were."""
    python, array = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)


@contextmanager
def torch_says_nothing() -> Iterator[None]:
    """Torch logs what fails on fake tensors with a traceback; here it fails on trial, or is said in a sentence."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


@contextmanager
def compiling_nothing() -> Iterator[None]:
    """Runs what the model's own code has compiled as it is written: a compiler takes fake tensors for constants."""
    if "torch._dynamo.eval_frame" not in sys.modules:  # then nothing is compiled, and importing it takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def sequences_not_packed(kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Lets a Hugging Face model compute as it does with data, if `kwargs` has no position ids; see [Note: Packed]."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    if "position_ids" in kwargs or not hasattr(masking, _FINDS_PACKED):
        yield
        return
    found = getattr(masking, _FINDS_PACKED)
    setattr(masking, _FINDS_PACKED, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(masking, _FINDS_PACKED, found)
