"""Small models of images: convolutions with batch norms, a ConvNeXt, a diffusion UNet with cross attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, LENGTH, CLASSES = 16, 6, 5


def image(batch: int = 2, size: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(batch, 3, size, size, generator=generator)
    return pixels, torch.randint(CLASSES, (batch,), generator=generator)


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


class Bottleneck(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        inner = after // 4
        self.body = nn.Sequential(
            *(nn.Conv2d(before, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
            *(nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
            *(nn.Conv2d(inner, after, 1, bias=False), nn.BatchNorm2d(after)),
        )
        same = before == after and stride == 1
        self.skip = nn.Identity() if same else nn.Sequential(nn.Conv2d(before, after, 1, stride), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.skip(x) + self.body(x))


class ResNet50(nn.Module):
    """The 3, 4, 6 and 3 bottlenecks of a ResNet-50, at a sixteenth of its width."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.layers, before = nn.ModuleList(), 4
        for stage, count in enumerate((3, 4, 6, 3)):
            after = 16 << stage
            for number in range(count):
                self.layers.append(Bottleneck(before, after, 2 if stage and not number else 1))
                before = after
        self.head = nn.Linear(before, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(x), 3, 2, 1)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


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
