"""Small models of the kinds that people train, beyond the language models of the other tests, each with its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, LENGTH, CLASSES = 16, 6, 5


def sequence(batch: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, LENGTH, WIDTH, generator=generator), torch.randint(CLASSES, (batch,), generator=generator)


def image(batch: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, 3, 16, 16, generator=generator), torch.randint(CLASSES, (batch,), generator=generator)


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


class Residual(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=after // before, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.skip = nn.Conv2d(before, after, 1, stride=after // before) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.skip(x) + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class ResNet(nn.Module):
    """Batch norms, the last over one value a sample: batch 1 does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        sizes = ((8, 8), (8, 16), (16, 16), (16, 32))
        self.stages = nn.Sequential(*(Residual(*size) for size in sizes))
        self.squeeze = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.squeeze(self.stages(self.stem(x)).mean((2, 3)))), labels)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 2, stride=2)
        self.blocks = nn.ModuleList(ConvNeXtBlock(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class CrossBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(WIDTH, width)
        self.query, self.key, self.value = nn.Linear(width, width), nn.Linear(WIDTH, width), nn.Linear(WIDTH, width)

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x = x + self.conv(F.silu(self.norm(x))) + self.time(time)[:, :, None, None]
        flat = x.flatten(2).transpose(1, 2)
        seen = F.scaled_dot_product_attention(self.query(flat), self.key(text), self.value(text))
        return x + seen.transpose(1, 2).view_as(x)


class UNet(nn.Module):
    """A diffusion model: what goes down is added on the way up, and every level looks at a text."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList([CrossBlock(8), CrossBlock(16)])
        self.halve = nn.ModuleList([nn.Conv2d(8, 16, 2, stride=2), nn.Conv2d(16, 16, 2, stride=2)])
        self.middle = CrossBlock(16)
        self.grow = nn.ModuleList([nn.ConvTranspose2d(16, 16, 2, stride=2), nn.ConvTranspose2d(16, 8, 2, stride=2)])
        self.up = nn.ModuleList([CrossBlock(16), CrossBlock(8)])
        self.last = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, *, noisy: Tensor, noise: Tensor, time: Tensor, text: Tensor) -> dict[str, Tensor]:
        x, kept = self.first(noisy), []
        for block, halve in zip(self.down, self.halve, strict=True):
            kept.append(block(x, time, text))
            x = halve(kept[-1])
        x = self.middle(x, time, text)
        for block, grow in zip(self.up, self.grow, strict=True):
            x = block(grow(x) + kept.pop(), time, text)
        return {"prediction": x, "loss": F.mse_loss(self.last(x), noise)}


def noisy(batch: int = 2) -> dict[str, Tensor]:
    shapes = {"noisy": (3, 16, 16), "noise": (3, 16, 16), "time": (WIDTH,), "text": (LENGTH, WIDTH)}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(batch, *shape, generator=generator) for name, shape in shapes.items()}


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


Example = Callable[[], Any]
MANY: dict[type[nn.Module], Example] = {
    **dict.fromkeys((Encoder, EncoderDecoder, Attention, Mamba, Recurrent, Routed, Shared, IdleTower), sequence),
    **dict.fromkeys((ResNet, ConvNeXt), image),
    UNet: noisy,
    Contrastive: lambda: (sequence()[0], sequence()[0].flip(1)),
    FromDataclass: lambda: Sample(list(torch.randn(3, 2, LENGTH, WIDTH)), sequence()[1]),
    FromList: lambda: [torch.randn(2, LENGTH, WIDTH), torch.randn(2, 3, WIDTH), torch.randn(2, 1, WIDTH)],
    TwoTowers: sequence,
}


def many(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()
