"""Eight kinds of models in one form, so that every way to train can cut and shard each of them.

[Note: Form]
A model is `embed`, a list of `blocks` and a `head`; what goes from one to the next is a tensor or a pair of tensors. A
pipeline cuts the list; tensor parallelism finds products by their names: `q k v up gate` have outputs that are divided
over ranks, `out down` inputs. Attention takes as many heads as it finds, so that it runs on a part of them.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from osdp.model.source import ModelSource, output_loss


@dataclass(frozen=True)
class Shape:
    """`layers[i]` blocks of width `widths[i]`; `length` tokens a sample, or patches of an image."""

    kind: str
    layers: tuple[int, ...]
    widths: tuple[int, ...]
    length: int = 64
    vocab: int = 512
    head_width: int = 32
    experts: int = 0
    lora_rank: int = 0

    @property
    def causal(self) -> bool:
        return self.kind not in ("bert", "vit")


# Without an accelerator a unit's hooks, about 1 ms of Python for each collective, take time from its computation.
# Blocks are so large that this is a small part of it, as it is where an accelerator computes meanwhile; but for one
# kind of model, which shows what it costs.
SHAPES = {
    "deep": Shape("gpt", (8,), (256,)),
    "wide": Shape("gpt", (2,), (512,)),
    "small-blocks": Shape("gpt", (16,), (128,)),
    "pyramid": Shape("gpt", (3, 2, 1), (128, 256, 384)),
    "bert": Shape("bert", (8,), (192,), length=48, head_width=48),
    "encoder-decoder": Shape("encoder-decoder", (4, 4), (160, 160), length=32, head_width=40),
    "experts": Shape("experts", (4,), (128,), experts=4),
    "vit": Shape("vit", (8,), (160,), length=64, vocab=64, head_width=40),
    "lora": Shape("llama", (12,), (160,), head_width=40, lora_rank=8),
}
TITLES = {
    "deep": "narrow and deep GPT",
    "wide": "wide and shallow GPT",
    "small-blocks": "GPT of small blocks",
    "pyramid": "inconsistent and consecutive GPT",
    "bert": "BERT",
    "encoder-decoder": "encoder–decoder",
    "experts": "mixture of experts",
    "vit": "vision transformer",
    "lora": "LoRA on a Llama",
}
PATCH_VALUES = 48  # of a patch of 4 x 4 pixels


def tiny(shape: Shape) -> Shape:
    """The same kind, small enough for a test."""
    layers = (2, 1) if len(shape.widths) > 1 else (4,)
    widths = (32, 64) if len(set(shape.widths)) > 1 else (32,) * len(layers)
    return replace(shape, layers=layers, widths=widths, length=8, vocab=32, head_width=8)


class Attention(nn.Module):
    """Of a sequence to itself, or to another one."""

    def __init__(self, width: int, shape: Shape, *, causal: bool, bias: bool = True) -> None:
        super().__init__()
        self.causal, self.head_width = causal, shape.head_width
        self.rotary = shape.kind == "llama"
        self.q, self.k, self.v, self.out = (_linear(width, width, shape, bias=bias) for _ in range(4))

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        other = x if other is None else other
        q, k, v = (
            product(of).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for product, of in ((self.q, x), (self.k, other), (self.v, other))
        )
        if self.rotary:
            q, k = _rotated(q), _rotated(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int, shape: Shape) -> None:
        super().__init__()
        inner = 4 * width
        self.gated = shape.kind == "llama"
        if self.gated:
            inner = 8 * width // 3 // 32 * 32
            self.gate = _linear(width, inner, shape, bias=False)
        self.up = _linear(width, inner, shape, bias=not self.gated)
        self.down = _linear(inner, width, shape, bias=not self.gated)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x) if self.gated else F.gelu(self.up(x), approximate="tanh"))


class Experts(nn.Module):
    """Every token goes to one of several feed-forward layers, each with room for a share of every sample's tokens."""

    def __init__(self, width: int, shape: Shape) -> None:
        super().__init__()
        self.router = nn.Linear(width, shape.experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(width, shape) for _ in range(shape.experts))
        self.room = -(-5 * shape.length // (4 * shape.experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        one_hot = F.one_hot(chosen, len(self.experts)).to(x.dtype)  # sample, token, expert
        place = (one_hot.cumsum(1) * one_hot).long() - 1  # among those of its expert; -1 elsewhere
        places = torch.arange(self.room, device=x.device)
        sent = (place.unsqueeze(-1) == places).to(x.dtype)  # sample, token, expert, place; tokens too many are dropped
        found = torch.einsum("btep,btd->ebpd", sent, x)
        done = torch.stack([expert(part) for expert, part in zip(self.experts, found.unbind(0), strict=True)])
        return torch.einsum("btep,ebpd->btd", sent, done) * weights.unsqueeze(-1)


class Block(nn.Module):
    def __init__(self, width: int, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(width, shape), _norm(width, shape)
        self.attention = Attention(width, shape, causal=shape.causal, bias=shape.kind != "llama")
        self.mlp = Experts(width, shape) if shape.experts else FeedForward(width, shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class EncoderBlock(nn.Module):
    """Works on the source and hands the target on."""

    def __init__(self, width: int, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(width, shape), _norm(width, shape)
        self.attention, self.mlp = Attention(width, shape, causal=False), FeedForward(width, shape)

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        source = source + self.attention(self.norm1(source))
        return source + self.mlp(self.norm2(source)), target


class DecoderBlock(nn.Module):
    """Works on the target, looks at the source, and hands it on."""

    def __init__(self, width: int, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (_norm(width, shape) for _ in range(3))
        self.attention, self.across = (Attention(width, shape, causal=causal) for causal in (True, False))
        self.mlp = FeedForward(width, shape)

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        target = target + self.attention(self.norm1(target))
        target = target + self.across(self.norm2(target), source)
        return source, target + self.mlp(self.norm3(target))


class Embed(nn.Module):
    """Tokens and their positions; of an encoder–decoder both sequences, which come one behind the other."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.pair = shape.widths[0], shape.kind == "encoder-decoder"
        self.images = shape.kind == "vit"
        self.tokens = nn.Linear(PATCH_VALUES, width) if self.images else nn.Embedding(shape.vocab, width)
        self.positions = nn.Embedding(shape.length, width)

    def forward(self, inputs: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        length = inputs.shape[1] // (2 if self.pair else 1)
        positions = self.positions(torch.arange(length, device=inputs.device))
        if not self.pair:
            return self.tokens(inputs) + positions
        source, target = self.tokens(inputs).chunk(2, dim=1)
        return source + positions, target + positions


class Head(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.images = shape.kind == "vit"
        self.norm = _norm(shape.widths[-1], shape)
        self.predict = nn.Linear(shape.widths[-1], shape.vocab, bias=False)

    def forward(self, *state: Tensor) -> Tensor:
        x = self.norm(state[-1])
        return self.predict(x.mean(1) if self.images else x)


class Model(nn.Module):
    """`forward(inputs, targets)` is the mean loss. A part that is None belongs to another stage of a pipeline."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed: nn.Module | None = Embed(shape)
        self.blocks = nn.ModuleList(_blocks(shape))
        self.head: nn.Module | None = Head(shape)
        if shape.lora_rank:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(".lora_" in name)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return loss_of(self.outputs(inputs), targets)

    def outputs(self, *state: Any) -> Any:
        """Through the parts that are here."""
        for part in (self.embed, *self.blocks, self.head):
            if part is not None:
                found = part(*state)
                state = found if isinstance(found, tuple) else (found,)
        return state[0] if len(state) == 1 else state

    def _init_weights(self, module: nn.Module) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            parameter.data.copy_(values(key, parameter.shape, norm=isinstance(module, nn.LayerNorm | nn.RMSNorm)))


class LoRA(nn.Linear):
    """A frozen product and a trained one of low rank beside it."""

    def __init__(self, inner: int, outer: int, rank: int) -> None:
        super().__init__(inner, outer, bias=False)
        self.lora_a, self.lora_b = nn.Parameter(torch.empty(rank, inner)), nn.Parameter(torch.empty(outer, rank))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + F.linear(F.linear(x, self.lora_a), self.lora_b)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten())


def values(name: str, size: torch.Size, *, norm: bool) -> Tensor:
    """First values of a parameter, by its name alone: equal on all ranks and in a single process."""
    if len(size) == 1:
        return torch.ones(size) if norm and name.endswith("weight") else torch.zeros(size)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(size, generator=generator) * 0.05


def batch_of(shape: Shape, batch: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Samples and their targets."""
    generator = torch.Generator().manual_seed(seed)
    if shape.kind == "vit":
        images = torch.randn((batch, shape.length, PATCH_VALUES), generator=generator)
        return images, torch.randint(shape.vocab, (batch,), generator=generator)
    pair = 2 if shape.kind == "encoder-decoder" else 1
    tokens = torch.randint(shape.vocab, (batch, pair * shape.length + 1), generator=generator)
    if pair == 2:
        return tokens[:, :-1], tokens[:, -shape.length :]
    return (tokens[:, :-1], tokens[:, 1:]) if shape.causal else (tokens[:, 1:], tokens[:, 1:])


def source_of(name: str, shape: Shape) -> ModelSource:
    """The model as the planner takes it."""

    def inputs(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(each.to("meta") for each in batch_of(shape, batch, seed=0)), {}

    length = None if shape.kind == "vit" else shape.length
    return ModelSource(
        name=name,
        build=lambda: Model(shape),
        inputs=inputs,
        loss=output_loss,
        seq_len=length,
        sample_tokens=length,
        published_parameters=None,
        description=TITLES.get(name, name),
    )


def _blocks(shape: Shape) -> list[nn.Module]:
    if shape.kind == "encoder-decoder":
        kinds = (EncoderBlock, DecoderBlock)
        return [kind(shape.widths[0], shape) for kind, n in zip(kinds, shape.layers, strict=True) for _ in range(n)]
    modules: list[nn.Module] = []
    before = shape.widths[0]
    for count, width in zip(shape.layers, shape.widths, strict=True):
        if width != before:
            modules.append(nn.Linear(before, width))
        modules.extend(Block(width, shape) for _ in range(count))
        before = width
    return modules


def _linear(inner: int, outer: int, shape: Shape, *, bias: bool) -> nn.Module:
    return LoRA(inner, outer, shape.lora_rank) if shape.lora_rank else nn.Linear(inner, outer, bias=bias)


def _norm(width: int, shape: Shape) -> nn.Module:
    return nn.RMSNorm(width, eps=1e-6) if shape.kind == "llama" else nn.LayerNorm(width)


def _rotated(x: Tensor) -> Tensor:
    """Rotary positions, halves against each other."""
    half = x.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.outer(torch.arange(x.shape[-2], device=x.device).float(), rate)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
