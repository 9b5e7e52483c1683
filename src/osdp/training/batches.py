"""How a window of tokens becomes the arguments of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from osdp.errors import UsageError
from osdp.model.source import Inputs, ModelSource

_NOT_CAUSAL = ("ForMaskedLM", "ForConditionalGeneration", "ForSequenceClassification", "ForImageClassification")
_OWN_LOOP = "write your own loop around osdp.parallelize, as examples/own_loop.py does"


@dataclass(frozen=True)
class Feed:
    """`arguments` takes windows of seq_len + 1 tokens; `vocab` is None where the model does not say it."""

    seq_len: int
    vocab: int | None
    arguments: Callable[[Tensor], Inputs]


def feed_of(source: ModelSource, model: nn.Module) -> Feed:
    """How to feed a model, by the example inputs that it came with.

    Two tensors of tokens are the tokens and those that follow; `input_ids` and `labels` are the same tokens twice, as
    Hugging Face's causal models shift the labels themselves; one tensor is the tokens.
    """
    args, kwargs = source.inputs(1)
    kind = type(model).__name__
    values = (*args, *kwargs.values())
    shapes = {tuple(value.shape[1:]) for value in values if _holds_tokens(value)}
    if kind.endswith(_NOT_CAUSAL) or len(shapes) != 1 or len(values) > 2 or not all(map(_holds_tokens, values)):
        raise UsageError(
            f"{source.name} is a {kind} that takes {_described(args, kwargs)}; osdp train feeds models of one or two "
            f"inputs of tokens that predict the next one; for others, {_OWN_LOOP}"
        )
    shifts_itself = set(kwargs) == {"input_ids", "labels"}

    def arguments(windows: Tensor) -> Inputs:
        tokens = windows[:, :-1]
        given = [tokens, tokens if shifts_itself else windows[:, 1:]][: len(values)]
        return tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True))

    return Feed(shapes.pop()[0], _vocab(model), arguments)


def _holds_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point()


def _described(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    named = [*(("", value) for value in args), *((f"{key} ", value) for key, value in kwargs.items())]
    return ", ".join(f"{name}{list(value.shape) if isinstance(value, Tensor) else value!r}" for name, value in named)


def _vocab(model: nn.Module) -> int | None:
    """How many tokens the model knows: what its config says, else its largest embedding."""
    config = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    stated = getattr(config, "vocab_size", None)
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return stated if isinstance(stated, int) else max(tables, default=None)
