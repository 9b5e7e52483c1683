"""A checkpoint holds the plain model: any plan, split and number of ranks goes on from it.

- Training that is resumed on 4, 2, 3 ranks and 1 process has the loss curve of one that was never interrupted, to 1e-5.
- Saved and loaded under other plans, and by the plain model, every bit of model and optimizer is the same.
- Buffers that differ by rank are saved as rank 0 has them.
- Asynchronous saves hold the moment they were asked for.
- What cannot be saved, or is of another model, is refused before anything is written or loaded.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import (
    ON_2,
    ON_3,
    ON_4,
    SEQ_LEN,
    adamw,
    built,
    everything,
    plan_of,
    resume,
    same,
    save_small,
    small,
    train,
)
from planned import plan_of_units
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

import osdp
from osdp.errors import UsageError
from osdp.planfile import Plan
from osdp.runtime.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from osdp.sharding import FREE

# Any plan goes on


class Normed(nn.Module):
    """Batch norms, whose statistics are those of the rank's own data."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def save_normed(folder: Path, plan: Plan, asynchronous: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = osdp.parallelize(Normed(), plan)
    torch.manual_seed(dist.get_rank())
    model(torch.randn(16, 8)).backward()
    saving = save_checkpoint(folder, model, None, step=1, asynchronous=asynchronous)
    if saving is not None:
        saving.wait()
    own = {name: buffer.clone() for name, buffer in model.named_buffers()}
    load_checkpoint(folder, model)
    assert all(torch.equal(buffer, own[name]) for name, buffer in model.named_buffers()) == (dist.get_rank() == 0)
    return own


@pytest.mark.parametrize("asynchronous", [False, True])
def test_buffers_that_differ_by_rank_are_saved_as_rank_0_has_them(asynchronous: bool, tmp_path: Path) -> None:
    plan = plan_of_units(Normed(), "2", {(f"layers.{index}",): FREE for index in range(4)})
    first, second = run_ranks(2, save_normed, tmp_path, plan, asynchronous)
    plain = Normed()
    load_checkpoint(tmp_path, plain)
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, first[name]), name
        assert torch.equal(first[name], second[name]) == name.endswith("num_batches_tracked"), name


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


# Refused


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
    flat = torch.optim.SGD(model.parameters(), lr=0.1)
    flat.state[model.weight]["rows"] = torch.zeros(3)
    with pytest.raises(UsageError, match=r"rows of weight has shape \[3\]: of SGD only states with the parameter's"):
        save_checkpoint(tmp_path, model, flat, step=1)
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
