"""Claims about optimizers:

- every class of `torch.optim` is offered or refused with the reason;
- what the planner says of each (states, temporaries, passes, counters) is what a dry run of its step finds, in bytes
  and with decay; without decay none costs more;
- SGD that makes no copy of gradients steps as torch's, and leaves gradients as they are;
- steps over shards, of torch's own too, are those of a single process: bit by bit where elements or rows are stepped
  by themselves, and up to rounding in Adafactor, as torch's own steps whole parameters, and in fused AdamW;
- their states are saved, and loaded under another plan on other ranks;
- the timeline of a plan with them is the dry run's of the whole step.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from planned import plan_of_units, whole_parameters
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import osdp
from osdp.cost.training import OPTIMIZERS, REFUSED_OPTIMIZERS, Training
from osdp.errors import UsageError
from osdp.model.optimizer_step import measured_step
from osdp.planfile import Plan
from osdp.sharding import FREE, FREE_IN_NODE, KEEP, KEEP_IN_NODE, REPLICATE
from osdp.training import adafactor, small_states
from osdp.training.optimizer import MOMENTUM, optimizer_of

ON_SHARDS = ("lion", "adamw", "adamw-fused", "adagrad", "adamw-bf16", "adamw-8bit", "adafactor")
SMALL = 8 << 10  # bytes of code books and of sums over rows, which no plan counts


def test_every_class_of_torch_is_offered_or_refused() -> None:
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    names = {kind.__name__.lower() for kind in kinds if issubclass(kind, torch.optim.Optimizer)} - {"optimizer"}
    assert len(names) >= 15
    assert {name: (name in OPTIMIZERS) + (name in REFUSED_OPTIMIZERS) for name in names} == dict.fromkeys(names, 1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_declared_costs_are_those_of_a_dry_run(name: str) -> None:
    cost, measured = OPTIMIZERS[name], measured_step(partial(optimizer_of, name, lr=1e-3))
    assert measured.state_bytes == sum(cost.state_bytes(shape, 4) for shape in measured.shapes)
    assert measured.counters == cost.counters
    largest = max(torch.Size(shape).numel() for shape in measured.shapes)
    if cost.chunk_temporaries:
        temporaries = sum(cost.temporary_bytes(shape, 4) for shape in measured.shapes) + cost.chunk_bytes(largest)
        assert abs(measured.temporary_bytes - temporaries) <= SMALL
    else:
        assert -(-measured.temporary_bytes // measured.held_bytes) == cost.temporaries
    passes = -(-measured.moved_bytes // measured.held_bytes)
    # torch says that it changes gradients: it does only where it unscales them itself
    assert passes - (name == "adamw-fused") == cost.passes


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_decay_a_step_costs_no_more(name: str) -> None:
    made = partial(optimizer_of, name, lr=1e-3)
    decayed = measured_step(made)
    plain = measured_step(lambda parameters: made([{"params": list(parameters), "weight_decay": 0.0}]))
    assert plain.state_bytes == decayed.state_bytes and plain.temporary_bytes <= decayed.temporary_bytes


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("name", ["sgd", "sgd-momentum"])
def test_sgd_steps_as_torch_does_and_leaves_gradients_as_they_are(name: str, decay: float) -> None:
    start = [torch.randn(7, 5), torch.randn(3)]
    own, theirs = ([nn.Parameter(each.clone()) for each in start] for _ in range(2))
    optimizer = optimizer_of(name, [{"params": own, "weight_decay": decay}], lr=0.1)
    momentum = MOMENTUM if name == "sgd-momentum" else 0.0
    reference = torch.optim.SGD(theirs, lr=0.1, momentum=momentum, weight_decay=decay)
    for _ in range(5):
        for mine, other in zip(own, theirs, strict=True):
            other.grad = torch.randn_like(other)
            mine.grad = other.grad.clone()
        optimizer.step()
        reference.step()
        for mine, other in zip(own, theirs, strict=True):
            assert mine.grad is not None and other.grad is not None and torch.equal(mine.grad, other.grad)
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", REFUSED_OPTIMIZERS)
def test_what_cannot_run_under_a_plan_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UsageError, match=rf"optimizer '{name}' cannot run under a plan: .*; choose "):
        Training.of(optimizer=name)


class Wide(nn.Module):
    """Matrices with and without whole blocks of 256, three dimensions, and vectors; not all divide over four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(256, 12), nn.Linear(12, 7), nn.Conv1d(6, 256, 3)
        self.experts = nn.Bilinear(8, 512, 6)
        self.norm = nn.LayerNorm(12)


UNITS = ("first", "second", "third", "experts", "norm")
PLANS = {
    "2x2": (FREE, KEEP_IN_NODE, REPLICATE, KEEP, FREE_IN_NODE),
    "2": (REPLICATE, FREE, KEEP, FREE, FREE),
}


def wide_plan(world: str) -> Plan:
    modes = dict(zip(((unit,) for unit in UNITS), PLANS[world], strict=True))
    return plan_of_units(Wide(), world, modes)


def built() -> Wide:
    torch.manual_seed(0)
    return Wide()


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps with given gradients, which differ in size from step to step."""
    for step in steps:
        for index, parameter in enumerate(model.parameters()):
            drawn = torch.Generator().manual_seed(100 * step + index)
            whole = torch.randn(parameter.shape, generator=drawn) * 10.0 ** (index % 3 - step)
            parameter.grad = (
                distribute_tensor(whole, parameter.device_mesh, parameter.placements)
                if isinstance(parameter, DTensor)
                else whole
            )
        optimizer.step()


def use_small_chunks() -> None:
    """So that these parameters take several."""
    small_states.CHUNK_NUMEL = adafactor.CHUNK_NUMEL = 512


def on_ranks(plan: Plan, names: tuple[str, ...], folder: str, *, resumed: bool) -> dict[str, dict[str, Tensor]]:
    found = {}
    use_small_chunks()
    for name in names:
        model = osdp.parallelize(built(), plan)
        optimizer = optimizer_of(name, model.parameters(), lr=0.01)
        if resumed:
            osdp.load_checkpoint(Path(folder) / name, model, optimizer)
        else:
            stepped(model, optimizer, range(2))
            osdp.save_checkpoint(Path(folder) / name, model, optimizer, step=2)
        stepped(model, optimizer, range(2, 4))
        found[name] = whole_parameters(model)
    return found


def alone(name: str) -> dict[str, Tensor]:
    model = built()
    make = partial(torch.optim.Adafactor, weight_decay=0.1) if name == "adafactor" else partial(optimizer_of, name)
    optimizer = make(model.parameters(), lr=0.01)
    stepped(model, optimizer, range(4))
    return {key: parameter.detach() for key, parameter in model.named_parameters()}


def test_steps_over_shards_are_those_of_a_single_process_and_resume_under_another_plan(tmp_path: Path) -> None:
    results = run_ranks(4, partial(on_ranks, resumed=False), wide_plan("2x2"), ON_SHARDS, str(tmp_path))
    results += run_ranks(2, partial(on_ranks, resumed=True), wide_plan("2"), ON_SHARDS, str(tmp_path))
    for name in ON_SHARDS:
        tolerance = {"adafactor": 2e-6, "adamw-fused": 1e-8}.get(name, 0.0)  # its kernel ends rows otherwise
        for key, true in alone(name).items():
            for result in results:
                torch.testing.assert_close(result[name][key], true, rtol=0, atol=tolerance, msg=f"{name}: {key}")
