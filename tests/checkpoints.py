"""What the tests of checkpoints share: models with their plans and optimizers, and how two of them are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from osdp.cluster import Cluster
from osdp.planfile import PLAN_VERSION, Certificate, Plan, PlanModel, PlanUnit, Predicted
from osdp.recompute import Recompute
from osdp.runtime.apply import parallelize
from osdp.runtime.checkpoint import Checkpoint, load_checkpoint, save_checkpoint

VOCAB, BATCH, SEQ_LEN = 97, 12, 8


class Net(nn.Module):
    """A tied head, what can be split and what cannot, and buffers; 97, 32 and 50 do not divide by 3."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, 32)
        self.up = nn.Linear(32, 50)
        self.norm = nn.LayerNorm(50)
        self.down = nn.Linear(50, 32)
        self.head = nn.Linear(32, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("mask", torch.ones(1), persistent=False)
        nn.init.normal_(self.tokens.weight, std=0.1)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.tokens(tokens)
        hidden = hidden + self.down(nn.functional.gelu(self.norm(self.up(hidden)))) * self.mask
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def plan_of(world: str, modes: str, up: tuple[int, int] = (1, 1), down: tuple[int, int] = (1, 1)) -> Plan:
    """A mode for each of tokens, up, norm and down; slices, and how many of them have the mode, of `up` and `down`."""
    units = [
        PlanUnit(
            name,
            modules,
            None,
            mode,
            *splits,
            recompute=Recompute.NONE,
            reduce_once=False,
            two_levels=False,
            parameters=parameters,
        )
        for (name, modules, splits, parameters), mode in zip(
            [
                ("tokens", ("tokens", "head"), (1, 1), VOCAB * 32),
                ("up", ("up",), up, 33 * 50),
                ("norm", ("norm",), (1, 1), 100),
                ("down", ("down",), down, 51 * 32),
            ],
            modes.split(),
            strict=True,
        )
    ]
    return Plan(
        version=PLAN_VERSION,
        model=PlanModel("net", sum(unit.parameters for unit in units), None),
        cluster=Cluster.parse(f"{world}xCPU"),
        precision="fp32",
        reduce_dtype="fp32",
        optimizer="adamw",
        batch_size=1,
        accumulation=1,
        predicted=Predicted(0.0, 0.0, 0.0, 0, 0, 0, "", {}, {}),
        certificate=Certificate("none", 0.0, 0.0, 0.0, 0, 0, 0.0, 0, 0),
        baselines=(),
        units=tuple(units),
    )


ON_2 = plan_of("2", "free keep replicate free", up=(3, 1))
ON_3 = plan_of("3", "keep free free replicate", up=(4, 4), down=(2, 1))
ON_4 = plan_of("2x2", "free_in_node keep_in_node free_to_node free", up=(2, 1), down=(3, 2))


def built(plan: Plan | None, *, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Net() if plan is None else parallelize(Net(), plan)


def adamw(model: nn.Module) -> Optimizer:
    """In two groups, as it is used: weights decay, norms and biases do not."""
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-3)


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> list[float]:
    """The loss of the whole batch in every step; the batch depends on the step alone."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    losses = []
    for step in steps:
        data = torch.randint(VOCAB, (2, BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(step))
        tokens, targets = data.chunk(ranks, dim=1)[rank]
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(total)
        losses.append(total.item() / ranks)
    return losses


def everything(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """All values of a plain model and its optimizer, by name."""
    found: dict[str, Any] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = value.clone() if isinstance(value, Tensor) else value
    for index, group in enumerate(optimizer.param_groups):
        found |= {f"group {index} {key}": value for key, value in group.items() if key != "params"}
    return found


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Equal names, types, shapes, dtypes and bits."""
    return left.keys() == right.keys() and all(
        type(a) is type(b) and (a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, Tensor) else a == b)
        for a, b in zip(left.values(), (right[name] for name in left), strict=True)
    )


def resume(folder: Path, plan: Plan | None, steps: range, seed: int) -> tuple[Checkpoint | None, list[float]]:
    model = built(plan, seed=seed)
    optimizer = adamw(model)
    found = load_checkpoint(folder, model, optimizer)
    losses = train(model, optimizer, steps)
    save_checkpoint(folder, model, optimizer, step=steps.stop, extra={"losses": losses})
    return found, losses


def small(step: int) -> tuple[nn.Module, Optimizer]:
    """A model whose values say which step they are of."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, step)
    return model, optimizer


def save_small(folder: Path, step: int, **settings: Any) -> None:
    save_checkpoint(folder, *small(step), step=step, **settings)


def loaded_small(folder: Path, step: int | None = None) -> int:
    """The step of the newest checkpoint, or the given one, all values of which are of that step."""
    model, optimizer = small(-1)
    found = load_checkpoint(folder, model, optimizer, step=step)
    assert found is not None
    for parameter in model.parameters():
        assert (parameter == found.step).all()
        assert (optimizer.state[parameter]["momentum_buffer"] == found.step).all()
    return found.step
