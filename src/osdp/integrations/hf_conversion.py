"""How transformers and peft name weights in files, where the names differ from the model's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Read = Callable[[str], Tensor]
Convert = Callable[[Read, Sequence[str]], dict[str, Tensor]]


def conversions(
    model: nn.Module, names: set[str], keys: Sequence[str]
) -> tuple[dict[str, str], list[tuple[Sequence[str], Convert]], set[str], list[str]]:
    """What becomes of keys that the model lacks, by transformers' own rules.

    Returns keys that are only renamed, by the model's name; keys that make other tensors together, with what makes
    them; the names of these tensors; and the keys that are left.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    rules = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    known: Any = dict.fromkeys(names, True)
    renamed: dict[str, str] = {}
    grouped: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    left = []
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)  # type: ignore[arg-type]
        if name not in names:
            left.append(key)
        elif pattern is None:
            renamed[name] = key
        else:
            grouped.setdefault(name, (copy.deepcopy(by_pattern[pattern]), []))[1].append((key, pattern))
    made, makers = set(), []
    for name, (rule, found) in grouped.items():
        made |= {name.replace(rule.target_patterns[0], target) for target in rule.target_patterns}
        makers.append(([key for key, _ in found], _maker(model, name, rule, dict(found))))
    return renamed, makers, made, left


def _maker(model: nn.Module, name: str, rule: Any, patterns: dict[str, str]) -> Convert:
    def make(read: Read, keys: Sequence[str]) -> dict[str, Tensor]:
        for key in keys:
            rule.add_tensor(name, key, patterns[key], lambda key=key: read(key))
        found = rule.convert(name, model=model, config=model.config)
        return {to: value[0] if isinstance(value, list) else value for to, value in found.items()}

    return make


def adapter_names(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """The parameters of a peft model's adapter, each with the name that it has in peft's file."""
    from peft.utils import get_peft_model_state_dict

    marks = {name: torch.empty(1, device="meta") for name in names}
    found = get_peft_model_state_dict(model, state_dict=dict(marks), save_embedding_layers=False)
    by_mark = {id(mark): name for name, mark in marks.items()}
    return {by_mark[id(mark)]: to for to, mark in found.items()}
