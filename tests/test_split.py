"""A split operator computes what the whole one does, and to checkpoints it is the whole one.

- Outputs and gradients equal the unsplit operator's, for every kind, even and uneven.
- Its state has the old names, shapes and bits, in both directions, whole or sharded, at any world size.
- Sharded slices are gathered and reduced one at a time, whether or not their inputs require gradients.
- What cannot be split is refused with a reason, and so is computing with a split parameter.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import RankFailed, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from benchmarks.allocator import peak_above_start
from osdp._torch import FakeTensor, FakeTensorMode
from osdp.errors import UsageError
from osdp.runtime.split import JoinedTensor, join, parts_of, slice_sizes, split_operator, split_operators


def conv1d(inputs: int, outputs: int) -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return Conv1D(outputs, inputs)


class ScaledEmbedding(nn.Embedding):
    """As several Hugging Face models have it: more work around the same lookup."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3.0


class RawEmbedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.embedding(input, self.weight)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 14),
    "linear without bias": lambda: nn.Linear(6, 11, bias=False),
    "embedding": lambda: nn.Embedding(9, 14),
    "padded embedding": lambda: nn.Embedding(9, 11, padding_idx=2),
    "own embedding": lambda: ScaledEmbedding(9, 11),
    "conv1d": lambda: conv1d(6, 13),
}


def inputs_for(module: nn.Module) -> Tensor:
    if isinstance(module, nn.Embedding):
        return torch.tensor([[0, 2, 8], [2, 4, 4]])
    return torch.randn(2, 3, 6, requires_grad=True)


def whole_and_split(kind: str, slices: int) -> tuple[nn.Module, nn.Module, list[nn.Module]]:
    torch.manual_seed(0)
    whole = KINDS[kind]()
    for parameter in whole.parameters():
        nn.init.normal_(parameter)
    split = copy.deepcopy(whole)
    return whole, split, split_operator(split, slices)


def same_state(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Equal names in equal order, equal shapes, dtypes and bits."""
    if list(left) != list(right):
        return False
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(left.values(), right.values(), strict=True))


@pytest.mark.parametrize("slices", [2, 3, 4, 7])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recomputed", [False, True])
def test_outputs_and_gradients_equal_the_whole_operators(kind: str, slices: int, recomputed: bool) -> None:
    whole, split, pieces = whole_and_split(kind, slices)
    given = inputs_for(whole)
    results = []
    for module in (whole, split):
        own = given.detach().clone().requires_grad_(given.requires_grad)
        out = checkpoint(module, own, use_reentrant=False) if recomputed else module(own)
        (out * torch.arange(out.shape[-1])).pow(2).sum().mul(1e-3).backward()
        results.append((out, own.grad))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-6, atol=1e-6)
    if given.requires_grad:
        torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-5, atol=1e-5)
    for key, parameter in whole.named_parameters():
        dim = 1 if parameter.ndim > 1 and not isinstance(whole, nn.Linear) else 0
        gradients = [piece.get_parameter(key).grad for piece in pieces]
        assert [g.shape[dim] for g in gradients] == slice_sizes(parameter.shape[dim], slices)
        torch.testing.assert_close(join(gradients, dim), parameter.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_keeps_names_shapes_and_bits(kind: str) -> None:
    whole, split, _ = whole_and_split(kind, 3)
    state = split.state_dict()
    assert same_state(state, whole.state_dict())
    assert list(state._metadata) == [""]  # type: ignore[attr-defined]
    fresh, fresh_split = KINDS[kind](), KINDS[kind]()
    split_operator(fresh_split, 4)
    fresh.load_state_dict(state)
    fresh_split.load_state_dict(whole.state_dict())
    assert same_state(fresh.state_dict(), whole.state_dict())
    assert same_state(fresh_split.state_dict(), whole.state_dict())


def test_a_split_operator_is_the_same_operator_with_other_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Embedding(5, 6, padding_idx=1)).to(torch.bfloat16)
    model[0].weight.requires_grad_(False)
    found = split_operators(model, {"0": 4, "1": 2})
    assert isinstance(model[0], nn.Linear) and isinstance(model[1], nn.Embedding)
    assert [piece.out_features for piece in found["0"]] == [2, 2, 1, 1]
    assert [name for name, _ in model[1].named_parameters()] == ["slices.0.weight", "slices.1.weight"]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and all(
        p.is_contiguous() for p in model.parameters()
    )
    assert [p.requires_grad for p in found["0"][0].parameters()] == [False, True]
    weight = model[0].weight
    assert (weight.shape, weight.dtype, weight.requires_grad) == ((6, 4), torch.bfloat16, False)
    assert model[1].weight.requires_grad and not hasattr(model[1], "bias")


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
@pytest.mark.parametrize("kind", ["linear", "own embedding", "conv1d"])
def test_copies_and_pickles_are_split_too_and_stand_alone(kind: str, duplicate: Callable[[Any], Any]) -> None:
    whole, split, pieces = whole_and_split(kind, 3)
    twin = duplicate(split)
    assert type(twin) is type(split) and same_state(twin.state_dict(), whole.state_dict())
    with torch.no_grad():
        pieces[0].weight.zero_()
    given = inputs_for(whole)
    torch.testing.assert_close(twin(given), whole(given))


def test_meta_operators_split_and_take_their_state_by_assignment() -> None:
    whole = nn.Linear(4, 7)
    with torch.device("meta"):
        split = nn.Linear(4, 7)
    split_operator(split, 3)
    assert all(p.is_meta for p in split.parameters()) and split.state_dict()["weight"].shape == (7, 4)
    split.load_state_dict(whole.state_dict(), assign=True)
    assert same_state(split.state_dict(), whole.state_dict())
    assert not {p.untyped_storage().data_ptr() for p in split.parameters()} & {
        whole.weight.untyped_storage().data_ptr()
    }


def test_fake_operators_split_into_fake_slices() -> None:
    with FakeTensorMode():
        whole = nn.Linear(4, 7)
    split_operator(whole, 3)
    assert [(type(p), p.shape) for p in whole.slices[0].parameters()] == [(FakeTensor, (3, 4)), (FakeTensor, (3,))]


def test_initialising_a_split_operator_initialises_its_slices() -> None:
    _, split, pieces = whole_and_split("padded embedding", 3)
    before = split.state_dict()["weight"]
    split.reset_parameters()
    after = split.state_dict()["weight"]
    assert not (before == after).any(dim=0).any() and (after[2] == 0).all() and len(pieces) == 3


def test_t5_reads_the_dtype_of_a_split_weight() -> None:
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5DenseActDense

    whole = T5DenseActDense(T5Config(d_model=8, d_ff=16, dropout_rate=0.0))
    split = copy.deepcopy(whole)
    split_operators(split, {"wi": 2, "wo": 3})
    given = torch.randn(2, 8)
    torch.testing.assert_close(split(given), whole(given), rtol=1e-6, atol=1e-6)


def test_missing_and_misshapen_state_is_reported_under_the_old_names() -> None:
    _, split, _ = whole_and_split("linear", 3)
    before = split.state_dict()
    assert split.load_state_dict({"weight": before["weight"]}, strict=False).missing_keys == ["bias"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "bias"\. $'):
        split.load_state_dict({"weight": before["weight"]})
    with pytest.raises(
        RuntimeError, match=r"cannot load weight: its shape is \[3, 6\], and that of all slices \[14, 6\]"
    ):
        split.load_state_dict({**before, "weight": torch.zeros(3, 6)})
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"extra\""):
        split.load_state_dict({**before, "extra": torch.zeros(1)})
    assert same_state(split.state_dict(), before)


def test_what_cannot_be_split_is_refused() -> None:
    tied = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    tied["head"].weight = tied["embed"].weight
    with pytest.raises(UsageError, match=r"head cannot be split: embed\.weight and head\.weight are one parameter"):
        split_operators(tied, {"head": 2})
    assert type(tied["head"]) is nn.Linear
    with pytest.raises(UsageError, match="'tail' is to be split, but the model lacks it"):
        split_operators(tied, {"tail": 2})
    used = nn.Linear(4, 4)
    used(torch.ones(4)).sum().backward()
    replaced = nn.Linear(4, 4)
    replaced.forward = torch.relu  # type: ignore[method-assign,assignment]
    twice = nn.Linear(4, 4)
    split_operator(twice, 2)
    cases: list[tuple[nn.Module, int, str]] = [
        (nn.LayerNorm(4), 2, "only Linear, Embedding and Conv1D"),
        (nn.Linear(4, 4), 1, "2 to 4 slices"),
        (nn.Linear(4, 4), 5, "2 to 4 slices"),
        (nn.Embedding(4, 4, max_norm=1.0), 2, r"max_norm=1\.0 needs whole rows"),
        (nn.Embedding(4, 4, sparse=True), 2, "sparse=True"),
        (nn.Embedding(4, 4, scale_grad_by_freq=True), 2, "scale_grad_by_freq=True"),
        (nn.LazyLinear(4), 2, "split before parameters are sharded"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), 2, "wrapped or parametrized"),
        (replaced, 2, "wrapped or parametrized"),
        (used, 2, "its weight has a gradient"),
        (twice, 2, "has 2 slices already"),
    ]
    for module, slices, reason in cases:
        with pytest.raises(UsageError, match=reason):
            split_operator(module, slices, name="there")


def test_computing_with_a_split_parameter_is_refused() -> None:
    module = RawEmbedding(5, 4)
    split_operator(module, 2)
    with pytest.raises(UsageError, match=r"embedding.* needs the parameter of an operator that is split"):
        module(torch.tensor([1]))


# Ranks


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
    ("world_size", "other_world_size", "asynchronous"), [(2, 3, False), (3, 2, False), (3, 2, True)]
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
    """What a step allocates beyond its start, gradients being there already, with one slice and with eight."""
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
        peaks.append(peak_above_start(step))
    return peaks


@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_slices_are_whole_one_at_a_time_in_backward_too(kind: str) -> None:
    for whole, sliced in run_ranks(2, peaks_of_slices, kind):
        assert whole >= 3 * 256 * 512 * 4  # gathered, its gradient, and what is sent of it
        assert sliced < 2 / 8 * whole
