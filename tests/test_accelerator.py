"""What is asked of an accelerator is right, as far as that can be known without one.

- Device and backend follow from the model, the process group and torch.accelerator; so does the engine.
- Every call to a stream, an event or the allocator is made in osdp.accelerator, and in the right order.
- On a stand-in with streams, a step under a plan of every mode has no race: see [Note: Races] in standin.py.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from odd_models import Model, built, data, odd_graph
from planned import plan_by_hand
from ranks import run_ranks
from trained import EVERY_MODE, sgd

import osdp
from osdp._torch import FakeTensorMode, fake_store
from osdp.accelerator import DeviceCalls, backends_for, own_device, running_engine, training_device
from osdp.cost.units import OPERATORS
from osdp.engine import ASYNC_GLOO, STOCK, engine_for
from osdp.errors import UsageError
from osdp.planfile import Plan

TOUCHING = {"Stream", "Event", "current_stream", "wait_stream", "wait_event", "record_event", "elapsed_time"}
TOUCHING |= {"max_memory_allocated", "max_memory_reserved", "memory_reserved", "reset_peak_memory_stats"}
TOUCHING |= {"mem_get_info", "empty_cache", "set_device", "set_device_index"}
TOUCHING |= {"get_device_name", "get_device_properties"}


def test_streams_events_and_the_allocator_are_touched_in_one_module() -> None:
    root = Path(osdp.__file__).parent
    found = {
        (path.relative_to(root).as_posix(), node.attr)
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in TOUCHING
    }
    assert {path for path, name in found if name != "Event"} == {"accelerator.py"}
    assert {path for path, name in found if name == "Event"} == {
        "accelerator.py",
        *("runtime/async_comm.py", "training/failures.py"),  # threading's
    }


def test_the_engine_follows_from_what_runs() -> None:
    assert engine_for(is_cpu=True) == engine_for(is_cpu=True, backend="gloo") == ASYNC_GLOO
    assert engine_for(is_cpu=True, backend="mpi") == engine_for(is_cpu=False, backend="nccl") == STOCK


def started_anew(backend: str | None) -> tuple[str, str]:
    """The device and the engine of a process group that was started like this; gloo's is left behind."""
    dist.destroy_process_group()
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    model = osdp.parallelize(built(Model), plan_by_hand(odd_graph(Model), "1", modes=EVERY_MODE))
    model(*data(2, seed=0)).backward()
    device = training_device(model)
    return str(device), running_engine(device).name


@pytest.mark.parametrize("backend", [None, "gloo", "cpu:gloo"])
def test_a_process_group_of_cpus_is_asynchronous_however_it_was_started(backend: str | None) -> None:
    assert run_ranks(1, started_anew, backend) == [("cpu", "async-gloo")]


def on_a_stand_in(plan: Plan, deaf: bool) -> dict[str, Any]:
    """One process as rank 0 of a plan, on a device with streams, with fake tensors."""
    from standin import DEVICE, LookOut, makes_tensors, stand_in

    plan = replace(plan, cluster=replace(plan.cluster, engine_name=STOCK.name))
    dist.destroy_process_group()
    device, store = stand_in(), fake_store()
    dist.Backend.backend_capability["fake"].append(device.type)
    dist.init_process_group("fake", store=store, rank=0, world_size=plan.cluster.world_size)
    found = {"own": str(own_device()), "engine": running_engine(device).name, "device": str(training_device())}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.device("meta"):
        model = Model()
    with makes_tensors(mode):
        osdp.parallelize(model, plan)  # outside of the mode: device meshes hold real tensors
    with mode:
        model.to_empty(device=device)
        found["placed"] = {p.device.type for p in model.parameters()}
        optimizer = sgd(model.parameters())
        batch = [torch.zeros(t.shape, dtype=t.dtype, device=device) for t in data(2, seed=0)]
        DEVICE.is_deaf = deaf
        with LookOut():
            for _ in range(2):
                for _ in osdp.accumulate(model, range(plan.accumulation)):
                    model(*batch).backward()
                optimizer.step()
                optimizer.zero_grad()
    waits = {call for call in DEVICE.calls if call[0] == "wait"}
    return {**found, "races": DEVICE.races, "waits": len(waits), "streams": next(DEVICE.numbers)}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_on_a_device_with_streams_has_no_race(accumulation: int) -> None:
    """Without recompute: its early stop is an exception in a device's thread, of which torch's stand-ins die."""
    plan = plan_by_hand(
        odd_graph(Model),
        "2x2",
        modes=EVERY_MODE,
        granularity=OPERATORS,
        splits=((3, 2), (1, 1)),
        accumulation=accumulation,
        reduce_once=(True, False) if accumulation > 1 else (False,),
        all_reduce_once=(accumulation > 1,),
    )
    (found,) = run_ranks(1, on_a_stand_in, plan, False)
    assert found["own"] == found["device"] == "standin:0" and found["engine"] == "fsdp2"
    assert found["placed"] == {"standin"}
    assert found["races"] == []
    assert found["streams"] >= 5 and found["waits"] >= 5
    (deaf,) = run_ranks(1, on_a_stand_in, plan, True)
    assert deaf["races"]  # where nothing is waited for there are


def test_calls_of_a_device_are_made_in_order_and_do_nothing_on_a_cpu() -> None:
    from standin import DEVICE

    calls, began = DeviceCalls(torch.device("cuda", 0), DEVICE), len(DEVICE.calls)
    side, compute = calls.new_stream(), DEVICE.current_stream()
    with calls.beside(side):
        assert DEVICE.current_stream() is side
        first = calls.moment()
    calls.join(side)
    second = calls.moment()
    calls.wait_for(first)
    calls.wait_for(None)
    calls.synchronize()
    assert DEVICE.calls[began:] == [
        ("wait", side.number, compute.number),
        ("record", side.number, side.number),
        ("wait", compute.number, side.number),
        ("record", compute.number, compute.number),
        ("wait", compute.number, side.number),
        ("synchronize",),
    ]
    assert calls.seconds_between(first, second) == 2.5e-3
    calls.forget_peak()
    assert DEVICE.calls[-1] == ("reset_peak_memory_stats",)
    assert (calls.peak_bytes(), calls.peak_reserved_bytes()) == (3 << 20, 5 << 20)
    cpu, count = DeviceCalls(torch.device("cpu")), len(DEVICE.calls)
    cpu.synchronize()
    cpu.wait_for(first)
    assert cpu.new_stream() is None and cpu.name == "CPU"
    assert 0 <= cpu.seconds_between(cpu.moment(), cpu.moment()) < 1
    assert len(DEVICE.calls) == count


def test_a_process_group_that_does_not_serve_the_device_is_refused_with_the_remedy() -> None:
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match=r"on cuda but the process group serves cpu:gloo; .*'cpu:gloo,cuda:nccl'"):
            training_device(wanted="cuda")
    finally:
        dist.destroy_process_group()
    assert backends_for(torch.device("cpu")) == "gloo"
