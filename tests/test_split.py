"""A split operator computes what the whole one does, and to checkpoints it is the whole one.

- Outputs and gradients equal the unsplit operator's, for every kind, even and uneven.
- Its state has the old names, shapes and bits, in both directions, whole or sharded, at any world size.
- Sharded slices are gathered and reduced one at a time, whether or not their inputs require gradients.
- What cannot be split is refused with a reason, and so is computing with a split parameter.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from splitting import conv1d, same_state
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from osdp._torch import FakeTensor, FakeTensorMode
from osdp.errors import UsageError
from osdp.runtime.split import join, slice_sizes, split_operator, split_operators


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
