"""Data for one step of a model of any kind: several guesses, the likeliest first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.survey.architectures import takes

BATCH, LENGTH = 2, 16
Example = dict[str, Tensor | bool]


def _field(config: Any, *names: str, default: int) -> int:
    """The first of these fields that the configuration, or one inside it, has as a number."""
    inner = [value for value in vars(config).values() if hasattr(value, "model_type")]
    for name in names:
        for each in (config, *inner):
            value = getattr(each, name, None)
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
                return value[0]
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return default


def _tokens(config: Any, *shape: int) -> Tensor:
    special = {
        value
        for each in (config, config.get_text_config())
        for key, value in vars(each).items()
        if key.endswith(("_id", "_index")) and isinstance(value, int)
    }
    vocab = _field(config.get_text_config(), "vocab_size", default=100)
    usual = [token for token in range(3, vocab) if token not in special][:64]
    return torch.tensor(usual)[torch.randint(0, len(usual), shape)]


def examples(kind: str, model: nn.Module, seed: int = 1) -> Iterator[Example]:
    torch.manual_seed(seed)
    config: Any = model.config
    yield from {"image": _image, "audio": _audio, "image-text": _image_text}.get(kind, _text)(config, model)


def _text(config: Any, model: nn.Module) -> Iterator[Example]:
    tokens = _tokens(config, BATCH, LENGTH)
    yield {"input_ids": tokens, "labels": tokens.clone()}
    ids = {"input_ids": tokens, "decoder_input_ids": tokens.clone(), "labels": tokens.clone()}
    if "decoder_input_ids" in takes(model):
        yield ids
    yield {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}


def _pixels(config: Any, *, size: int | None = None) -> Tensor:
    size = size or _field(config, "image_size", "input_size", "img_size", default=64)
    return torch.randn(BATCH, _field(config, "num_channels", "in_channels", default=3), size, size)


def _image(config: Any, model: nn.Module) -> Iterator[Example]:
    labels = torch.randint(0, 2, (BATCH,))
    for size in (64, None, 224, 256):
        yield {"pixel_values": _pixels(config, size=size), "labels": labels}


def _audio(config: Any, model: nn.Module) -> Iterator[Example]:
    names = takes(model)
    ctc = type(model).__name__.endswith("ForCTC")
    labels = torch.randint(0, 2, (BATCH,)) if "Classification" in type(model).__name__ else _tokens(config, BATCH, 6)
    if "input_values" in names:
        bins = _field(config, "num_mel_bins", default=128)
        yield {"input_values": torch.randn(BATCH, 8000), "labels": labels}
        yield {"input_values": torch.randn(BATCH, _field(config, "max_length", default=1024), bins), "labels": labels}
    if "input_features" in names:
        bins = _field(config, "num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim", default=80)
        for shape in ((bins, 3000), (bins, 128), (128, bins), (128, 160), (128, 128)):
            mask = {"attention_mask": torch.ones(BATCH, max(shape), dtype=torch.long)} if ctc else {}
            features = torch.randn(BATCH, *shape)
            yield {"input_features": features, "labels": labels}
            yield {"input_features": features, "labels": labels, **mask}
            yield {"input_features": features, "labels": labels, "decoder_input_ids": labels}


def _image_text(config: Any, model: nn.Module) -> Iterator[Example]:
    tokens = _tokens(config, BATCH, LENGTH)
    if "return_loss" in takes(model):
        for size in (64, None, 224):
            yield {"input_ids": tokens, "pixel_values": _pixels(config, size=size), "return_loss": True}
        return
    for images in _image_inputs(config, model):
        base = {"input_ids": tokens, "labels": tokens.clone(), **images}
        yield base
        yield _with_image_tokens(config, model, base)


def _image_inputs(config: Any, model: nn.Module) -> Iterator[Example]:
    vision = getattr(config, "vision_config", None) or config
    if "image_grid_thw" in takes(model):
        patch, merge = _field(vision, "patch_size", default=14), _field(vision, "spatial_merge_size", default=2)
        time = _field(vision, "temporal_patch_size", default=1)
        side = 2 * merge
        grid = torch.tensor([[1, side, side]] * BATCH)
        for width in (3 * time * patch * patch, 3 * patch * patch):
            yield {"pixel_values": torch.randn(BATCH * side * side, width), "image_grid_thw": grid}
    size = _field(vision, "image_size", default=64)
    for pixels in (_pixels(vision), _pixels(vision, size=64), _pixels(vision).unsqueeze(1)):
        yield {"pixel_values": pixels}
        if "image_sizes" in takes(model):
            yield {"pixel_values": pixels, "image_sizes": torch.tensor([[size, size]] * BATCH)}


def _with_image_tokens(config: Any, model: nn.Module, example: Example) -> Example:
    """The same with as many places for the image as the model says that it makes of it."""
    token = _field(config, "image_token_id", "image_token_index", default=-1)
    count = 0
    try:
        with torch.no_grad():
            model(**example)
    except Exception as error:
        found = re.search(r"features:? (?:torch\.Size\(\[)?(\d+)", str(error)) or re.search(
            r"features[^0-9]*(\d+)", str(error)
        )
        count = int(found.group(1)) if found else 0
    if not count or token < 0:
        return example
    each = count // BATCH if count % BATCH == 0 and count > 1 else count
    width = _field(config.get_text_config(), "hidden_size", default=1)
    if each > 4096 and each % width == 0:
        each //= width
    places = torch.full((BATCH, each), token)
    tokens = torch.cat([example["input_ids"][:, :4], places, example["input_ids"][:, 4:]], dim=1)
    return {**example, "input_ids": tokens, "labels": tokens.clone()}
