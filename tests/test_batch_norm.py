"""Claims about batch norms under a plan:

- `sync_batch_norm` trains as one process on the whole batch: losses, gradients, weights and running statistics are
  equal, in blocks that are recomputed and others, with batches of another size on every rank;
- a plain batch norm in a recomputed block moves its running statistics once a step;
- a converted model has the names, parameters and buffers that it had, and computes the same alone.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from planned import plan_by_hand, whole_gradients, whole_parameters
from ranks import run_ranks
from torch import Tensor, nn
from trained import Trained, same, sgd

import osdp
from osdp.engine import ASYNC_GLOO, STOCK, Engine
from osdp.model.capture import capture
from osdp.planfile import Plan
from osdp.recompute import Recompute
from osdp.runtime.batch_norm import SyncBatchNorm, sync_batch_norm
from osdp.sharding import FREE, KEEP, REPLICATE

WIDTH, BATCH = 8, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.norm = nn.Conv1d(WIDTH, WIDTH, 1, bias=False), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.out(x)))


class Net(nn.Module):
    """Its loss is a sum, so that ranks may have batches of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.BatchNorm1d(WIDTH, momentum=None), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(2)).square().sum()


def net(*, synced: bool) -> nn.Module:
    torch.manual_seed(0)
    return sync_batch_norm(Net()) if synced else Net()


def own_part(step: int) -> Tensor:
    """A third of the samples on rank 0, the others on rank 1."""
    whole = torch.randn(BATCH, WIDTH, 5, generator=torch.Generator().manual_seed(step))
    if not dist.is_initialized():
        return whole
    return whole[: BATCH // 3] if dist.get_rank() == 0 else whole[BATCH // 3 :]


def train(model: nn.Module) -> tuple[Trained, dict[str, Tensor]]:
    optimizer, losses = sgd(model.parameters()), []
    for step in range(3):
        optimizer.zero_grad()
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        loss = ranks * model(own_part(step)) / BATCH  # a plan takes the mean over ranks
        loss.backward()
        total = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(total)
        losses.append(total.item() / ranks)
        gradients = whole_gradients(model)
        optimizer.step()
    return Trained(losses, gradients, whole_parameters(model)), {name: b.clone() for name, b in model.named_buffers()}


def made(*, synced: bool) -> Plan:
    graph = capture(net(synced=synced), (torch.zeros(2, WIDTH, 5),))
    how = (True, False) if synced else (Recompute.FULL, Recompute.SELECTIVE)
    return plan_by_hand(graph, "2", modes=(FREE, KEEP, REPLICATE), recompute=how)


def on_a_rank(plan: Plan, engine: Engine) -> tuple[Trained, dict[str, Tensor]]:
    return train(osdp.parallelize(net(synced=True), plan, engine=engine))


@pytest.mark.parametrize("engine", [ASYNC_GLOO, STOCK])
def test_synchronized_batch_norms_train_as_one_process_on_the_whole_batch(engine: Engine) -> None:
    truth, statistics = train(net(synced=False))
    for found, buffers in run_ranks(2, on_a_rank, made(synced=True), engine):
        same(found, truth)
        torch.testing.assert_close(buffers, statistics, rtol=1e-5, atol=1e-6)


def moved(plan: Plan) -> dict[str, tuple[Tensor, Tensor]]:
    """Running statistics after one step of a plan, and of the same model alone on this rank's samples."""
    model, alone = osdp.parallelize(net(synced=False), plan), net(synced=False)
    for each in (model, alone):
        each(own_part(0)).backward()
    own = dict(model.named_buffers())
    return {name: (own[name], buffer) for name, buffer in alone.named_buffers()}


def test_running_statistics_of_a_recomputed_block_move_once() -> None:
    for found in run_ranks(2, moved, made(synced=False)):
        assert "blocks.0.norm.num_batches_tracked" in found
        for own, alone in found.values():
            torch.testing.assert_close(own, alone)


def test_a_converted_model_is_the_same_alone() -> None:
    plain = net(synced=False)
    converted = sync_batch_norm(copy.deepcopy(plain))
    assert sum(isinstance(module, SyncBatchNorm) for module in converted.modules()) == 4
    for _ in range(2):
        torch.testing.assert_close(converted(own_part(0)), plain(own_part(0)))
    torch.testing.assert_close(converted.state_dict(), plain.state_dict())
    torch.testing.assert_close(converted.eval()(own_part(1)), plain.eval()(own_part(1)))
    assert sync_batch_norm(converted) is converted
    assert isinstance(sync_batch_norm(nn.BatchNorm2d(3)), SyncBatchNorm)
