"""Parameters whose first dimension would be padded much are sharded along another one, and train as before.

- The rule takes another dimension only where that saves something.
- On real ranks nothing of what is so sharded is padded, in every mode but that which is sharded anew after forward.
- Training, the clipped norm, weights from the meta device and gradients that nobody has equal a single process's.
- A checkpoint goes on under another number of ranks, where other dimensions are sharded, to the bit.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import everything
from checkpoints import same as same_bits
from odd_models import StackedIdle, built, odd_graph
from planned import plan_by_hand, whole_parameters
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from trained import EVERY_MODE, Trained, same, sgd, train

import osdp
from osdp.cost.sharding import shard_dim
from osdp.cost.units import OPERATORS, WHOLE
from osdp.engine import ASYNC_GLOO, ENGINES, Engine
from osdp.model.graph import ModelGraph
from osdp.planfile import Plan
from osdp.sharding import FREE, KEEP, KEEP_IN_NODE


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [
        ((8, 28672, 4096), 32, 1),  # the experts of Mixtral
        ((8, 28672, 4096), 8, 0),
        ((3, 16, 96), 6, 2),  # 16 does not divide by 6
        ((1, 197, 768), 8, 2),
        ((50257, 768), 8, 0),  # padded by 7 rows
        ((17, 1024), 2, 0),  # padded by 1/17
        ((7, 1024), 2, 1),  # by 1/7
        ((3, 1025), 2, 0),  # nothing divides
        ((3, 64), 2, 0),  # small
        ((4097,), 4096, 0),
        ((), 8, 0),
    ],
)
def test_another_dimension_is_sharded_where_that_saves_something(shape: tuple[int, ...], ranks: int, dim: int) -> None:
    assert shard_dim(shape, ranks) == dim


class Found(NamedTuple):
    """What a rank found: its training, the norm of the last gradients, and what it has of every parameter."""

    trained: Trained
    norm: float
    sharded: dict[str, tuple[int, int]]  # the dimension, and the bytes held
    initialized: dict[str, Tensor]


@cache
def graph() -> ModelGraph:
    return odd_graph(StackedIdle)


def by_operators(world: str) -> Plan:
    """With slices of a Linear, and of an embedding: cut along the dimension that is sharded."""
    modes = (FREE, KEEP, FREE, KEEP_IN_NODE)
    return plan_by_hand(graph(), world, modes=modes, granularity=OPERATORS, splits=((2, 2), (2, 1)))


def by_blocks(world: str) -> Plan:
    return plan_by_hand(graph(), world, modes=EVERY_MODE, granularity=WHOLE, recompute=(True, False))


def sharded_parameters(model: nn.Module) -> dict[str, tuple[int, int]]:
    found = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        placement = parameter.placements[-1]
        assert isinstance(placement, Shard)
        found[name] = placement.dim, parameter.to_local().untyped_storage().nbytes()
    return found


def normal(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return StackedIdle()


def train_and_save(folder: Path, plan: Plan, engine: Engine) -> Found:
    model = osdp.parallelize(built(StackedIdle), plan, engine=engine)
    optimizer = sgd(model.parameters())
    sharded = sharded_parameters(model)
    trained = train(model, lambda _: optimizer)
    osdp.save_checkpoint(folder, model, optimizer, step=3)
    norm = osdp.clip_grad_norm_(model.parameters(), 1e9).item()
    initialized = osdp.initialize(osdp.parallelize(on_meta(), plan, engine=engine), init=normal)
    return Found(trained, norm, sharded, whole_parameters(initialized))


def load_and_save(source: Path, target: Path, plan: Plan) -> None:
    model = osdp.parallelize(built(StackedIdle), plan)
    optimizer = sgd(model.parameters())
    osdp.load_checkpoint(source, model, optimizer)
    osdp.save_checkpoint(target, model, optimizer, step=3)


def loaded(folder: Path) -> dict[str, Any]:
    model = built(StackedIdle)
    optimizer = sgd(model.parameters())
    osdp.load_checkpoint(folder, model, optimizer)
    return everything(model, optimizer)


def check(found: Found) -> None:
    """Against a single process."""
    alone = built(StackedIdle)
    same(found.trained, train(alone))
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1e9).item()
    assert found.norm == pytest.approx(norm, rel=1e-5)
    initialized = osdp.initialize(on_meta(), init=normal)
    assert same_bits(found.initialized, {name: p.detach() for name, p in initialized.named_parameters()})


def test_by_operators_and_slices_all_is_as_in_a_single_process(tmp_path: Path) -> None:
    ranks = run_ranks(4, train_and_save, tmp_path / "4", by_operators("2x2"), ASYNC_GLOO)
    for found in ranks:
        check(found)
        assert found.sharded["blocks.0.experts.up"] == (1, 3 * 16 * 96)  # of four bytes each, over four ranks
        assert found.sharded["narrow.slices.1.weight"] == (1, 9 * 1536)
        assert found.sharded["places.slices.0.weight"] == (1, 6 * 768)
        assert found.sharded["places.slices.1.weight"] == (0, 6 * 768 * 4)  # a replica
    run_ranks(3, load_and_save, tmp_path / "4", tmp_path / "3", by_operators("3"))  # where they are along the first
    saved = loaded(tmp_path / "4")
    assert same_bits(saved, loaded(tmp_path / "3"))
    assert all(torch.equal(saved[name], weight) for name, weight in ranks[0].trained.weights.items())


def by_both_engines(folder: Path, plan: Plan) -> list[Found]:
    return [train_and_save(folder / engine.name, plan, engine) for engine in ENGINES.values()]


def test_by_blocks_in_every_mode_all_is_as_in_a_single_process(tmp_path: Path) -> None:
    for rank in run_ranks(4, by_both_engines, tmp_path, by_blocks("2x2")):
        for found in rank:
            check(found)
            assert found.sharded["places.weight"] == (1, 6 * 1536)
            assert found.sharded["blocks.0.experts.up"] == (0, 16 * 96 * 4)  # sharded anew after forward: padded
            assert found.sharded["blocks.1.experts.up"] == (1, 3 * 16 * 96 * 2)  # over the two ranks of a node
