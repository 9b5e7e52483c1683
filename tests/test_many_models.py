"""Claim: what people train can be planned, with the memory that it then takes, and trains as in a single process.

- torch's own transformers, convolutions with batch norms, a diffusion UNet, a scan, an LSTM, a contrastive loss,
  experts that compute their own tokens, shared layers, a tower without inputs, one without a loss: a plan's peak is
  within 1 % of its dry run's;
- inputs may be lists, dataclasses and keywords, losses in dicts and tuples: nobody has to say where;
- what only data can tell is answered as training usually goes, and said.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from image_models import ConvNeXt, ResNet, ResNet50, UNet
from many_models import (
    CLASSES,
    LENGTH,
    MANY,
    WIDTH,
    Attention,
    Contrastive,
    Critic,
    Encoder,
    EncoderDecoder,
    FromList,
    GatheredContrastive,
    Generator,
    IdleTower,
    Mamba,
    Preference,
    Recurrent,
    Routed,
    Shared,
    TwoTowers,
    UsedOutside,
    many,
    sequence,
)
from planned import plan_by_hand, whole_gradients
from ranks import run_ranks
from selection import one_in
from shared import made_once
from torch import Tensor, nn

import osdp
from osdp.cluster import Cluster
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.cost.units import OPERATORS, stage_units
from osdp.errors import OsdpError, UsageError
from osdp.model.capture import capture, scaled_inputs
from osdp.model.graph import ModelGraph
from osdp.model.inputs import CaptureError, as_call, map_tensors, output_loss
from osdp.model.values import EVEN_LOAD, FINITE, NOT_DROPPED
from osdp.planfile import Plan
from osdp.planning import plan_graph
from osdp.sharding import FREE, KEEP, REPLICATE
from osdp.verify import verify

STEPS = 2


@made_once
def graph_of(kind: type[nn.Module]) -> ModelGraph:
    return capture(many(kind), MANY[kind](), compute_dtype="fp32")


@pytest.mark.parametrize("kind", one_in(2, MANY, ids=lambda kind: kind.__name__))
def test_the_planned_peak_is_that_of_a_dry_run(kind: type[nn.Module]) -> None:
    example, graph = MANY[kind](), graph_of(kind)
    training = Training.of("fp32", "adamw")
    # Any plan will do: what is asked is its peak, not whether the search proves that none is faster.
    plan = plan_graph(graph, Cluster.parse("4xCPU"), training, Rules(), batch=2, search_seconds=1)
    assert graph.num_parameters == sum(parameter.numel() for parameter in many(kind).parameters())
    inputs = scaled_inputs(example, model=many(kind))
    truth = verify(plan, graph, build=lambda: many(kind), inputs=inputs)
    assert truth.peak_matches, f"{truth.predicted_parts} but {truth.measured_parts}"
    assert truth.collectives_match, truth.first_difference


@pytest.mark.parametrize("kind", [Encoder, Attention, ResNet, ConvNeXt, UNet, Mamba, Routed])
def test_every_block_may_be_recomputed(kind: type[nn.Module]) -> None:
    graph = graph_of(kind)
    assert graph.blocks
    assert all(stage.recomputed is not None for stage in graph.blocks)


# ---- what is said


def test_a_batch_norm_over_one_value_is_measured_at_larger_batches() -> None:
    assert graph_of(ResNet).batches == (2, 3, 4)


def test_growth_that_is_no_line_makes_a_plan_for_one_batch() -> None:
    example = MANY[Contrastive]()
    assert capture(many(Contrastive), example, batch=5).only_batch == 5
    assert "holds for batch 5 only" in capture(many(Contrastive), example, batch=5).assumptions[0]
    plans = [osdp.plan(many(Contrastive), example, "4xCPU", batch=batch) for batch in (5, None)]
    assert [plan.batch_size for plan in plans] == [5, 2]  # by default the example's
    with pytest.raises(UsageError, match="measured at batch 2"):
        osdp.plan(many(Contrastive), example, "4xCPU", global_batch=64)


def test_what_only_data_can_tell_is_assumed_and_said_with_its_place() -> None:
    found = graph_of(Routed).assumptions
    assert {line.partition(" (")[0] for line in found} == {NOT_DROPPED, EVEN_LOAD, FINITE}
    places = {line.partition(" (")[0]: line.partition(" (")[2] for line in found}
    assert places[EVEN_LOAD].startswith("RoutedBlock, many_models.py:")
    assert places[NOT_DROPPED].startswith("Routed, many_models.py:")


def test_experts_get_the_same_share_of_the_tokens() -> None:
    experts = [op for name, op in graph_of(Routed).operators.items() if ".experts." in name]
    assert len(experts) == 8
    # 6 tokens of a sample choose 2 of 4 experts each: 3 for each expert
    assert {op.forward_flops.per_sample for op in experts} == {3 * 2 * WIDTH * WIDTH}


def test_parameters_that_the_loss_does_not_use_are_listed_and_held() -> None:
    graph = graph_of(TwoTowers)
    assert graph.unused == ("vision.weight", "vision.bias")
    plan = osdp.plan(many(TwoTowers), MANY[TwoTowers](), "4xCPU", batch=2)
    assert sum(unit.parameters for unit in plan.units) == graph.num_parameters
    seen = capture(
        many(TwoTowers), {**dict(zip(("x", "labels"), sequence(), strict=True)), "pixels": torch.ones(2, 3, 8, 8)}
    )
    assert seen.unused == ()


def test_what_is_used_outside_of_its_own_call_is_gathered_by_the_unit_around() -> None:
    graph = graph_of(UsedOutside)
    first, block = graph.stages[:2]
    assert [(unit.name, len(unit.parameters)) for unit in stage_units(graph, first)[OPERATORS]] == [("", 2)]
    assert [unit.name for unit in stage_units(graph, block)[OPERATORS]] == ["blocks.0", "blocks.0.mix", "blocks.0.norm"]
    assert [line.partition(" are used")[0] for line in graph.assumptions] == [
        "parameters of blocks.0.up and others",
        "parameters of classes",
    ]


def test_a_write_into_a_parameter_is_refused_with_its_place() -> None:
    class Averaging(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.data.mul_(0.99)
            return super().forward(x).mean()

    with pytest.raises(CaptureError, match=r"Averaging, test_many_models.py:\d+ writes into the parameter weight in"):
        capture(Averaging(WIDTH, WIDTH), (torch.randn(2, WIDTH),))


def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(CLASSES, WIDTH, sparse=True), nn.Linear(WIDTH, 1))
    with pytest.raises(OsdpError, match=r"0 \(Embedding\) has sparse gradients.* sparse=False"):
        capture(model, (torch.zeros(2, 3, dtype=torch.long),), loss=Tensor.mean)


def test_what_cannot_be_copied_is_shared() -> None:
    class Holding(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.lock, self.draws = threading.Lock(), torch.Generator()

        def forward(self, x: Tensor) -> Tensor:
            with self.lock:
                return super().forward(x + torch.rand(x.shape, generator=self.draws)).mean()

    assert capture(Holding(), (torch.randn(2, WIDTH),)).num_parameters == WIDTH * (WIDTH + 1)


def test_parameters_that_do_not_exist_yet_are_refused() -> None:
    class Making(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "more"):
                self.more = nn.Linear(WIDTH, WIDTH)
            return self.more(super().forward(x)).mean()

    with pytest.raises(
        OsdpError, match=r"Making makes the parameter more.bias in its first forward: run the model once"
    ):
        capture(Making(WIDTH, WIDTH), (torch.randn(2, WIDTH),))
    with pytest.raises(
        OsdpError, match=r"the parameter 0.weight of this Sequential has no shape yet: run the model once"
    ):
        capture(nn.Sequential(nn.LazyLinear(WIDTH)), (torch.randn(2, WIDTH),), loss=Tensor.mean)


def test_the_only_scalar_of_a_tuple_is_its_loss() -> None:
    loss, logits = torch.tensor(1.0), torch.zeros(2, 3)
    assert output_loss((logits, loss)) == output_loss((loss, logits)) == output_loss((loss, torch.tensor(2.0))) == 1
    with pytest.raises(OsdpError, match="no scalar loss"):
        output_loss((logits, loss, loss))


def test_a_list_is_one_input_where_the_model_takes_one() -> None:
    assert graph_of(FromList).operators["mix"].calls == 3


class PerSample(nn.Linear):
    def forward(self, images: list[Tensor], labels: Tensor | None = None) -> Tensor:
        return torch.stack([super(PerSample, self).forward(image).mean() for image in images]).sum()


@pytest.mark.parametrize(
    "example", [([torch.randn(5, WIDTH), torch.randn(7, WIDTH)],), ([torch.randn(3, WIDTH)] * 2, torch.zeros(2))]
)
def test_a_list_with_a_tensor_for_each_sample_is_of_so_many_samples(example: Any) -> None:
    model = PerSample(WIDTH, WIDTH)
    assert [len(scaled_inputs(example, model=model)(batch)[0][0]) for batch in (1, 2, 5)] == [1, 2, 5]
    assert capture(model, example).only_batch == 2  # another batch is another number of kernels


def test_packed_sequences_are_refused_with_a_remedy_that_helps() -> None:
    class Padded(Recurrent):
        def steps(self, x: Tensor, lengths: Tensor) -> Tensor:
            return self.lstm(x)[0]

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            hidden = torch.arange(x.shape[1]) >= lengths[:, None]
            return self.steps(x, lengths).masked_fill(hidden[..., None], 0).square().mean()

    class Packed(Padded):
        def steps(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]

    example = torch.randn(2, LENGTH, WIDTH), torch.tensor([LENGTH, LENGTH - 2])
    with pytest.raises(OsdpError, match=r"Packed, test_many_models.py:\d+ packs sequences.* give .* the padded tensor"):
        capture(Packed(), example)
    assert [capture(Padded(), example).only_batch for _ in range(2)] == [None, None]  # torch caches what the first made


def test_blocks_that_are_compiled_are_planned_as_they_are_written() -> None:
    compiled = Attention()
    compiled.blocks = nn.ModuleList(torch.compile(block, backend="eager") for block in compiled.blocks)
    graph, plain = capture(compiled, MANY[Attention](), compute_dtype="fp32"), graph_of(Attention)
    assert graph.batches == plain.batches and [stage.name for stage in graph.stages] == [s.name for s in plain.stages]
    for stage, same in zip(graph.stages, plain.stages, strict=True):
        assert (stage.selective is None) == (same.selective is None)
        assert sum(s.flops.sum() for s in stage.plain.forward) == sum(s.flops.sum() for s in same.plain.forward)


def test_a_failed_recompute_costs_that_block_the_option_only() -> None:
    class Remembering(nn.Linear):
        """Keeps its last output, as a cache does: its second forward is another one than its first."""

        last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            self.last = out if self.last is None else torch.cat([self.last, out], 1)
            return torch.tanh(self.last)[:, : x.shape[1]]

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Remembering(WIDTH, WIDTH)])

        def forward(self, x: Tensor) -> Tensor:
            self.blocks[1].last = None
            for block in self.blocks:
                x = block(x)
            return x.float().mean()

    graph = capture(Mixed(), (torch.randn(2, LENGTH, WIDTH),))
    assert [stage.recomputed is not None for stage in graph.blocks] == [True, False]
    assert any("Remembering blocks are not recomputed" in line for line in graph.assumptions)


# ---- on real ranks

Gradients = dict[str, Tensor | None]
OVER_ALL = (GatheredContrastive,)  # the loss of a rank is over all ranks' samples


def part_of(example: Any, part: int, parts: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return map_tensors(lambda tensor: tensor.chunk(parts)[part], as_call(example))


def trained(kind: type[nn.Module], model: nn.Module, own: list[int], parts: int, steps: int = STEPS) -> list[float]:
    """The losses of a few steps on these parts of the batch; the gradients of the last one stay."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in own:
            torch.manual_seed(7)  # layer drop drops alike
            args, kwargs = part_of(MANY[kind](), part, parts)
            loss = output_loss(model(*args, **kwargs)) / len(own)
            loss.backward()
            total += loss.detach()
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= dist.get_world_size()
        losses.append(total.item())
        if step < steps - 1:
            optimizer.step()
    return losses


def on_a_rank(
    work: dict[type[nn.Module], list[Plan]], steps: int = STEPS
) -> dict[type[nn.Module], list[tuple[list[float], Gradients]]]:
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
    warnings.filterwarnings("ignore", message=r"Full backward hook is firing")
    warnings.filterwarnings("ignore", message=r"torch.distributed.nn.functional.all_gather is deprecated")
    found: dict[type[nn.Module], list[tuple[list[float], Gradients]]] = {}
    for kind, plans in work.items():
        for plan in plans:
            model = osdp.parallelize(many(kind), plan)
            losses = trained(kind, model, [dist.get_rank()], dist.get_world_size(), steps)
            found.setdefault(kind, []).append((losses, whole_gradients(model)))
    return found


def gradient_errors(own: Gradients, truth: Gradients) -> dict[str, float]:
    """Largest differences as parts of the gradient's own size, or of a hundredth of the model's largest."""
    largest = max(float(gradient.abs().max()) for gradient in truth.values() if gradient is not None)
    assert own.keys() == truth.keys()
    errors = {}
    for name, true in truth.items():
        mine = own[name]
        if true is None or mine is None:
            assert (mine is None or not mine.any()) and (true is None or not true.any()), name
        else:
            errors[name] = float((mine - true).abs().max()) / max(float(true.abs().max()), 1e-2 * largest)
    return errors


def same_gradients(own: Gradients, truth: Gradients, tolerance: float = 1e-5) -> None:
    assert {name: error for name, error in gradient_errors(own, truth).items() if error >= tolerance} == {}


def mixed_plans(graph: ModelGraph) -> list[Plan]:
    return [
        plan_by_hand(
            graph,
            "2",
            modes=(FREE, REPLICATE, KEEP)[index:] + (FREE, REPLICATE, KEEP)[:index],
            granularity=granularity,
            splits=((2, 1), (1, 1), (3, 3)),
            recompute=(True, False),
        )
        for index, granularity in enumerate(("whole", "parts", "operators"))
    ]


LANGUAGE = [Encoder, EncoderDecoder, Attention, Shared, Mamba, Recurrent, Preference, UsedOutside]
IMAGES = [UNet, ConvNeXt, TwoTowers, IdleTower, GatheredContrastive]


@pytest.mark.parametrize("kinds", [LANGUAGE, IMAGES], ids=["language", "images"])
def test_two_ranks_train_as_one_process(kinds: list[type[nn.Module]]) -> None:
    work = {kind: mixed_plans(graph_of(kind)) for kind in kinds}
    of_ranks = run_ranks(2, on_a_rank, work, timeout_seconds=400)
    for kind in kinds:
        alone = many(kind)
        losses = trained(kind, alone, [0] if kind in OVER_ALL else [0, 1], 1 if kind in OVER_ALL else 2)
        truth = {name: parameter.grad for name, parameter in alone.named_parameters()}
        for runs in of_ranks:
            for own_losses, gradients in runs[kind]:
                assert own_losses == pytest.approx(losses, rel=1e-5), kind
                same_gradients(gradients, truth)


def test_a_resnet_50_trains_as_in_one_process() -> None:
    """A step, as far as rounding lets it: weights that are one rounding off change its own gradients by 4e-4."""
    alone, nudged = many(ResNet50), many(ResNet50)
    with torch.no_grad():
        for parameter in nudged.parameters():
            parameter.mul_(1 + 2**-23)
    losses, _ = (trained(ResNet50, model, [0, 1], 2, 1) for model in (alone, nudged))
    truth, other = ({name: p.grad for name, p in model.named_parameters()} for model in (alone, nudged))
    sensitivity = max(gradient_errors(other, truth).values())
    assert sensitivity < 2e-3
    for runs in run_ranks(2, on_a_rank, {ResNet50: mixed_plans(graph_of(ResNet50))[-1:]}, 1, timeout_seconds=400):
        for own_losses, gradients in runs[ResNet50]:
            assert own_losses == pytest.approx(losses, rel=1e-5)
            same_gradients(gradients, truth, 4 * sensitivity)


# ---- two models that train each other


def played(generator: nn.Module, critic: nn.Module, own: list[int], parts: int) -> tuple[list[float], Gradients]:
    """A GAN: the critic learns what is real, then the generator learns from the critic, each with its optimizer."""
    noise, real = (t.chunk(parts) for t in torch.randn(2, 4, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)))
    to_make, to_judge = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic))
    losses: list[float] = []
    for step in range(STEPS + 1):
        to_judge.zero_grad()
        for part in own:
            made = generator(noise[part]).detach()
            judged = F.softplus(critic(made)).mean() + F.softplus(-critic(real[part])).mean()
            (judged / len(own)).backward()
        to_judge.step()
        to_make.zero_grad()
        for part in own:
            loss = F.softplus(-critic(generator(noise[part]))).mean() / len(own)
            loss.backward()
            losses.append(loss.item())
        if step < STEPS:
            to_make.step()
    both = {"generator": generator, "critic": critic}
    return losses, {f"{key}.{name}": g for key, model in both.items() for name, g in whole_gradients(model).items()}


def play_on_a_rank(pairs: list[tuple[Plan, Plan]]) -> list[tuple[list[float], Gradients]]:
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
    return [
        played(
            osdp.parallelize(many(Generator), first),
            osdp.parallelize(many(Critic), second),
            [dist.get_rank()],
            dist.get_world_size(),
        )
        for first, second in pairs
    ]


def test_a_gan_of_two_planned_models_plays_as_in_one_process() -> None:
    """The critic is called twice before its backward, and the generator's backward comes through the critic's."""
    graphs = [capture(many(k), sequence()[:1], loss=Tensor.mean, compute_dtype="fp32") for k in (Generator, Critic)]
    pairs = list(zip(*(mixed_plans(graph) for graph in graphs), strict=True))
    losses, truth = played(many(Generator), many(Critic), [0, 1], 2)
    of_ranks = run_ranks(2, play_on_a_rank, pairs, timeout_seconds=200)
    for runs in zip(*of_ranks, strict=True):
        made = [loss for both in zip(*(own for own, _ in runs), strict=True) for loss in both]
        assert [each / 2 for each in made] == pytest.approx(losses, rel=1e-5)
        for _, gradients in runs:
            same_gradients(gradients, truth)
