"""Claim: split operators train, save and load on real ranks as whole ones do in one process."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import RankFailed, run_ranks
from splitting import conv1d, same_state
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from osdp.profiling.trial import peak_above_start
from osdp.runtime.split import JoinedTensor, join, parts_of, split_operator, split_operators


class Net(nn.Module):
    """All kinds, in sizes that neither slices nor ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7, padding_idx=2)
        self.up = nn.Linear(7, 10)
        self.mix = conv1d(10, 9)
        self.head = nn.Linear(9, 13, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.mix(self.up(self.embed(ids)).relu()))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


IDS = torch.randint(0, 11, (6, 5), generator=torch.Generator().manual_seed(1))
IN_ONE_PROCESS = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as it is meant to be here
SPLITS = {"embed": 3, "up": 4, "mix": 2, "head": 5}
OTHER_SPLITS = {"embed": 2, "up": 3, "head": 2}


def sharded_net(seed: int, splits: dict[str, int], *, keep: bool = False, device: str = "cpu") -> Net:
    """Of every operator's slices the first are sharded and the last is replicated; the rest of the net is sharded."""
    world = dist.get_world_size()
    meshes = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (world, 1), mesh_dim_names=("copies", "alone"))
    with torch.device(device):
        model = net(seed)
    for pieces in split_operators(model, splits).values():
        for piece in pieces:
            fully_shard(piece, mesh=meshes[piece is pieces[-1]], reshard_after_forward=not keep)
    fully_shard(model, mesh=meshes[0])
    return model


def full(model: nn.Module) -> dict[str, Tensor]:
    return {
        key: value.full_tensor() if isinstance(value, (DTensor, JoinedTensor)) else value
        for key, value in model.state_dict().items()
    }


def trained_on_ranks(steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = sharded_net(0, SPLITS)
    before = full(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(IDS.chunk(dist.get_world_size())[dist.get_rank()]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return before, full(model)


@pytest.mark.parametrize("world_size", [2, 3])
def test_training_on_ranks_equals_training_whole_in_one_process(world_size: int) -> None:
    model = net()
    start = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(IDS).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for before, after in run_ranks(world_size, trained_on_ranks, 3):
        assert same_state(before, start)
        torch.testing.assert_close(after, dict(model.state_dict()), rtol=1e-5, atol=1e-6)
        assert not torch.equal(after["up.weight"], start["up.weight"])


def local_state() -> list[Any]:
    """Ranks take turns, so that any collective would wait for ever; in between, slices are gathered and kept."""
    model = sharded_net(0, SPLITS, keep=True)
    answers: list[Any] = []
    for turn in range(dist.get_world_size()):
        model(IDS)
        assert not isinstance(model.up.slices[0].weight, DTensor)
        if turn == dist.get_rank():
            if turn:  # loading meets gathered slices first, on all ranks but the first
                model.load_state_dict(net(turn).state_dict())
            state = model.state_dict()
            boxes = {key: value.__create_chunk_list__() for key, value in state.items()}
            answers += [boxes, {key: type(value).__name__ for key, value in state.items()}]
            model.load_state_dict(net(1).state_dict())
            model.load_state_dict(model.state_dict())
        for module in model.modules():  # all ranks alike, or the next forward would gather on some of them only
            if isinstance(module, FSDPModule):
                module.reshard()
        dist.barrier()
    return [*answers, full(model)]


def test_states_are_taken_and_loaded_without_collectives() -> None:
    answers = run_ranks(3, local_state)
    for boxes, types, after in answers:
        assert set(types.values()) == {"JoinedTensor"} and list(types) == list(net().state_dict())
        assert all(size > 0 for chunks in boxes.values() for chunk in chunks for size in chunk.sizes)
        assert same_state(after, net(1).state_dict())
    for key, tensor in net().state_dict().items():  # every element lies on one rank, or on all
        covered = torch.stack([boxes_cover(boxes[key], tensor.shape) for boxes, _, _ in answers]).sum(0)
        assert set(covered.unique().tolist()) == {1.0, 3.0}


def boxes_cover(boxes: list[Any], shape: torch.Size) -> Tensor:
    covered = torch.zeros(shape)
    for box in boxes:
        covered[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] += 1
    return covered


def save(folder: str, seed: int, splits: dict[str, int], asynchronous: bool) -> None:
    model = sharded_net(seed, splits)
    if not asynchronous:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
        return
    saving = dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder)
    for parameter in model.parameters():  # what is saved is a copy
        nn.init.zeros_(parameter)
    saving.result()  # type: ignore[union-attr]


def load(folder: str, splits: dict[str, int]) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """The state as it is after `dcp.load` alone, and after the model has taken it too."""
    model = sharded_net(5, splits)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    loaded = full(model)
    model.load_state_dict(state["model"])
    return loaded, full(model), model(IDS).detach()


@IN_ONE_PROCESS
@pytest.mark.parametrize(
    ("world_size", "other_world_size", "asynchronous"),
    [(2, 3, False), pytest.param(3, 2, False, marks=pytest.mark.slow), (3, 2, True)],
)
def test_a_checkpoint_of_slices_loads_whole_and_split_otherwise(
    tmp_path: Path, world_size: int, other_world_size: int, asynchronous: bool
) -> None:
    run_ranks(world_size, save, str(tmp_path), 4, SPLITS, asynchronous)
    plain = net()
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert same_state(plain.state_dict(), net(4).state_dict())
    for loaded, taken, out in run_ranks(other_world_size, load, str(tmp_path), OTHER_SPLITS):
        assert same_state(loaded, plain.state_dict()) and same_state(taken, plain.state_dict())
        torch.testing.assert_close(out, plain(IDS), rtol=1e-6, atol=1e-6)


@IN_ONE_PROCESS
def test_a_whole_checkpoint_loads_into_sharded_slices(tmp_path: Path) -> None:
    dcp.save({"model": net(4).state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    for loaded, _, _ in run_ranks(3, load, str(tmp_path), SPLITS):
        assert same_state(loaded, net(4).state_dict())


def load_from_meta(folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    warnings.filterwarnings("ignore", module=r"torch\.distributed\.")  # about a call of its own, for meta tensors
    model = sharded_net(0, SPLITS, device="meta")
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"], assign=True)
    other = sharded_net(0, SPLITS, device="meta")
    other.load_state_dict(net(4).state_dict(), assign=True)
    return full(model), full(other), model(IDS).detach() - other(IDS).detach()


@IN_ONE_PROCESS
def test_sharded_slices_on_meta_take_their_state_by_assignment(tmp_path: Path) -> None:
    dcp.save({"model": net(4).state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    for loaded, assigned, difference in run_ranks(3, load_from_meta, str(tmp_path)):
        assert same_state(loaded, net(4).state_dict()) and same_state(assigned, net(4).state_dict())
        assert not difference.any()


def optimizer_states() -> list[bool]:
    """Moments join like parameters do, and fall apart again."""
    model = sharded_net(0, SPLITS)
    optimizer = torch.optim.AdamW(model.parameters())
    model(IDS).pow(2).mean().backward()
    optimizer.step()
    equal = []
    for operator, dim in ((model.embed, 1), (model.up, 0), (model.mix, 1)):
        moments = [optimizer.state[piece.weight]["exp_avg"] for piece in operator.slices]
        joined = join(moments, dim)
        assert isinstance(joined, JoinedTensor)
        whole = joined.full_tensor()
        parts = parts_of(whole, moments, dim)
        equal += [torch.equal(a.to_local(), b.to_local()) for a, b in zip(parts, moments, strict=True)]
        equal += [all(a is b for a, b in zip(parts_of(joined, moments, dim), moments, strict=True))]
        twin = torch.zeros_like(joined)
        twin.copy_(joined)
        equal += [torch.equal(twin.clone().full_tensor(), whole), bool(whole.any())]
    return equal


def test_optimizer_states_join_and_come_apart() -> None:
    assert all(all(answer) for answer in run_ranks(2, optimizer_states))


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("this rank has no luck")
    dist.barrier()


def test_a_failing_rank_is_reported_and_ends_the_others() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of 2: Traceback[\s\S]*this rank has no luck"):
        run_ranks(2, fail_on_rank_one)


def peaks_of_slices(kind: str) -> list[int]:
    """What a step allocates beyond its start, gradients being there already, with one slice and with eight.

    Of five tries the lowest: gloo's threads let go of a buffer or two later whenever the machine is busy.
    """
    inputs = torch.zeros(1, 1, dtype=torch.long) if kind == "embedding" else torch.zeros(1, 256, requires_grad=True)
    peaks = []
    for slices in (1, 8):
        module = nn.Embedding(256, 512) if kind == "embedding" else nn.Linear(256, 512, bias=False)
        for piece in split_operator(module, slices) if slices > 1 else [module]:
            fully_shard(piece)
        if slices > 1:
            fully_shard(module)

        def step(module: nn.Module = module) -> None:
            module(inputs).sum().backward()

        step()
        peaks.append(min(peak_above_start(step) for _ in range(5)))
    return peaks


@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_slices_are_whole_one_at_a_time_in_backward_too(kind: str) -> None:
    for whole, sliced in run_ranks(2, peaks_of_slices, kind):
        assert whole >= 3 * 256 * 512 * 4  # gathered, its gradient, and what is sent of it
        assert sliced < 2 / 8 * whole
