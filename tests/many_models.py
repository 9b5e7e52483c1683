"""Small models of the kinds that people train, beyond the language models of the other tests, each with its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from image_models import CLASSES, LENGTH, WIDTH, ConvNeXt, ResNet, ResNet50, UNet, image, noisy
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather


def sequence(batch: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, LENGTH, WIDTH, generator=generator), torch.randint(CLASSES, (batch,), generator=generator)


class Encoder(nn.Module):
    """torch's own encoder, with its fast path and its nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.encoder(x).mean(1)), labels)


class EncoderDecoder(nn.Module):
    """nn.Transformer: two towers, and masks made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(WIDTH, 4, 2, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return F.cross_entropy(self.head(self.body(x, x, tgt_mask=mask, tgt_is_causal=True).mean(1)), labels)


class AttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.feed(x + self.attention(y, y, y, need_weights=False)[0])


class Attention(nn.Module):
    """Blocks around nn.MultiheadAttention, which reads the weight of its output projection without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AttentionBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean(1)), labels)


class Scan(nn.Module):
    """A state that every step changes, as in Mamba."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.step = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.decay = nn.Parameter(torch.linspace(-1, 0, WIDTH))
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        values, gate = self.inner(x).chunk(2, -1)
        size = F.softplus(self.step(x))
        keep, state, states = torch.exp(size * self.decay), torch.zeros_like(values[:, 0]), []
        for place in range(x.shape[1]):
            state = keep[:, place] * state + size[:, place] * values[:, place]
            states.append(state)
        return x + self.outer(torch.stack(states, 1) * F.silu(gate))


class Mamba(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scan() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        scores = self.head(x.mean(1))
        return F.cross_entropy(scores, labels), scores


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.lstm(x)[0][:, -1]), labels)


class Contrastive(nn.Module):
    """Every sample is compared with every other: costs grow with the square of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.second = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for first, second in zip(self.first, self.second, strict=True):
            x, y = torch.tanh(first(x)), torch.tanh(second(y))
        scores = F.normalize(x.flatten(1)) @ F.normalize(y.flatten(1)).T * self.temperature
        labels = torch.arange(len(scores))
        return F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)


class GatheredContrastive(Contrastive):
    """CLIP's loss over the features of all ranks: each compares its samples with everybody's."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for first, second in zip(self.first, self.second, strict=True):
            x, y = torch.tanh(first(x)), torch.tanh(second(y))
        texts, images = (F.normalize(of_all_ranks(side.flatten(1))) for side in (x, y))
        scores = texts @ images.T * self.temperature
        labels = torch.arange(len(scores))
        return F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)


def of_all_ranks(features: Tensor) -> Tensor:
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return features
    return torch.cat(all_gather(features))


class Speaker(nn.Module):
    """A small language model: the log-probability of what each sample says."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(AttentionBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        said = self.head(x).log_softmax(-1).gather(2, tokens[:, 1:, None])
        return said.sum((1, 2))


class Preference(nn.Module):
    """DPO: a policy is trained to prefer one answer to another more than a frozen reference does."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = Speaker(), Speaker().requires_grad_(False)

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        both = torch.cat([chosen, rejected])
        with torch.no_grad():
            first, second = self.reference(both).chunk(2)
        better, worse = self.policy(both).chunk(2)
        return -F.logsigmoid(0.5 * ((better - first) - (worse - second))).mean()


def answers(batch: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(CLASSES, (2, batch, LENGTH), generator=generator))


class Generator(nn.Module):
    """The first half of a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AttentionBlock() for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, noise: Tensor) -> Tensor:
        for block in self.blocks:
            noise = block(noise)
        return self.last(noise)


class Critic(nn.Module):
    """The second half: how real a sample looks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AttentionBlock() for _ in range(2))
        self.score = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.score(x.mean(1)).mean(-1)


class RoutedBlock(nn.Module):
    """Each token goes to two of four experts; an expert computes its own tokens, and those only."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            tokens, slot = torch.where(chosen == index)
            if tokens.numel():
                out = out.index_add(0, tokens, expert(flat[tokens]) * weights[tokens, slot, None])
        return x + out.view_as(x)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RoutedBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand([]) >= 0.1:  # layer drop
                x = block(x)
        if torch.isinf(x).any() or not torch.isfinite(x).all():
            x = x.clamp(-1e4, 1e4)
        return F.cross_entropy(self.head(x.mean(1)), labels)


class Shared(nn.Module):
    """One layer called three times, as in ALBERT, and a bias that is tied to that of a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([AttentionBlock()])
        self.top = Top()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layers[0](x)
        return F.cross_entropy(self.top(x.mean(1)), labels)


class Top(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.bias = self.out.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.dense(x)))


@dataclass(frozen=True)
class Sample:
    parts: list[Tensor]
    labels: Tensor


class FromDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, CLASSES)

    def forward(self, sample: Sample) -> dict[str, Tensor]:
        x = torch.stack(sample.parts).sum(0).mean(1)
        return {"loss": F.cross_entropy(self.mix(x), sample.labels)}


class FromList(nn.Module):
    """A list of images of different sizes is one input."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, CLASSES)

    def forward(self, parts: list[Tensor]) -> Tensor:
        return sum((self.mix(part).square().mean() for part in parts), torch.zeros(()))


class TwoTowers(nn.Module):
    """The second tower takes part only where an image is given."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.vision = nn.Linear(WIDTH, WIDTH), nn.Conv2d(3, WIDTH, 4, stride=4)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor, pixels: Tensor | None = None) -> Tensor:
        x = self.text(x).mean(1)
        if pixels is not None:
            x = x + self.vision(pixels).mean((2, 3))
        return F.cross_entropy(self.head(x), labels)


class IdleTower(nn.Module):
    """A second tower, and a norm, on which the loss does not depend, as in CLIP when it classifies."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.ModuleList(AttentionBlock() for _ in range(2))
        self.vision = nn.ModuleList(AttentionBlock() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = x
        for text, vision in zip(self.text, self.vision, strict=True):
            x, y = vision(x), text(y)
        return {"loss": F.cross_entropy(self.head(x.mean(1)), labels), "text": y, "last": self.norm(x)}


class TransposedBlock(nn.Module):
    """Uses a linear's weight a second time, without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.mix = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.mix(torch.tanh(self.up(x)) @ self.up.weight))


class UsedOutside(nn.Module):
    """Uses parameters outside of their modules' calls: in a block, and in its own forward behind all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(TransposedBlock() for _ in range(2))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x + self.classes(x).mean(-1, keepdim=True)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(x.mean(1) @ self.classes.weight.T, labels)


Example = Callable[[], Any]
MANY: dict[type[nn.Module], Example] = {
    **dict.fromkeys(
        (Encoder, EncoderDecoder, Attention, Mamba, Recurrent, Routed, Shared, IdleTower, UsedOutside), sequence
    ),
    **dict.fromkeys((ResNet, ConvNeXt), image),
    ResNet50: lambda: image(8, 64),
    UNet: noisy,
    **dict.fromkeys((Contrastive, GatheredContrastive), lambda: (sequence()[0], sequence()[0].flip(1))),
    Preference: answers,
    FromDataclass: lambda: Sample(list(torch.randn(3, 2, LENGTH, WIDTH)), sequence()[1]),
    FromList: lambda: [torch.randn(2, LENGTH, WIDTH), torch.randn(2, 3, WIDTH), torch.randn(2, 1, WIDTH)],
    TwoTowers: sequence,
}


def many(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()
