"""A checkpoint is whole or not there, and holds the plain model: any plan, split and number of ranks goes on from it.

- Training that is resumed on 4, 2, 3 ranks and 1 process has the loss curve of one that was never interrupted, to 1e-5.
- Saved and loaded under other plans, and by the plain model, every bit of model and optimizer is the same.
- A run that is killed at any moment of a save leaves the last checkpoint whole, and the next save clears up.
- Damaged checkpoints, other models' and full disks are refused on all ranks alike, and nothing is changed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import RankFailed, run_ranks
from ranks import _context as processes
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from osdp.cluster import Cluster
from osdp.errors import OsdpError, UsageError
from osdp.planfile import PLAN_VERSION, Certificate, Plan, PlanModel, PlanUnit, Predicted
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
        PlanUnit(name, modules, None, mode, *splits, recompute=False, reduce_once=False, parameters=parameters)
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
        model=PlanModel("net", 0, None),
        cluster=Cluster.parse(f"{world}xCPU"),
        precision="fp32",
        reduce_dtype="fp32",
        optimizer="adamw",
        batch_size=1,
        accumulation=1,
        predicted=Predicted(0.0, 0.0, 0, 0, 0, "", {}, {}),
        certificate=Certificate("none", 0.0, 0.0, 0, 0.0, 0, 0),
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


# Any plan goes on


def test_resuming_under_other_plans_and_ranks_continues_the_loss_curve(tmp_path: Path) -> None:
    alone = built(None)
    truth = train(alone, adamw(alone), range(8))
    losses: list[float] = []
    for turn, (plan, steps) in enumerate([(ON_4, range(3)), (ON_2, range(3, 5)), (ON_3, range(5, 7))]):
        results = run_ranks(plan.cluster.world_size, resume, tmp_path, plan, steps, turn)
        found, own = results[0]
        assert all(result == results[0] for result in results)
        if turn:
            assert found.step == steps.start and found.extra["losses"] == losses[-len(found.extra["losses"]) :]
        losses += own
    found, own = resume(tmp_path, None, range(7, 8), 9)
    assert found == Checkpoint(7, {"losses": losses[-2:]}, tmp_path / "step-00000007")
    assert losses + own == pytest.approx(truth, rel=1e-5)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adagrad(model: nn.Module) -> Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.01)


def amsgrad(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-3), amsgrad=True, betas=(0.8, 0.95))


CASES = [(adamw, 2), (adamw, 0), (sgd, 2), (adagrad, 1), (amsgrad, 1)]  # with no step the optimizer has no states yet


def with_other_settings(optimizer: Optimizer) -> Optimizer:
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 7
    return optimizer


def copied(source: Path, target: Path, plan: Plan) -> None:
    """On a rank: loads every case under a plan, into other weights, and saves what it loaded."""
    for case, (make, _) in enumerate(CASES):
        model = built(plan, seed=7)
        optimizer = with_other_settings(make(model))
        load_checkpoint(source / str(case), model, optimizer)
        save_checkpoint(target / str(case), model, optimizer, step=2)


def test_every_bit_survives_plans_splits_and_ranks(tmp_path: Path) -> None:
    trained = []
    for case, (make, steps) in enumerate(CASES):
        model = built(None)
        trained.append((model, make(model)))
        train(*trained[-1], range(steps))
        save_checkpoint(tmp_path / "alone" / str(case), *trained[-1], step=2)
    run_ranks(4, copied, tmp_path / "alone", tmp_path / "4", ON_4)
    run_ranks(3, copied, tmp_path / "4", tmp_path / "3", ON_3)
    for case, (make, steps) in enumerate(CASES):
        for used in (False, True):
            fresh = built(None, seed=5)
            into = with_other_settings(make(fresh))
            if used:  # states that are there already are replaced, and those that were not saved are gone
                train(fresh, into, range(20, 22))
            load_checkpoint(tmp_path / "3" / str(case), fresh, into)
            assert same(everything(fresh, into), everything(*trained[case]))
            assert fresh.head.weight is fresh.tokens.weight
        if steps:
            assert train(fresh, into, range(5, 7)) == train(*trained[case], range(5, 7))


def test_others_read_it_under_plain_names_and_shapes(tmp_path: Path) -> None:
    run_ranks(2, resume, tmp_path, ON_2, range(1), 0)
    model = built(None)
    optimizer = adamw(model)
    load_checkpoint(tmp_path, model, optimizer)
    weights = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    moments = {name: {"exp_avg": torch.zeros_like(p), "step": torch.zeros(())} for name, p in weights.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path / "step-00000001")
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter)
        assert torch.equal(moments[name]["exp_avg"], optimizer.state[parameter]["exp_avg"])
        assert moments[name]["step"] == 1
    document = json.loads((tmp_path / "step-00000001" / "checkpoint.json").read_text())
    assert (document["version"], document["step"], document["world_size"]) == (1, 1, 2)
    assert document["plan"] == ON_2.digest and document["torch"] == torch.__version__
    assert document["buffers"] == {"scale": [3]}
    assert document["parameters"] == {name: list(p.shape) for name, p in model.named_parameters()}
    assert [group["settings"]["weight_decay"] for group in document["optimizer"]["groups"]] == [0.1, 0.0]


def eval_then_save(folder: Path, plan: Plan) -> tuple[float, float]:
    model, data = built(plan), torch.zeros(2, 1, SEQ_LEN, dtype=torch.long)
    model(*data)  # units that are kept stay gathered without backward
    save_checkpoint(folder, model, None, step=0)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model(*data)
    load_checkpoint(folder, model)
    loss = model(*data)
    loss.backward()
    return loss.item(), model(*data).item()


def test_gathered_units_are_saved_and_loaded_as_what_they_are(tmp_path: Path) -> None:
    truth = built(None)(*torch.zeros(2, 1, SEQ_LEN, dtype=torch.long)).item()
    for losses in run_ranks(2, eval_then_save, tmp_path, plan_of("2", "keep keep keep replicate", up=(2, 1))):
        assert losses == pytest.approx((truth, truth), rel=1e-5)
    model = built(None, seed=3)
    assert load_checkpoint(tmp_path, model) == Checkpoint(0, {}, tmp_path / "step-00000000")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), built(None).parameters(), strict=True))


def asynchronous(folder: Path, plan: Plan) -> list[bool]:
    model = built(plan)
    optimizer = adamw(model)
    losses = train(model, optimizer, range(2))
    saving = save_checkpoint(folder, model, optimizer, step=2, asynchronous=True)
    assert saving is not None
    after = train(model, optimizer, range(2, 5))  # meanwhile
    second = save_checkpoint(folder, model, optimizer, step=5, extra={"after": losses + after}, asynchronous=True)
    assert second is not None
    first_done = saving.done
    second.wait()
    return [first_done, saving.done, second.done]


def test_asynchronous_saves_hold_the_moment_they_were_asked_for(tmp_path: Path) -> None:
    assert run_ranks(3, asynchronous, tmp_path, ON_3) == [[True, True, True]] * 3
    model = built(None, seed=1)
    optimizer = adamw(model)
    assert load_checkpoint(tmp_path, model, optimizer, step=2) is not None
    losses = train(model, optimizer, range(2, 5))
    found = load_checkpoint(tmp_path, model, optimizer)
    assert found is not None and found.extra["after"][2:] == pytest.approx(losses, rel=1e-5)


def test_a_plain_asynchronous_save_is_waited_for_by_a_load(tmp_path: Path) -> None:
    model = built(None)
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    before = everything(model, optimizer)
    save_checkpoint(tmp_path, model, optimizer, step=1, asynchronous=True)
    train(model, optimizer, range(1, 2))
    assert not same(everything(model, optimizer), before)
    load_checkpoint(tmp_path, model, optimizer)
    assert same(everything(model, optimizer), before)


# Killed


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


def killed_at(event: int, folder: Path, step: int) -> None:
    """Saves, and dies before the given file operation on the folder, or ends well if there are not so many."""
    seen = 0

    def hook(name: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        inside = any(str(folder) in str(arg) for arg in args[:2] if isinstance(arg, (str, Path)))
        if inside and name in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
            seen += 1
            if seen == event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)  # it cannot be taken back, but the process ends
    save_small(folder, step, keep=1)


@pytest.mark.parametrize("step", [2, 1])  # a new one, and one that replaces itself
def test_killed_at_any_file_operation_the_last_checkpoint_is_whole(step: int, tmp_path: Path) -> None:
    for event in range(1, 60):
        folder = tmp_path / str(event)
        save_small(folder, 1)
        process = processes().Process(target=killed_at, args=(event, folder, step))
        process.start()
        process.join()
        assert loaded_small(folder) in (1, step)
        for name in re.findall(r"\bstep-\d{8}$", "\n".join(os.listdir(folder)), re.MULTILINE):
            assert loaded_small(folder, int(name[5:])) == int(name[5:])
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        save_small(folder, 3, keep=1)
        assert os.listdir(folder) == ["step-00000003"] and loaded_small(folder) == 3
    assert 10 < event < 59 and os.listdir(folder) == [f"step-{step:08d}"] and loaded_small(folder) == step


def killed_after(seconds: float, victim: int, folder: Path, plan: Plan) -> None:
    model = built(plan)
    optimizer = adamw(model)
    load_checkpoint(folder, model, optimizer)
    if dist.get_rank() == victim:
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    for step in range(2, 500):
        save_checkpoint(folder, model, optimizer, step=step)


def test_killed_at_a_random_moment_of_a_save_on_ranks_the_last_checkpoint_is_whole(tmp_path: Path) -> None:
    chance = random.Random(0)
    model = built(None)
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    before = everything(model, optimizer)
    for turn in range(4):
        folder = tmp_path / str(turn)
        save_checkpoint(folder, model, optimizer, step=1)
        with pytest.raises(RankFailed, match=r"exit code -9|OsdpError: another rank ended"):
            run_ranks(2, killed_after, chance.uniform(0.05, 0.6), turn % 2, folder, ON_2)
        into = built(None, seed=4)
        found = load_checkpoint(folder, into, own := adamw(into))
        assert found is not None and same(everything(into, own), before)
        save_checkpoint(folder, model, optimizer, step=1000)
        left = sorted(os.listdir(folder))
        assert left[-1] == "step-00001000" and all(re.fullmatch(r"step-\d{8}", name) for name in left)


# Refused


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "cut data": ("__0_0.distcp", cut, r"__0_0\.distcp is damaged: [\d,]+ bytes instead of [\d,]+"),
    "changed data": ("__0_0.distcp", flip, r"__0_0\.distcp is damaged: its checksum is \w{8} instead of \w{8}"),
    "missing data": ("__0_0.distcp", Path.unlink, r"cannot read \S+__0_0\.distcp: No such file"),
    "cut metadata": (".metadata", cut, r"\.metadata is damaged: [\d,]+ bytes"),
    "changed metadata": (".metadata", flip, r"\.metadata is damaged: its checksum"),
    "missing metadata": (".metadata", Path.unlink, r"cannot read \S+\.metadata: No such file"),
    "cut JSON": ("checkpoint.json", lambda file: os.truncate(file, 100), r"checkpoint\.json is damaged: it is no JSON"),
    "empty JSON": ("checkpoint.json", lambda file: os.truncate(file, 0), r"checkpoint\.json is damaged: it is no JSON"),
    "list JSON": ("checkpoint.json", lambda file: file.write_text("[]"), r"checkpoint\.json is damaged: it is no JSON"),  # type: ignore[dict-item]
    "missing JSON": ("checkpoint.json", Path.unlink, r"cannot read \S+checkpoint\.json: No such file"),
    "changed JSON": (
        "checkpoint.json",
        lambda file: file.write_text(file.read_text().replace('"lr": 0.1', '"lr": 0.2')),  # type: ignore[dict-item]
        r"checkpoint\.json is damaged: its checksum is another",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_before_anything_changes(damage: str, tmp_path: Path) -> None:
    save_small(tmp_path, 100)
    save_small(tmp_path, 120)
    name, harm, message = DAMAGES[damage]
    harm(tmp_path / "step-00000120" / name)
    model, optimizer = small(7)
    before = everything(model, optimizer)
    with pytest.raises(OsdpError, match=message) as refused:
        load_checkpoint(tmp_path, model, optimizer)
    assert str(refused.value).endswith(f"remove {tmp_path / 'step-00000120'}, the one before is step 100")
    assert same(everything(model, optimizer), before)
    save_small(tmp_path, 130)  # it does not stop the training that goes on
    shutil.rmtree(tmp_path / "step-00000130")
    shutil.rmtree(tmp_path / "step-00000120")
    if damage == "cut data":
        save_small(tmp_path, 120, keep=1)
        harm(tmp_path / "step-00000120" / name)
        with pytest.raises(OsdpError, match=r"step-00000120, there is none before it$"):
            loaded_small(tmp_path)
    else:
        assert not (tmp_path / "step-00000100").exists() or loaded_small(tmp_path) == 100


def refusal(folder: Path, plan: Plan) -> tuple[str, bool]:
    model = built(plan)
    optimizer = adamw(model)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    with pytest.raises(OsdpError) as refused:
        load_checkpoint(folder, model, optimizer)
    now = [parameter.to_local() for parameter in model.parameters()]
    return str(refused.value), all(map(torch.equal, before, now)) and not optimizer.state


def test_all_ranks_refuse_a_damaged_checkpoint_alike(tmp_path: Path) -> None:
    run_ranks(2, resume, tmp_path, ON_2, range(1), 1)
    cut(tmp_path / "step-00000001" / "__1_0.distcp")
    results = run_ranks(3, refusal, tmp_path, ON_3)
    assert results[0] == results[1] == results[2] and results[0][1]
    assert "__1_0.distcp is damaged" in results[0][0]


def test_other_models_optimizers_versions_and_steps_are_refused(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path / "none yet", *small(0)) is None
    save_small(tmp_path, 5)
    wide, renamed = nn.Linear(4, 5), nn.Sequential(nn.Linear(4, 3))
    for model, difference in ((wide, r"weight is \[3, 4\] there and \[5, 4\] here"), (renamed, "weight is .* missing")):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UsageError, match=rf"step-00000005 is of another model: {difference}"):
            load_checkpoint(tmp_path, model, optimizer)
        with pytest.raises(UsageError, match=rf"is of another model: {difference}.*; save to another folder"):
            save_checkpoint(tmp_path, model, optimizer, step=6)
    assert os.listdir(tmp_path) == ["step-00000005"]
    model, _ = small(0)
    with pytest.raises(UsageError, match="was saved with SGD, not AdamW; load it without the optimizer"):
        load_checkpoint(tmp_path, model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(UsageError, match="only one of checkpoint and optimizer has bias"):
        load_checkpoint(tmp_path, model, torch.optim.SGD([model.weight], lr=0.1))
    with pytest.raises(UsageError, match="has no checkpoint of step 4; there: 5"):
        load_checkpoint(tmp_path, *small(0), step=4)
    with pytest.raises(UsageError, match="has step 5 already, and step 4 is before it"):
        save_small(tmp_path, 4)
    file = tmp_path / "step-00000005" / "checkpoint.json"
    file.write_text(file.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(UsageError, match=r"has version 2, this osdp reads version 1; load it with the osdp that saved"):
        load_checkpoint(tmp_path, *small(0))


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model, optimizer = small(0)
    with pytest.raises(UsageError, match=r"must be JSON: .*Tensor"):
        save_checkpoint(tmp_path, model, optimizer, step=1, extra={"rng": torch.get_rng_state()})
    with pytest.raises(UsageError, match="keep 0"):
        save_checkpoint(tmp_path, model, optimizer, step=1, keep=0)
    factored = torch.optim.Adafactor(model.parameters())
    model(torch.ones(4)).sum().backward()
    factored.step()
    with pytest.raises(UsageError, match=r"row_var of weight has shape \[3, 1\]: of Adafactor only states of"):
        save_checkpoint(tmp_path, model, factored, step=1)
    with pytest.raises(UsageError, match="a parameter that the model lacks"):
        save_checkpoint(tmp_path, model, small(0)[1], step=1)
    with torch.device("meta"):
        unfilled = nn.Linear(4, 3)
    with pytest.raises(UsageError, match=r"weight is on the meta device; call osdp\.initialize"):
        save_checkpoint(tmp_path, unfilled, None, step=1)
    assert os.listdir(tmp_path) == []


def test_groups_that_were_several_are_not_made_one(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    several = torch.optim.SGD([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}])
    save_checkpoint(tmp_path, model, several, step=1)
    with pytest.raises(UsageError, match="the parameter group of weight was several in the checkpoint"):
        load_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.3))
    turned = torch.optim.SGD([{"params": [model.bias]}, {"params": [model.weight]}], lr=0.3)
    load_checkpoint(tmp_path, model, turned)
    assert [group["lr"] for group in turned.param_groups] == [0.2, 0.1]


def other_steps(folder: Path, plan: Plan) -> str:
    with pytest.raises(UsageError) as refused:
        save_checkpoint(folder, built(plan), None, step=dist.get_rank())
    return str(refused.value)


def test_ranks_that_save_different_steps_are_refused(tmp_path: Path) -> None:
    refused = run_ranks(2, other_steps, tmp_path, ON_2)
    assert refused == ["the ranks save steps [0, 1]; give all the same step"] * 2 and os.listdir(tmp_path) == []


# Kept and cleared


def test_the_last_are_kept_and_leftovers_removed(tmp_path: Path) -> None:
    for step in range(1, 5):
        save_small(tmp_path, step, keep=3)
    assert sorted(os.listdir(tmp_path)) == ["step-00000002", "step-00000003", "step-00000004"]
    for name in ("step-00000004.partial-0a", "step-00000001.removed-0b", "step-00000003.replaced-0c"):
        shutil.copytree(tmp_path / "step-00000002", tmp_path / name)
    (tmp_path / "notes.txt").write_text("of the user")
    assert loaded_small(tmp_path) == 4
    save_small(tmp_path, 5)
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "step-00000004", "step-00000005"]
    (tmp_path / "step-00000005").rename(tmp_path / "step-00000005.replaced-0d")  # killed between two renames
    assert loaded_small(tmp_path) == 5
    save_small(tmp_path, 6)
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "step-00000005", "step-00000006"]


# Full disks


@contextlib.contextmanager
def tiny_disk(folder: Path) -> Iterator[None]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=160k", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, way: str) -> list[tuple[str, list[str]]]:
    """On a rank: a save that fits, and two that the disk, or a limit on rank 1's files, cuts short."""
    model = built(ON_2)
    optimizer = adamw(model)
    save_checkpoint(folder, model, optimizer, step=1)
    train(model, optimizer, range(1))  # states triple it
    limit, found = resource.getrlimit(resource.RLIMIT_FSIZE), []
    if way == "limit" and dist.get_rank() == 1:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, ((folder / "step-00000001" / "__1_0.distcp").stat().st_size, limit[1])
        )
    for asynchronous in (False, True):
        with pytest.raises(OsdpError) as refused:
            saving = save_checkpoint(folder, model, optimizer, step=2, asynchronous=asynchronous)
            assert asynchronous and saving is not None
            train(model, optimizer, range(1, 2))
            saving.wait()
        dist.barrier()
        found.append((str(refused.value), sorted(os.listdir(folder))))
        dist.barrier()
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    save_checkpoint(folder, model, None, step=3)  # what fits is saved again
    return found


@pytest.mark.parametrize("way", ["disk", "limit"])
def test_a_full_disk_is_the_same_error_on_all_ranks_and_the_last_checkpoint_stays(way: str, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with tiny_disk(folder) if way == "disk" else contextlib.nullcontext():
        results = run_ranks(2, fill, folder, way)
        reason = os.strerror(errno.ENOSPC if way == "disk" else errno.EFBIG)
        assert results[0] == results[1]
        for message, names in results[0]:
            assert names == ["step-00000001"]
            assert re.fullmatch(
                rf"rank [01] cannot save step 2 to {folder}: {reason}; free space, or save to another folder"
                r" \(step 1 stays as it was\)",
                message,
            )
        model = built(None, seed=2)
        for step in (1, 3):
            assert load_checkpoint(folder, model, step=step) is not None
