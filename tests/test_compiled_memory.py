"""The memory of compiled blocks is traced: what torch.compile's code saves, on fake tensors.

- The blocks of three architectures, compiled for real, hold after forward what was traced, to the byte, in two dtypes.
- What was traced at two batch sizes holds at a third.
- Times are those of the eager trace: equal kernels.
- On an accelerator's kernels every block is traced so too, and none saves more than eager code.
- A graph that cannot be written runs operator by operator: the same is saved, and no less is alive meanwhile.
- A block that torch.compile does not take as a whole keeps the eager trace, and the plan says so; so does every block
  where torch has other private names.
- A dry run, which compiles nothing, is compared with the prediction for eager code.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from planned import plan_by_hand
from selection import one_in
from small_models import captured, source
from torch import Tensor, nn

from osdp._torch import partition
from osdp.model import compile_runs
from osdp.model.capture import capture
from osdp.model.graph import ModelGraph, Stage
from osdp.model.inputs import map_tensors, tensors_in
from osdp.model.structure import own_blocks
from osdp.sharding import FREE
from osdp.verify import verify

BATCH = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def compiled(name: str, compute_dtype: str, on: str = "CPU") -> ModelGraph:
    return captured(name, compute_dtype, on, compiled=True)


def held_by(stage: Stage, batch: int) -> int:
    """What is alive as a block is left in forward, beside what it was given."""
    level = 0
    for segment in stage.plain.forward:
        if segment.mark.kind == "leave" and segment.mark.name == stage.name:
            return level
        level = segment.end.at(batch)
    raise AssertionError(f"{stage.name} is never left")


def storages(tensors: list[Tensor]) -> dict[int, int]:
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}


def really_held(model: nn.Module, block: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> int:
    """What autograd and the caller hold once a block has run, beside parameters and inputs."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run(*args, **kwargs)
    held = storages([*saved, *tensors_in((output,))])
    for there in (*storages(list(model.parameters())), *storages(tensors_in((args, kwargs)))):
        held.pop(there, None)
    return sum(held.values())


def given_to(model: nn.Module, block: nn.Module, inputs: Any) -> Any:
    """What a model gives its block: the arguments of a call."""
    found: list[Any] = []
    handle = block.register_forward_pre_hook(lambda _, args, kwargs: found.append((args, kwargs)), with_kwargs=True)
    args, kwargs = inputs
    model(*args, **kwargs)
    handle.remove()
    return map_tensors(lambda t: t.detach().clone().requires_grad_(t.requires_grad), found[0])


@pytest.mark.parametrize(("name", "dtype"), one_in(3, [("llama", "bf16"), ("gpt", "fp32"), ("bert", "fp32")]))
def test_a_compiled_block_holds_what_was_traced(name: str, dtype: str) -> None:
    graph = compiled(name, dtype)
    assert graph.assumptions == captured(name, dtype).assumptions  # nothing fell back
    model = source(name).build().to(DTYPES[dtype])
    if name == "llama":
        model.config.use_cache = False
    which = own_blocks(model)[1]
    block = model.get_submodule(which)

    def real(like: Tensor) -> Tensor:
        return torch.zeros(like.shape, dtype=DTYPES[dtype] if like.is_floating_point() else like.dtype)

    args, kwargs = given_to(model, block, map_tensors(real, source(name).inputs(BATCH)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its imports
        truth = really_held(model, block, torch.compile(block.forward), args, kwargs)
    stage = next(stage for stage in graph.stages if stage.name == which)
    eager = next(stage for stage in captured(name, dtype).stages if stage.name == which)
    assert held_by(stage, BATCH) == truth
    assert held_by(eager, BATCH) == really_held(model, block, block.forward, args, kwargs)
    assert stage.plain.signature == eager.plain.signature  # its time is that of the same kernels


def test_what_was_traced_at_two_batch_sizes_holds_at_a_third(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = compiled("gpt", "fp32")
    monkeypatch.setattr(compile_runs, "COMPILED_BATCHES", (5, 6))
    there = compiled("gpt", "fp32")
    for stage, other in zip(graph.blocks, there.blocks, strict=True):
        for trace, own in ((stage.plain, other.plain), (stage.recomputed, other.recomputed)):
            assert trace is not None and own is not None
            assert trace.forward_delta == own.forward_delta and trace.backward_delta == own.backward_delta


def test_blocks_of_an_accelerator_are_traced_with_its_attention() -> None:
    graph, eager = compiled("llama", "bf16", "A100-80GB"), captured("llama", "bf16", "A100-80GB")
    assert graph.assumptions == eager.assumptions
    for stage, other in zip(graph.blocks, eager.blocks, strict=True):
        assert stage.plain.forward_delta.per_sample < other.plain.forward_delta.per_sample
        assert stage.recomputed is not None and other.recomputed is not None
        assert stage.recomputed.forward_delta == other.recomputed.forward_delta  # a block's input


class Asks(nn.Module):
    """A block that looks at its values: torch.compile breaks its graph there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if bool(torch.isinf(x).any()):
            x = x.clamp(-1, 1)
        return x + self.second(x)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x))


class Mixed(nn.Module):
    def __init__(self, *kinds: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_block_that_is_not_compiled_as_a_whole_has_the_memory_of_eager_code() -> None:
    model, example = Mixed(Asks, Plain, Asks), (torch.ones(2, 8),)
    graph, eager = (capture(copy.deepcopy(model), example, compute_dtype="fp32", compiled=c) for c in (True, False))
    (note,) = set(graph.assumptions) - set(eager.assumptions)
    assert note.startswith("Asks blocks have the memory of eager code: torch.compile does not take one as a whole (")
    for stage, other in zip(graph.blocks, eager.blocks, strict=True):
        assert stage.plain.signature == other.plain.signature
        assert stage.plain.forward_delta.at(4) <= other.plain.forward_delta.at(4)


class Curved(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(nn.functional.gelu(self.first(x), approximate="tanh"))


def test_a_graph_that_is_not_written_runs_by_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    def peak(stage: Stage) -> int:
        return max(segment.peak_at(BATCH) for segment in stage.plain.forward)

    def taken() -> ModelGraph:
        return capture(Mixed(Curved, Curved), (torch.ones(2, 8),), compute_dtype="fp32", compiled=True)

    written = taken()

    def refused(self: object, lowering: object, code: str) -> None:
        raise RuntimeError("cannot be written")

    monkeypatch.setattr(partition._Writer, "_loaded", refused)
    graph = taken()
    assert graph.assumptions == written.assumptions == ()
    for stage, other in zip(graph.blocks, written.blocks, strict=True):
        assert stage.plain.forward_delta == other.plain.forward_delta
        assert peak(stage) >= peak(other)
    assert peak(graph.blocks[0]) > peak(written.blocks[0])


def test_with_another_torch_plans_have_the_memory_of_eager_code(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its imports
        assert partition.missing_names(partition.NEEDED) == []
    monkeypatch.setattr(partition, "NEEDED", {"torch._inductor.graph.GraphLowering": ("gone",)})
    model, example = Mixed(Plain, Plain, Plain), (torch.ones(2, 8),)
    graph, eager = (capture(copy.deepcopy(model), example, compute_dtype="fp32", compiled=c) for c in (True, False))
    (note,) = set(graph.assumptions) - set(eager.assumptions)
    assert "GraphLowering.gone" in note
    assert [stage.plain.forward_delta for stage in graph.stages] == [s.plain.forward_delta for s in eager.stages]


def test_a_dry_run_is_compared_with_the_prediction_for_eager_code() -> None:
    model, eager = source("gpt"), captured("gpt", "fp32")
    plan = replace(plan_by_hand(eager, "2", modes=(FREE,)), compiled=True)
    plan = replace(plan, predicted=replace(plan.predicted, peak_bytes=1))  # of compiled blocks: not what runs here
    found = verify(plan, eager, build=model.build_on_meta, inputs=model.inputs, loss=model.loss)
    assert found.ok and found.predicted_peak_bytes > 1
