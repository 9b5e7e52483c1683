"""Claim: what capture writes down is what can be counted by hand, at every batch size and depth, and costs nothing."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import captured, gpt, source
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from osdp.errors import OsdpError
from osdp.model import capture as capturing
from osdp.model import runs
from osdp.model.capture import capture
from osdp.model.fake import fake_copy, sequences_not_packed
from osdp.model.graph import Affine, ModelGraph, Trace
from osdp.model.source import ModelSource, load_model
from osdp.model.stages import CaptureError
from osdp.model.structure import own_blocks
from osdp.model.trace import RawTrace, run_trace
from osdp.recompute import Recompute

S, IN, HIDDEN, OUT = 5, 8, 24, 3  # tokens in a sample, and widths
BF16 = 2


class Two(nn.Module):
    """Two products with an activation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(IN, HIDDEN)
        self.down = nn.Linear(HIDDEN, OUT, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def mean(output: Tensor) -> Tensor:
    return output.float().mean()


def example(batch: int = 2) -> tuple[Tensor, ...]:
    return (torch.empty(batch, S, IN),)


def captured_two(model: nn.Module | None = None, **changes: Any) -> ModelGraph:
    return capture(model or Two(), example(), **{"loss": mean, **changes})


# ---- operators, counted by hand


def test_flops_of_a_product() -> None:
    operators = captured_two().operators
    up, down = 2 * S * IN * HIDDEN, 2 * S * HIDDEN * OUT
    assert operators["up"].forward_flops == Affine(0, up)
    assert operators["down"].forward_flops == Affine(0, down)
    assert operators["down"].backward_flops == Affine(0, 2 * down)
    assert operators["up"].backward_flops == Affine(0, up)  # the model's input needs no gradient


def test_saved_and_output_bytes() -> None:
    operators = captured_two().operators
    assert operators["down"].saved_bytes == Affine(0, S * HIDDEN * BF16)  # the activation that it multiplies
    assert operators["up"].saved_bytes == Affine(0, S * IN * BF16)  # the cast of the model's input
    assert captured_two(compute_dtype="fp32").operators["up"].saved_bytes == Affine(0, 0)  # the input is no activation
    assert operators["up"].output_bytes == Affine(0, S * HIDDEN * BF16)
    assert operators["down"].output_bytes == Affine(0, S * OUT * BF16)


def test_bytes_follow_the_compute_dtype() -> None:
    single = captured_two(compute_dtype="fp32").operators
    half = captured_two(compute_dtype="bf16").operators
    assert single["down"].saved_bytes.per_sample == 2 * half["down"].saved_bytes.per_sample
    assert single["down"].output_bytes.per_sample == 2 * half["down"].output_bytes.per_sample
    assert single["down"].forward_flops == half["down"].forward_flops


def test_moved_bytes_of_a_product() -> None:
    """Forward reads input and weight and writes the output; backward makes both gradients from one and the other."""
    down = captured_two().operators["down"].moved_bytes
    weight, per_sample = HIDDEN * OUT * BF16, S * (HIDDEN + OUT) * BF16
    assert down.per_sample == 3 * per_sample
    assert down.constant == 3 * weight


def test_calls_are_counted() -> None:
    class Twice(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.gelu(self.up(x) + self.up(x)))

    operators = captured_two(Twice()).operators
    assert (operators["up"].calls, operators["down"].calls) == (2, 1)
    assert operators["up"].forward_flops == Affine(0, 2 * 2 * S * IN * HIDDEN)


# ---- parameters


def test_tied_parameters_count_once() -> None:
    model = source("gpt").build_on_meta()
    graph = captured("gpt")
    assert graph.parameters["tokens.weight"].aliases == ("head.weight",)
    assert "head.weight" not in graph.parameters
    assert graph.operators["head"].parameters == graph.operators["tokens"].parameters == ("tokens.weight",)
    assert graph.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    untied = captured("gpt-untied")
    assert untied.num_parameters == graph.num_parameters + 96 * 32
    assert untied.parameters["head.weight"].aliases == ()


def test_frozen_parameters_have_no_gradient() -> None:
    model = Two()
    model.down.weight.requires_grad_(False)
    graph = captured_two(model)
    assert not graph.parameters["down.weight"].trainable
    assert graph.parameters["up.weight"].trainable
    assert graph.operators["down"].backward_flops == Affine(0, 2 * S * HIDDEN * OUT)  # of its input alone
    marks = [s.mark for stage in graph.stages for s in stage.plain.backward if s.mark.kind == "gradient"]
    assert {mark.name for mark in marks} == {"up.weight", "up.bias"}


def test_buffers_and_inputs() -> None:
    model = Two()
    model.register_buffer("table", torch.empty(7, dtype=torch.float64))
    graph = captured_two(model)
    assert graph.buffer_bytes == 7 * 8
    assert graph.input_bytes == Affine(0, S * IN * 4)  # as the user passes them


# ---- what may be passed


def test_keyword_inputs_are_like_positional_ones() -> None:
    assert comparable(captured_two()) == comparable(capture(Two(), {"x": example()[0]}, loss=mean))


def test_inputs_may_be_a_function_of_the_batch() -> None:
    assert comparable(captured_two()) == comparable(capture(Two(), lambda b: (example(b), {}), loss=mean))


def test_inputs_without_a_batch_dimension_stay() -> None:
    class Scaled(Two):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x * scale)

    graph = capture(Scaled(), (*example(), torch.empty(IN)), loss=mean)
    assert graph.input_bytes == Affine(IN * 4, S * IN * 4)


def test_loss_is_part_of_the_trace() -> None:
    def squared(output: Tensor) -> Tensor:
        return (output.float() ** 2).mean()

    def kernels(graph: ModelGraph) -> int:
        return sum(len(s.flops) for stage in graph.stages for s in stage.plain.forward)

    assert kernels(captured_two(loss=squared)) == kernels(captured_two(loss=mean)) + 1


@pytest.mark.parametrize("loss", [None, lambda output: output])
def test_a_model_without_a_scalar_loss_is_refused(loss: Callable[[Any], Tensor] | None) -> None:
    with pytest.raises(OsdpError, match="loss" if loss is None else "cannot be traced"):
        capture(Two(), example(), loss=loss)


def test_a_branch_on_a_value_that_only_data_has_is_said_with_its_place() -> None:
    class Branching(Two):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.up(x).sum() > 0 else super().forward(-x)

    [said] = captured_two(Branching()).assumptions
    assert re.fullmatch(r"a value that only data has is taken as False \(Branching, test_capture.py:\d+\)", said)


def test_a_size_that_only_data_has_is_refused_with_its_place() -> None:
    class Cutting(Two):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:, : int(self.up(x).argmax().float().long() + x.long().sum())])

    with pytest.raises(OsdpError, match=r"Cutting, test_capture.py:\d+ reads a whole number .* pass example inputs"):
        capture(Cutting(), (torch.empty(2, S, IN, device="meta"),), loss=mean)


def test_a_failure_names_the_module_the_line_and_the_cause() -> None:
    class Wrong(Two):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[..., :-1])

    with pytest.raises(
        CaptureError, match=r"Wrong cannot be traced.*: Wrong, test_capture.py:\d+: RuntimeError: .* have the shapes"
    ):
        captured_two(Wrong())


def test_values_of_real_inputs_answer_what_the_model_asks() -> None:
    class Masked(Two):
        """Drops the places that the mask hides, where it hides any."""

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x[mask] if not mask.all() else x)

    def tokens(mask: Tensor) -> int:
        graph = capture(Masked(), (example()[0], mask), loss=mean)
        assert graph.assumptions == ()
        return graph.operators["up"].forward_flops.per_sample // (2 * IN * HIDDEN)

    full = torch.ones(2, S, dtype=torch.bool)
    assert tokens(full) == S
    hiding = full.clone()
    hiding[:, 3:] = False
    assert tokens(hiding) == 3
    [said] = capture(Masked(), (example()[0], full.to("meta")), loss=mean).assumptions
    assert said.startswith("masks hide nothing (Masked, test_capture.py:")


def test_where_no_line_fits_the_graph_is_of_one_batch() -> None:
    class Quadratic(Two):
        def forward(self, x: Tensor) -> Tensor:
            flat = self.up(x).flatten(1)
            return (flat @ flat.T).relu()

    class Steered(Two):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 2 if x.shape[0] == 3 else x)

    assert captured_two(Quadratic()).only_batch == 2
    assert "grows unevenly" in captured_two(Quadratic()).assumptions[0]
    graph = captured_two(Quadratic(), batch=7)
    assert (graph.only_batch, graph.operators["up"].forward_flops.at(7)) == (7, 7 * 2 * S * IN * HIDDEN)
    assert "different kernels at batch 2 and 3" in captured_two(Steered(), batch=4).assumptions[0]
    assert captured_two().only_batch is None


# ---- growth with the batch, recompute, depth


def raw_trace(model: ModelSource, batch: int, *, recompute: Recompute = Recompute.NONE) -> RawTrace:
    """One step at a batch size, traced at full depth and read by nobody."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    args, kwargs = model.inputs(batch)
    with sequences_not_packed(kwargs), mode:
        fake = fake_copy(model.build_on_meta(), torch.bfloat16)
        args = tuple(torch.empty(t.shape, dtype=t.dtype) for t in args)
        kwargs = {key: torch.empty(t.shape, dtype=t.dtype) for key, t in kwargs.items()}
        blocks = own_blocks(fake)
        again = dict.fromkeys(blocks, recompute) if recompute else {}
        watched = runs.watched(fake, blocks)
        return run_trace(fake, args, kwargs, loss=model.loss, watched=watched, recompute=again)


def joined(traces: list[Trace], batch: int) -> tuple[list[int], int]:
    return capturing._levels(traces, batch)


@pytest.mark.parametrize("name", ["gpt", "gpt-pyramid", "llama", "gpt2"])
def test_a_full_trace_at_another_batch_has_the_same_levels(name: str) -> None:
    graph, batch = captured(name), 7
    assert batch not in graph.batches
    raw = raw_trace(source(name), batch)
    peaks, end = joined([stage.plain for stage in graph.stages], batch)
    assert peaks == capturing._mark_peaks(raw)
    assert end == raw.end_live


@pytest.mark.parametrize("how", [Recompute.SELECTIVE, Recompute.FULL])
@pytest.mark.parametrize("name", ["gpt", "llama", "gpt2", "t5"])
def test_joined_recomputed_stages_equal_a_recomputed_run(name: str, how: Recompute) -> None:
    graph, batch = captured(name), 4
    raw = raw_trace(source(name), batch, recompute=how)
    peaks, end = joined([stage.trace(how) for stage in graph.stages], batch)
    assert peaks == capturing._mark_peaks(raw)
    assert end == raw.end_live


@pytest.mark.parametrize("name", ["gpt", "gpt-pyramid"])
def test_recompute_frees_what_a_checkpointed_run_frees(name: str) -> None:
    graph, batch = captured(name), 4
    gains = [graph.recompute_gain(stage) for stage in graph.blocks]
    attending = [stage for stage in graph.blocks if len(stage.operators) > 1]
    assert all(graph.recompute_gain(stage)[0].at(batch) > 0 for stage in attending)

    def at_turn(raw: RawTrace) -> int:
        return raw.mark_live[raw.backward_mark]

    freed = at_turn(raw_trace(source(name), batch)) - at_turn(raw_trace(source(name), batch, recompute=Recompute.FULL))
    assert sum(gain.at(batch) for gain, _ in gains) == freed
    for stage in attending:
        again = graph.recompute_gain(stage)[1].at(batch)
        forward = sum(int(s.flops.sum(axis=0) @ [1, batch]) for s in stage.plain.forward)
        assert 0 < again <= forward


def comparable(graph: ModelGraph) -> tuple[object, ...]:
    """All of a graph, arrays as lists."""

    def segments(trace: Trace | None) -> object:
        if trace is None:
            return None
        both = (*trace.forward, *trace.backward)
        return [(s.mark, s.peak, s.end, s.flops.tolist(), s.moved.tolist()) for s in both]

    stages = [
        (
            s.name,
            s.is_block,
            s.alike,
            s.operators,
            s.parts,
            segments(s.plain),
            segments(s.recomputed),
            segments(s.selective),
        )
        for s in graph.stages
    ]
    return stages, dict(graph.parameters), dict(graph.operators), graph.buffer_bytes, graph.input_bytes


def test_shortened_depth_equals_full_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt(layers=(9,))
    module = model.build_on_meta()
    assert capturing.shortened(module, own_blocks(module)) is not None
    traced: list[int] = []
    cut_stages = capturing.cut_stages

    def counted(trace: Any, blocks: Any, operators: Any) -> Any:
        traced.append(len(blocks))
        return cut_stages(trace, blocks, operators)

    monkeypatch.setattr(capturing, "cut_stages", counted)
    short = capture(module, model.inputs, loss=model.loss)
    assert set(traced) == {3}  # the graph really comes from the short model
    monkeypatch.setattr(capturing, "shortened", lambda *_: None)
    full = capture(module, model.inputs, loss=model.loss)
    assert set(traced) == {3, 9}
    assert len(full.blocks) == 9
    assert comparable(short) == comparable(full)


class Turns(nn.Module):
    """Every third of equal blocks does more: its attribute says so, or only the model's forward knows."""

    def __init__(self, *, told: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(14))
        for index, block in enumerate(self.blocks):
            block.number = index
            block.wide = index % 3 == 2 if told else None

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x) if index % 3 < 2 else block(torch.tanh(x)) * 2
        return x.mean()


@pytest.mark.parametrize("told", [True, False])
def test_blocks_that_take_turns_are_cut_by_whole_periods(told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 8)
    depths: list[int] = []
    run = capturing.Runner.plain

    def counted(runner: Any, batch: int) -> Any:
        depths.append(len(runner.blocks))
        return run(runner, batch)

    monkeypatch.setattr(capturing.Runner, "plain", counted)
    short = capture(Turns(told=told), (x,))
    assert max(depths) < 14
    monkeypatch.setattr(capturing, "shortened", lambda *_: None)
    full = capture(Turns(told=told), (x,))
    assert depths[-1] == 14
    assert comparable(short) == comparable(full)


# ---- the model is neither changed nor run


def test_a_real_model_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    model = source("gpt").build()
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    capture(model, source("gpt").inputs, loss=source("gpt").loss)
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    for name, (tensor, value) in before.items():
        assert after[name] is tensor
        assert torch.equal(tensor, value)
        assert tensor.grad is None
    for name, module in model.named_modules():
        assert set(vars(module)) == attributes[name]
        assert not module._forward_hooks and not module._forward_pre_hooks and not module._backward_hooks
    tokens = torch.zeros(1, 16, dtype=torch.long)
    assert model(tokens, tokens).isfinite()


def test_175_billion_parameters_take_no_memory() -> None:
    model = load_model("gpt3-175b")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graph = capture(model.build_on_meta(), model.inputs, loss=model.loss)
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert graph.num_parameters > 174e9
    assert len(graph.blocks) == 96
    assert grown_mib < 300
