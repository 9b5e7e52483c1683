"""What runs a plan starts right, agrees, and says what went wrong.

- Weights from the meta device are the same under every plan, and no rank ever holds the whole model.
- The state has the plain model's names and shapes.
- What differs between ranks (the plan, the model, its weights) is refused on all of them, with a reason.
- Collectives run in threads, and what fails there, or in a backward, is raised where the model is trained.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import batch_of, graph_of, tiny
from odd_models import Model, TiedThrice, built, data, odd_graph
from planned import plan_by_hand, plan_of_units, whole_parameters
from ranks import RankFailed, run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from trained import COLLECTIVES, COURIER, EVERY_MODE, Trained, same, sgd, train

import osdp
from osdp._torch import TorchDispatchMode, tree_leaves
from osdp.cost.units import OPERATORS, WHOLE
from osdp.engine import ASYNC_GLOO
from osdp.errors import DoesNotFit, UsageError
from osdp.planfile import Plan
from osdp.runtime.async_comm import Groups
from osdp.runtime.collective_recorder import recording
from osdp.runtime.collectives import average
from osdp.runtime.meshes import meshes_of
from osdp.sharding import FREE, KEEP, REPLICATE


def from_meta(name: str, plans: Sequence[Plan]) -> list[dict[str, Tensor]]:
    torch.use_deterministic_algorithms(True)  # fills what is not initialised with NaN
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
    found = []
    for plan in plans:
        model = osdp.parallelize(tiny(name).build_on_meta(), plan)
        osdp.initialize(model, seed=3)
        args, kwargs = batch_of(name, 2, seed=0)
        tiny(name).loss(model(*args, **kwargs)).backward()
        found.append({**whole_parameters(model), **dict(model.named_buffers())})
    return found


@pytest.mark.parametrize(("name", "world"), [("gpt", "2x2"), ("llama", "2"), ("t5", "2"), ("vit", "2"), ("bert", "3")])
def test_weights_from_the_meta_device_are_the_same_under_every_plan(name: str, world: str) -> None:
    plans = [
        plan_by_hand(graph_of(name), world, modes=EVERY_MODE, granularity=WHOLE),
        plan_by_hand(graph_of(name), world, modes=(REPLICATE, FREE), granularity=OPERATORS, splits=((3, 1), (2, 2))),
    ]
    alone = osdp.initialize(tiny(name).build_on_meta(), seed=3)
    truth = {**dict(alone.named_parameters()), **dict(alone.named_buffers())}
    other = dict(osdp.initialize(tiny(name).build_on_meta(), seed=4).named_parameters())
    assert not any(t.isnan().any() for t in truth.values())
    assert any(not torch.equal(tensor, truth[key]) for key, tensor in other.items())
    for runs in run_ranks(plans[0].cluster.world_size, from_meta, name, plans):
        for found in runs:
            assert found.keys() == truth.keys()
            unequal = [key for key, tensor in truth.items() if not torch.equal(found[key], tensor)]
            assert not unequal, unequal


class Deep(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(24))


class LiveBytes(TorchDispatchMode):
    """The most bytes of memory alive at once, of what is made within it."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._alive = 0, dict[Any, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if isinstance(local, Tensor) and not local.is_meta:
                self._alive[StorageWeakRef(local.untyped_storage())] = local.untyped_storage().nbytes()
        self._alive = {storage: size for storage, size in self._alive.items() if not storage.expired()}
        self.peak = max(self.peak, sum(self._alive.values()))
        return out


def deep_plan(world: str) -> Plan:
    with torch.device("meta"):
        names = ("tokens", *(f"blocks.{index}" for index in range(24)), "head")
        return plan_of_units(Deep(), world, {(name,): FREE for name in names})


def live_bytes(plan: Plan) -> int:
    with torch.device("meta"):
        model = Deep()
    osdp.parallelize(model, plan)
    with LiveBytes() as live:
        osdp.initialize(model)
    return live.peak


def test_no_rank_ever_holds_the_whole_model() -> None:
    block = 64 * 64 * 4
    for peak in run_ranks(4, live_bytes, deep_plan("4")):
        assert 24 * block / 4 < peak < 24 * block / 4 + 4 * block


def after_a_failure(plan: Plan) -> Trained | str:
    """A backward fails halfway on all ranks, as it does when memory runs out; then training goes on."""
    model, failing = osdp.parallelize(built(Model), plan), [True]
    optimizer = sgd(model.parameters())  # before the failure: afterwards FSDP2's modules show gathered parameters

    def fail(*_: Any) -> None:
        if failing[0]:
            raise MemoryError("out of memory")

    model.blocks[0].up.register_full_backward_hook(fail)
    with pytest.raises(MemoryError):
        model(*data(2, seed=0)).backward()
    failing[0] = False
    try:
        return train(model, lambda _: optimizer)
    except RuntimeError as error:
        return str(error)


def test_after_a_failed_backward_training_is_right_or_refused() -> None:
    plan = plan_by_hand(odd_graph(Model), "2", modes=(FREE, KEEP, REPLICATE, FREE))
    for run in run_ranks(2, after_a_failure, plan, timeout_seconds=30):
        if isinstance(run, Trained):
            same(run, train(built(Model)))
        else:
            assert run


def state_of(plan: Plan) -> dict[str, torch.Size]:
    model = osdp.parallelize(built(TiedThrice), plan)
    state = model.state_dict()
    before = {name: tensor.clone() for name, tensor in whole_parameters(model).items()}
    kept = {name: tensor.clone() for name, tensor in state.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert not any(tensor.any() for tensor in whole_parameters(model).values())
    model.load_state_dict(kept)
    assert all(torch.equal(tensor, before[name]) for name, tensor in whole_parameters(model).items())
    model(*data(2, seed=0)).backward()  # what was loaded is what is computed with
    return {name: tensor.shape for name, tensor in state.items()}


def test_the_state_has_the_plain_models_names_and_shapes_and_loads_again() -> None:
    plan = plan_by_hand(odd_graph(TiedThrice), "2x2", modes=EVERY_MODE, granularity=OPERATORS, splits=((3, 2), (2, 2)))
    plain = {name: tensor.shape for name, tensor in built(TiedThrice).state_dict().items()}
    assert run_ranks(4, state_of, plan) == [plain] * 4


def refused(plan: Plan, change: Callable[[int, nn.Module, Plan], tuple[nn.Module, Plan]]) -> str:
    model, own = change(dist.get_rank(), built(Model), plan)
    with pytest.raises(UsageError) as refusal:
        osdp.parallelize(model, own)
    return str(refusal.value)


def as_planned(rank: int, model: nn.Module, plan: Plan) -> tuple[nn.Module, Plan]:
    return model, plan


def other_plan(rank: int, model: nn.Module, plan: Plan) -> tuple[nn.Module, Plan]:
    first = replace(plan.units[0], mode=REPLICATE)
    return model, replace(plan, units=(first, *plan.units[1:])) if rank == 1 else plan


def wider(rank: int, model: nn.Module, plan: Plan) -> tuple[nn.Module, Plan]:
    model.blocks[1].up = nn.Linear(16, 48)
    return model, plan


def wider_on_rank_1(rank: int, model: nn.Module, plan: Plan) -> tuple[nn.Module, Plan]:
    return wider(rank, model, plan) if rank == 1 else (model, plan)


def in_bf16_on_rank_1(rank: int, model: nn.Module, plan: Plan) -> tuple[nn.Module, Plan]:
    return model.to(torch.bfloat16) if rank == 1 else model, plan


def for_more_ranks_on_rank_1(rank: int, model: nn.Module, plan: Plan) -> tuple[nn.Module, Plan]:
    return model, replace(plan, cluster=replace(plan.cluster, devices_per_node=3)) if rank == 1 else plan


def on_meta_on_rank_1(rank: int, model: nn.Module, plan: Plan) -> tuple[nn.Module, Plan]:
    return model.to("meta") if rank == 1 else model, plan


def without_a_block(rank: int, model: nn.Module, plan: Plan) -> tuple[nn.Module, Plan]:
    model.blocks = model.blocks[:1]
    return model, plan


def without_a_unit(rank: int, model: nn.Module, plan: Plan) -> tuple[nn.Module, Plan]:
    left = tuple(unit for unit in plan.units if unit.name != "blocks.1")
    known = replace(plan.model, parameters=sum(unit.parameters for unit in left))
    return model, replace(plan, units=left, model=known)


def other_weights(rank: int, model: nn.Module, plan: Plan) -> tuple[nn.Module, Plan]:
    with torch.no_grad():
        model.head.weight += rank
    return model, plan


@pytest.mark.parametrize(
    ("change", "world", "words"),
    [
        (as_planned, "3", ("for 3 ranks", "2 run")),
        (other_plan, "2", ("rank 1 has another plan",)),
        (wider, "2", ("blocks.1 has", "planned with")),
        (without_a_block, "2", ("'blocks.1'", "lacks")),
        (without_a_unit, "2", ("blocks.1.", "is in no unit of the plan")),
        (other_weights, "2", ("rank 1", "head.weight")),
        (wider_on_rank_1, "2", ("on rank 1 blocks.1 has", "planned with")),
        (in_bf16_on_rank_1, "2", ("on rank 1 tokens.weight is torch.bfloat16",)),
        (for_more_ranks_on_rank_1, "2", ("plan", "rank")),  # rank 1 sees the ranks, rank 0 the other plan
        (on_meta_on_rank_1, "2", ("rank 1", "on the meta device")),
    ],
)
def test_what_differs_is_refused_on_every_rank_and_named(
    change: Callable[..., Any], world: str, words: tuple[str, ...]
) -> None:
    plan = plan_by_hand(odd_graph(Model), world, modes=(FREE, KEEP, FREE, REPLICATE))
    for message in run_ranks(2, refused, plan, change, timeout_seconds=20):
        assert all(word in message for word in words), message


def planned(memory: str) -> str:
    tokens = torch.zeros(2, 6, dtype=torch.long)
    model = built(Model)
    if dist.get_rank() != 0:
        model.forward = None  # type: ignore[method-assign]  # rank 0 plans for all
    try:
        return osdp.plan(model, (tokens, tokens), "2xCPU", memory=memory, precision="fp32", batch=2).digest
    except DoesNotFit as error:
        return f"{error.peak_bytes > error.limit_bytes} {error}"


def test_all_ranks_get_rank_0s_plan_or_its_error() -> None:
    first, second = run_ranks(2, planned, "4GiB")
    assert first == second and len(first) == 64
    first, second = run_ranks(2, planned, "1KiB")
    assert first == second and first.startswith("True ")


def threads_of_collectives(plan: Plan) -> set[tuple[str, str]]:
    model, seen = osdp.parallelize(built(Model), plan), set()

    def watched(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            seen.add((name, threading.current_thread().name))
            return collective(*args, **kwargs)

        return run

    for name in COLLECTIVES:
        setattr(dist, name, watched(name, getattr(dist, name)))
    model(*data(2, seed=0)).backward()
    return seen


def test_collectives_run_in_the_courier() -> None:
    plan = plan_by_hand(odd_graph(Model), "2x2", modes=EVERY_MODE, granularity=OPERATORS)
    for seen in run_ranks(4, threads_of_collectives, plan):
        assert {thread for _, thread in seen} == {COURIER}
        assert {"isend", "irecv", "all_reduce"} <= {name for name, _ in seen}


SIZES = (1, 2, 5, 7, 1000, 1003)


def averages() -> list[Tensor]:
    """Means over all ranks by the ring, of sizes that divide over ranks and pieces and of others."""
    world, found = dist.new_group(), []
    for size in SIZES:
        mine = torch.arange(size, dtype=torch.float64) * (dist.get_rank() + 1)
        average(mine, torch.empty(-(-size // world.size()), dtype=torch.float64), world, world.size())
        found.append(mine)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_ring_averages_tensors_of_any_size(ranks: int) -> None:
    for found in run_ranks(ranks, averages):
        for size, mean in zip(SIZES, found, strict=True):
            assert torch.equal(mean, torch.arange(size, dtype=torch.float64) * (ranks + 1) / 2)


def recorded_at_once() -> tuple[list[int], int]:
    """The first of two collectives takes longer: bytes in the order of the record, and how many were under way."""
    comm_threads = meshes_of("cpu", 1, 2, engine=ASYNC_GLOO).comm_threads
    under_way, most = [0], [0]

    def job(size: int, seconds: float) -> Callable[[Groups], None]:
        def run(groups: Groups) -> None:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
            time.sleep(seconds)
            average(torch.ones(size), torch.empty(size), groups.world, 2)
            under_way[0] -= 1

        return run

    with recording(2) as record:
        for delivery in [
            comm_threads.send(job(4, 0.5)),
            comm_threads.send(job(2, 0.1)),
            comm_threads.send(job(6, 0.0)),
        ]:
            delivery.wait()
    return [issued.nbytes for issued in record.issued], most[0]


def test_two_collectives_are_under_way_and_recorded_in_the_order_in_which_they_were_given() -> None:
    assert run_ranks(2, recorded_at_once) == [([16, 8, 24], 2)] * 2


def disconnected(plan: Plan, folder: Path) -> None:
    """Rank 1 loses its connections after a step; rank 0 writes down what it then meets, and how soon."""
    model, told = osdp.parallelize(built(Model), plan), folder / "told"
    model(*data(2, seed=0)).backward()
    dist.barrier()  # the step is over on both
    if dist.get_rank() == 1:
        time.sleep(0.5)
        for file in Path("/proc/self/fd").iterdir():
            if file.is_socket():
                with socket.socket(fileno=os.dup(int(file.name))) as connection, contextlib.suppress(OSError):
                    connection.getpeername()  # one that only listens has no peer, and gloo ends the process with it
                    connection.shutdown(socket.SHUT_RDWR)
        until = time.monotonic() + 20
        while not told.exists() and time.monotonic() < until:
            time.sleep(0.05)
        return
    start = time.monotonic()
    try:
        for _ in range(100):
            model(*data(2, seed=0)).backward()
    except RuntimeError as error:
        (folder / "partial").write_text(f"{time.monotonic() - start:.1f} {error}")
        (folder / "partial").rename(told)


def test_a_lost_connection_is_raised_where_the_model_is_trained(tmp_path: Path) -> None:
    plan = plan_by_hand(odd_graph(Model), "2", modes=(FREE, KEEP, REPLICATE))
    with pytest.raises(RankFailed):  # the ranks' last barrier fails too
        run_ranks(2, disconnected, plan, tmp_path, timeout_seconds=40)
    seconds, _, message = (tmp_path / "told").read_text().partition(" ")
    assert float(seconds) < 15 and message
