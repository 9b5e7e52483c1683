"""Small models that use their parameters in unusual ways. Each takes tokens and targets, and returns its loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from shared import made_once
from torch import Tensor, nn

from osdp.model.capture import capture
from osdp.model.graph import ModelGraph

WIDTH, VOCAB, LENGTH = 16, 37, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, two blocks, head: what the odd ones below change."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.left_out: tuple[int, ...] = ()  # blocks that are not called

    def body(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index not in self.left_out:
                x = block(x)
        return x

    def forward(self, tokens: Tensor, targets: Tensor, total: int | None = None) -> Tensor:
        """The mean loss; with `total`, the sum by so many."""
        logits = self.head(self.body(self.tokens(tokens))).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), reduction="sum" if total else "mean")
        return loss / total if total else loss


class TiedThrice(Model):
    """One parameter in three modules that are all called, and in a fourth that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Embedding(VOCAB, WIDTH)
        self.spare = nn.Linear(WIDTH, VOCAB, bias=False)
        for module in (self.head, self.again, self.spare):
            module.weight = self.tokens.weight

    def body(self, x: Tensor) -> Tensor:
        return super().body(x) + self.again(torch.arange(LENGTH))


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class Adapters(Model):
    """Only adapters are trained: embedding, bases and head are frozen."""

    def __init__(self) -> None:
        super().__init__(Adapted)
        self.tokens.requires_grad_(False)
        self.head.requires_grad_(False)


class Repeated(Model):
    """One block called three times in a row, the other twice."""

    def body(self, x: Tensor) -> Tensor:
        for index in (0, 0, 0, 1, 1):
            x = self.blocks[index](x)
        return x


class TwiceInside(Block):
    """One linear called twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(2 * WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.middle(torch.tanh(self.middle(self.up(self.norm(x)))))
        return x + self.down(torch.tanh(wide))


class Twice(Model):
    """A linear called twice in every block, and one twice after them, and before: there no input needs a gradient."""

    def __init__(self) -> None:
        super().__init__(TwiceInside)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        shift = self.mix(torch.linspace(-1, 1, WIDTH))
        return self.mix(torch.tanh(self.mix(super().body(x + shift))))


class Returning(Model):
    """The first block is called again after the second."""

    def body(self, x: Tensor) -> Tensor:
        return self.blocks[0](super().body(x))


class UnusedInside(Block):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Parameter(torch.ones(WIDTH))


class UnusedGradients(Model):
    """Modules that are never called, in the model and in its blocks, and parameters that are never used."""

    def __init__(self) -> None:
        super().__init__(UnusedInside)
        self.never = nn.Linear(WIDTH, WIDTH)


class UnusedBeside(Model):
    """A parameter of the model itself, beside modules that are never called; one of these shares the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.never = nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Embedding(VOCAB, WIDTH)
        self.spare.weight = self.tokens.weight

    def body(self, x: Tensor) -> Tensor:
        return super().body(x) * self.scale


class OwningBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.alpha = nn.Parameter(torch.tensor([0.7]))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.gain) * self.alpha


class Owning(Model):
    """Parameters that belong to blocks and to the model, not to operators; and a buffer that is used."""

    def __init__(self) -> None:
        super().__init__(OwningBlock)
        self.first = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, WIDTH))

    def body(self, x: Tensor) -> Tensor:
        return super().body(x + self.first) + self.shift


class Experts(nn.Module):
    """Tokens go to the expert of their number: one that gets none is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = x
        for index in chosen.unique().tolist():
            mine = (chosen == index).unsqueeze(-1)
            out = out + torch.where(mine, torch.tanh(self.experts[index](x)), 0.0)
        return out


class Mixture(Model):
    """Its blocks call the experts that the tokens ask for: other ones on other ranks."""

    def __init__(self) -> None:
        super().__init__(Experts)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, targets % 3)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Stack(nn.Module):
    """Three experts, in one parameter each for up and down, as Mixtral has them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, WIDTH, 96) / 4)
        self.down = nn.Parameter(torch.randn(3, 96, WIDTH) / 10)

    def forward(self, x: Tensor, shares: Tensor) -> Tensor:
        each = torch.tanh(x.flatten(0, 1) @ self.up) @ self.down
        return (each.view(3, *x.shape) * shares.movedim(-1, 0).unsqueeze(-1)).sum(0)


class StackedBlock(nn.Module):
    def __init__(self, stack: Callable[[], nn.Module] = Stack) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = stack()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.experts(x, self.gate(x).softmax(-1)))


class Stacked(Model):
    """First dimensions of 3, 6 and 18: FSDP2 would pad them by half on four ranks, and all but the last on two."""

    def __init__(self, block: Callable[[], nn.Module] = StackedBlock) -> None:
        super().__init__(block)
        self.places = nn.Embedding(LENGTH, 1536)
        self.narrow = nn.Linear(1536, 18)

    def body(self, x: Tensor) -> Tensor:
        return super().body(x + self.narrow(self.places(torch.arange(LENGTH)))[..., :WIDTH])


class IdleStack(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(3, WIDTH, 96))


class StackedIdle(Stacked):
    """The same, with experts that no token uses."""

    def __init__(self) -> None:
        super().__init__(lambda: StackedBlock(IdleStack))


class IdleInside(Block):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.idle(x)
        return super().forward(x)


class IdleOperators(Model):
    """Operators that are called, and whose outputs nobody uses: in the blocks, and a norm after them."""

    def __init__(self) -> None:
        super().__init__(IdleInside)
        self.norm = nn.LayerNorm(WIDTH)

    def body(self, x: Tensor) -> Tensor:
        x = super().body(x)
        self.norm(x)
        return x


class IdleTower(Model):
    """A second tower, with blocks of its own, on which the loss does not depend."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.tower = nn.ModuleList(Block() for _ in range(2))

    def body(self, x: Tensor) -> Tensor:
        y = x + self.words(torch.arange(LENGTH))
        for block in self.tower:
            y = block(y)
        return super().body(x)


class UsedBehind(Model):
    """The embedding's weight is the head, without a module: behind the blocks only the model itself runs."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, tokens: Tensor, targets: Tensor, total: int | None = None) -> Tensor:
        logits = (self.body(self.tokens(tokens)) @ self.tokens.weight.T).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), reduction="sum" if total else "mean")
        return loss / total if total else loss


def built(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


@made_once
def odd_graph(kind: type[nn.Module]) -> ModelGraph:
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    return capture(built(kind), (tokens, tokens), name=kind.__name__, compute_dtype="fp32")


def data(size: int, *, seed: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCAB, (2, size, LENGTH), generator=torch.Generator().manual_seed(seed))
    return tokens[0], tokens[1]
