"""A model as one of several tensor-parallel ranks holds it: operators of local shapes, for capture.

[Note: Tensor parallel]
An operator is divided by columns (its outputs; what follows works on this rank's heads or hidden units alone) or by
rows (its inputs; ranks add up their outputs). Which ones, and how, a Hugging Face model says in its `tp_plan`; our GPT
has the plan below. An operator that is divided by columns and whose outputs are gathered at once (a language head) is
followed by a copy as large as what is gathered, which stands for it in the trace. A tied embedding is divided with its
head, by its vocabulary. Capture then measures local shapes as they are: what a rank computes, saves and holds. The
collectives themselves are not in a trace of one rank; osdp.cost.outer puts them in, by the names of these operators.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from osdp.errors import UsageError
from osdp.model.gpt import GPT
from osdp.model.graph import TensorOperator
from osdp.model.sequence_parallel import divide_tokens

COLUMNS, ROWS, GATHERED, VOCABULARY = "colwise", "rowwise", "colwise_gather_output", "embedding_rowwise"
_GPT_PLAN = {
    "tokens": VOCABULARY,
    "blocks.*.qkv": COLUMNS,
    "blocks.*.proj": ROWS,
    "blocks.*.fc1": COLUMNS,
    "blocks.*.fc2": ROWS,
    "head": GATHERED,
}


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of a model that has its shapes and no values."""
    kept: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        there = tensor.detach().to("meta")
        kept[id(tensor)] = nn.Parameter(there, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else there
    return copy.deepcopy(model, kept)


def divide(model: nn.Module, ranks: int, *, by_tokens: bool = False) -> tuple[TensorOperator, ...]:
    """Gives a model on the meta device the local shapes of one of `ranks`, in place; see [Note: Tensor parallel].

    With `by_tokens` it has a part of the tokens between divided operators too.
    """
    styles = _styles(model)
    names = {name: style for name, _ in model.named_modules() if (style := _style_of(name, styles)) is not None}
    unknown = sorted({style for style in names.values() if style not in (COLUMNS, ROWS, GATHERED, VOCABULARY)})
    if not names or unknown:
        what = f"divides operators as {', '.join(unknown)}" if unknown else "names no operator that it has"
        raise UsageError(
            f"the tp_plan of {type(model).__name__} {what}; tensor parallelism is planned for"
            f" {', '.join((COLUMNS, ROWS, GATHERED))}: leave --tensor out"
        )
    _check_heads(model, ranks)
    tied = _tied_weights(model, names)
    shared = tuple(_divided(name, model.get_submodule(name), style, ranks, tied) for name, style in names.items())
    if by_tokens:
        shared = tuple(replace(each, by_tokens=True) for each in shared)
        divide_tokens(model, shared, ranks)
    return shared


def _styles(model: nn.Module) -> Mapping[str, str]:
    if isinstance(model, GPT):
        return _GPT_PLAN
    found = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not found:
        raise UsageError(
            f"{type(model).__name__} has no tp_plan that says how its operators are divided; leave --tensor out"
        )
    return dict(found)


def _style_of(name: str, styles: Mapping[str, str]) -> str | None:
    """Patterns have `*` for a number, and may leave out the model's own prefix."""
    for pattern, style in styles.items():
        expression = re.escape(pattern).replace(r"\*", r"\d+")
        if re.fullmatch(rf"(?:model\.)?{expression}", name):
            return style
    return None


def _check_heads(model: nn.Module, ranks: int) -> None:
    config: Any = getattr(model, "config", None)
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % ranks:
            raise UsageError(f"{heads} heads ({key}) do not divide over {ranks} tensor-parallel ranks; give a divisor")


def _tied_weights(model: nn.Module, names: dict[str, str]) -> dict[int, nn.Parameter | None]:
    """Weights that several operators share, by identity, to be given one local weight.

    An embedding that its plan leaves whole is divided with the head that it is tied to.
    """
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    shared = {key: found for key, found in owners.items() if len(found) > 1}
    for found in shared.values():
        if any(name in names for name in found):
            names.update({name: VOCABULARY for name in found if name not in names})
    return dict.fromkeys(shared)


def _divided(
    name: str, module: nn.Module, style: str, ranks: int, tied: dict[int, nn.Parameter | None]
) -> TensorOperator:
    weight = getattr(module, "weight", None)
    if not isinstance(module, (nn.Linear, nn.Embedding)) or not isinstance(weight, nn.Parameter):
        raise UsageError(f"{name} is a {type(module).__name__}, which cannot be divided; leave --tensor out")
    dim = 1 if style == ROWS else 0
    if style in (COLUMNS, ROWS) and weight.shape[dim] % ranks:
        raise UsageError(
            f"{name} has {weight.shape[dim]} {'inputs' if dim else 'outputs'}, which do not divide over {ranks}"
            " tensor-parallel ranks; give a divisor"
        )
    whole = weight.shape[0]
    shape = list(weight.shape)
    shape[dim] = -(-shape[dim] // ranks)
    local = tied.get(id(weight))
    if local is None:
        local = nn.Parameter(torch.empty(shape, dtype=weight.dtype, device=weight.device), weight.requires_grad)
        if id(weight) in tied:
            tied[id(weight)] = local
    module.weight = local
    bias = getattr(module, "bias", None)
    if isinstance(bias, nn.Parameter) and dim == 0:
        module.bias = nn.Parameter(torch.empty(shape[:1], dtype=bias.dtype, device=bias.device), bias.requires_grad)
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = shape
    else:
        module.num_embeddings, module.padding_idx = shape[0], None
    if style == GATHERED:
        module.register_forward_hook(_Gathered(ranks, whole))
    return TensorOperator(name, style in (ROWS, VOCABULARY), style == GATHERED, local.shape[1] / local.shape[0])


@dataclass(frozen=True)
class _Gathered:
    """Makes an output as large as the gathered one."""

    ranks: int
    size: int

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return torch.cat([output] * self.ranks, -1)[..., : self.size]
