"""A plan leaves osdp as code and settings that run: each is executed by the package it is for, and trains as osdp does.

- plain FSDP2, Lightning, transformers' `_fsdp_plan`, Accelerate's FSDP2 and torchtitan: losses equal our own loop's;
- what a target cannot express is said, with the rate and the peak of what is left, by the same cost model;
- where that does not fit, the micro-batch is smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import LENGTH, graph_of, tiny
from frameworks import (
    ACCUMULATION,
    BATCH,
    CLIP,
    RANKS,
    STEPS,
    adamw,
    as_torchrun_starts_it,
    micro_batch,
    mixed_plan,
    own_loop,
)
from planned import plan_by_hand
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import osdp
from osdp.cluster import Cluster
from osdp.cost.graph import step_graph_of
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.errors import UsageError
from osdp.export import TARGETS, export, traced_for
from osdp.export.degrade import blocks_in
from osdp.model.capture import capture
from osdp.planfile import Plan
from osdp.planning import plan_graph
from osdp.recompute import Recompute
from osdp.runtime.dryrun import fake_world
from osdp.sharding import FREE, FREE_IN_NODE, FREE_TO_NODE, KEEP, KEEP_IN_NODE, REPLICATE

# Executed by the packages


def run_text(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {"__name__": "exported"}
    exec(compile(text, "exported.py", "exec"), found)
    return found


def train(
    model: nn.Module,
    reduce: Callable[..., None] | None = None,
    clip: Callable[..., Tensor] = torch.nn.utils.clip_grad_norm_,
) -> list[float]:
    """Our loop without osdp.accumulate and osdp.clip_grad_norm_: the model is not osdp's."""
    optimizer = adamw(model)
    losses = []
    for step in range(STEPS):
        total = torch.zeros(())
        for index in range(ACCUMULATION):
            if reduce is not None:
                reduce(model, last=index == ACCUMULATION - 1)
            loss = model(**micro_batch(step * ACCUMULATION + index)).loss / ACCUMULATION
            loss.backward()
            total += loss.detach()
        clip(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def whole_model(folder: Path) -> Any:
    model = type(tiny("llama").build_on_meta()).from_pretrained(folder).train()
    model.config.use_cache = False
    return model


def by_fsdp2(text: str, folder: Path) -> list[float]:
    found = run_text(text)
    return train(found["parallelize"](whole_model(folder)), found["reduce"], found["clip_grad_norm_"])


def by_transformers(text: str, folder: Path) -> list[float]:
    model = run_text(text)["load"](str(folder))
    assert model._is_fsdp_managed_module and model.is_gradient_checkpointing
    model.config.use_cache = False
    return train(model)


def by_accelerate(text: str, folder: Path) -> list[float]:
    """Accelerate has FSDP2 on accelerators only, so its own functions are called as `prepare` calls them there."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_model

    file = folder / f"fsdp-{dist.get_rank()}.yaml"
    file.write_text(text)
    config = load_config_from_file(str(file)).fsdp_config
    assert config["fsdp_version"] == 2
    accelerator = Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy=config["fsdp_auto_wrap_policy"],
        transformer_cls_names_to_wrap=config["fsdp_transformer_layer_cls_to_wrap"].split(","),
        reshard_after_forward=config["fsdp_reshard_after_forward"],
        activation_checkpointing=config["fsdp_activation_checkpointing"],
    )
    model = whole_model(folder)
    accelerator.state.fsdp_plugin.set_auto_wrap_policy(model)
    if config["fsdp_activation_checkpointing"]:
        model = fsdp2_apply_ac(accelerator, model)
    return train(fsdp2_prepare_model(accelerator, model))


def by_lightning(text: str, folder: Path) -> list[float]:
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(run_text(text)["ParallelMixin"], lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = whole_model(folder), []

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss = self.model(**micro_batch(index)).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.model)

    module = Module()
    trainer = lightning.Trainer(
        **{"accelerator": "cpu", "devices": RANKS, "max_steps": STEPS, "logger": False, "enable_progress_bar": False},
        **{"enable_checkpointing": False, "enable_model_summary": False, "accumulate_grad_batches": ACCUMULATION},
        strategy=ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1),
        use_distributed_sampler=False,
        gradient_clip_val=CLIP,
    )
    trainer.fit(module, torch.utils.data.DataLoader(range(STEPS * ACCUMULATION), batch_size=1))  # type: ignore[arg-type]
    own = torch.tensor(module.losses)
    dist.all_reduce(own)
    return (own / RANKS).view(STEPS, ACCUMULATION).mean(1).tolist()


WAYS = {"fsdp2": by_fsdp2, "transformers": by_transformers, "accelerate": by_accelerate, "lightning": by_lightning}


def executed(plan: Plan, texts: dict[str, str], folder: Path) -> dict[str, list[float]]:
    as_torchrun_starts_it()
    return {"osdp": own_loop(plan, folder)[1]} | {way: WAYS[way](text, folder) for way, text in texts.items()}


def test_exports_train_as_osdp_does(tmp_path: Path) -> None:
    torch.manual_seed(1)
    tiny("llama").build().save_pretrained(tmp_path)
    plan = mixed_plan()
    made = {way: export(plan, graph_of("llama"), tiny("llama").build_on_meta(), target=way) for way in WAYS}
    assert all("slices" in " ".join(each.notes) for each in made.values())
    texts = {way: each.text for way, each in made.items()}
    found = run_ranks(RANKS, executed, plan, texts, tmp_path, timeout_seconds=280)[0]
    for way in WAYS:
        assert found[way] == pytest.approx(found["osdp"], abs=2e-5), way


# torchtitan has models of its own


def titan_args() -> Any:
    from torchtitan.models.llama3 import TransformerModelArgs

    return TransformerModelArgs(dim=32, n_layers=3, n_heads=4, vocab_size=90, max_seq_len=16)


def titan() -> nn.Module:
    from torchtitan.models.llama3 import Transformer

    return Transformer(titan_args())


@cache
def titan_graph() -> Any:
    with torch.device("meta"):
        model = titan()
    loss = lambda output: output.float().square().mean()  # noqa: E731
    return capture(model, (torch.zeros(1, 8, dtype=torch.long),), loss=loss, name="titan", compute_dtype="fp32")


def by_torchtitan(plan: Plan, text: str, folder: Path) -> list[list[tuple[float, float]]]:
    """Losses and gradient norms of torchtitan's own Trainer, with our runtime and with the export."""
    as_torchrun_starts_it()
    # torchtitan takes "cuda" where there is no accelerator: it is shown the CPU, with the calls that its trainer makes.
    calls: dict[str, Any] = {"get_device_name": "CPU", "current_device": 0, "memory_stats": {}}
    calls |= {"get_device_properties": SimpleNamespace(total_memory=1 << 34)}
    calls |= dict.fromkeys(("set_device", "synchronize", "reset_peak_memory_stats", "empty_cache"))
    device = SimpleNamespace(**{name: lambda *_, value=value: value for name, value in calls.items()})
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda _: device
    parallelize_fn = run_text(text)["parallelize_fn"]
    return [
        titan_run(lambda model, *_: osdp.parallelize(model, plan), folder / "own"),
        titan_run(parallelize_fn, folder / "exported"),
    ]


def titan_run(parallelize_fn: Callable[..., nn.Module], folder: Path) -> list[tuple[float, float]]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.config import JobConfig
    from torchtitan.models.llama3 import get_train_spec
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.train import Trainer

    found: list[tuple[float, float]] = []

    class Kept(MetricsProcessor):
        def log(self, step: int, loss: float, most: float, norm: float, **_: Any) -> None:
            found.append((float(loss), norm))

    def batches(**_: Any) -> list[Any]:
        tokens = [micro_batch(step)["input_ids"] for step in range(STEPS)]
        return [({"input": each[:, :-1]}, each[:, 1:]) for each in tokens]

    spec = replace(get_train_spec(), model_args={"tiny": titan_args()}, parallelize_fn=parallelize_fn)
    spec = replace(spec, build_dataloader_fn=batches, build_tokenizer_fn=None, state_dict_adapter=None)
    register_train_spec(folder.name, replace(spec, build_metrics_processor_fn=Kept))
    config = JobConfig()
    config.model.name, config.model.flavor, config.job.dump_folder = folder.name, "tiny", str(folder)
    config.training.local_batch_size, config.training.seq_len, config.training.steps = BATCH, LENGTH - 1, STEPS
    config.training.mixed_precision_param, config.training.max_norm = "float32", CLIP
    config.activation_checkpoint.mode, config.metrics.log_freq = "none", 1
    trainer = Trainer(config)
    torch.manual_seed(2)
    whole = titan()
    with torch.no_grad():
        whole.init_weights(torch.device("cpu"))
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(trainer.model_parts[0], whole.state_dict(), options=options)
    trainer.train()
    return found


def test_torchtitans_own_trainer_trains_the_export_as_osdp_does(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan")
    plan = plan_by_hand(titan_graph(), str(RANKS), modes=(FREE, KEEP, REPLICATE), recompute=(True, False))
    with torch.device("meta"):
        model = titan()
    text = export(plan, titan_graph(), model, target="torchtitan").text
    for own, exported in run_ranks(RANKS, by_torchtitan, plan, text, tmp_path, timeout_seconds=200):
        assert len(own) == STEPS and own[0][0] > own[-1][0] and min(norm for _, norm in own) > CLIP  # it is clipped
        assert torch.tensor(exported) == pytest.approx(torch.tensor(own), rel=1e-5)


# Every mode, and what is said


def by_nodes(plan: Plan, text: str, folder: Path) -> tuple[list[float], list[float]]:
    as_torchrun_starts_it()
    return own_loop(plan, folder)[1], by_fsdp2(text, folder)


def test_plain_fsdp2_has_every_mode(tmp_path: Path) -> None:
    torch.manual_seed(1)
    tiny("llama").build().save_pretrained(tmp_path)
    modes = (FREE_TO_NODE, FREE_IN_NODE, KEEP_IN_NODE, REPLICATE, KEEP, FREE)
    plan = plan_by_hand(
        graph_of("llama"), "2x1", modes=modes[:3], batch_size=2, accumulation=ACCUMULATION, two_levels=(False,)
    )
    wide = plan_by_hand(graph_of("llama"), "2x2", modes=modes, granularity="operators", two_levels=(False,))
    made = export(wide, graph_of("llama"), tiny("llama").build_on_meta(), target="fsdp2")
    assert "fsdp2 can express all of it." in made.notes
    assert all(f'"{mode}": {{"mesh"' in made.text for mode in modes) and '"reshard_after_forward": 2' in made.text
    text = export(plan, graph_of("llama"), tiny("llama").build_on_meta(), target="fsdp2").text
    own, theirs = run_ranks(2, by_nodes, plan, text, tmp_path, timeout_seconds=120)[0]
    assert theirs == pytest.approx(own, abs=2e-5)


def test_two_units_ahead_are_in_plain_fsdp2_and_said_to_be_lost_elsewhere() -> None:
    graph, model = graph_of("llama"), tiny("llama").build_on_meta()
    plan = plan_by_hand(graph, "2", modes=(FREE,), granularity="operators", prefetch=(1, 2), recompute=(False, True))
    deep = [index for index, unit in enumerate(plan.units) if unit.prefetch == 2]
    made = export(plan, graph, model, target="fsdp2")
    found = run_text(made.text)
    assert not made.degraded.lost
    assert found["FORWARD_AHEAD"] == {index: [index + 1, index + 2] for index in range(deep[0] - 1, deep[-1] - 1)}
    first, last = deep[1], deep[-1]  # the block's own unit comes before its operators, and backward reaches it first
    assert {index: found["BACKWARD_AHEAD"][index] for index in (deep[0], last)} == {
        deep[0]: [last, first],
        last: [first, first + 1],
    }
    assert any(
        "prefetches one unit instead of two" in line
        for line in export(plan, graph, model, target="transformers").degraded.lost
    )


@cache
def priced() -> Plan:
    cluster = replace(Cluster.parse("2x4xL4"), memory_bytes=None)
    graph = graph_of("llama")
    return plan_graph(graph, cluster, Training.of("bf16", "adamw"), Rules(), batch=4, search_seconds=5.0)


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_left_is_priced_by_the_same_model(target: str) -> None:
    plan = priced()
    made = export(plan, graph_of("llama"), tiny("llama").build_on_meta(), target=target)
    left = made.degraded
    assert left.samples_per_second <= plan.predicted.samples_per_second * 1.001
    assert bool(left.lost) == any("cannot express" in line for line in made.notes)
    if not left.lost:
        assert left.samples_per_second == pytest.approx(plan.predicted.samples_per_second)
        assert left.peak_bytes == plan.predicted.peak_bytes


def test_accelerate_is_said_to_keep_what_follows_the_blocks() -> None:
    graph, model = graph_of("llama"), tiny("llama").build_on_meta()
    plan = plan_by_hand(graph, "8", modes=(FREE,), device="L4")
    peak = step_graph_of(plan, graph).timeline().peak_bytes
    tight = replace(plan, predicted=replace(plan.predicted, limit_bytes=peak))  # blocks that are kept do not fit
    left = export(tight, graph, model, target="accelerate").degraded
    modes = {unit.name: unit.mode for unit in left.plan.units}
    kept = [name for name, mode in modes.items() if mode == KEEP]
    assert left.lost == (
        "a mode for each unit: all blocks are free, and Accelerate keeps model.norm, lm_head from forward to backward;"
        " 2 units differ from the plan",
    )
    assert kept == ["model.norm", "lm_head"] and modes["model.embed_tokens"] == FREE
    # what has no input embeddings is the root's, with all else outside blocks
    rooted = blocks_in(FREE, as_blocks=None)(plan)[0]
    assert [unit.name for unit in rooted.units if unit.mode == KEEP] == ["model.embed_tokens", *kept]


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own imports
def test_compiled_blocks_are_in_plain_fsdp2_and_said_to_be_lost_elsewhere() -> None:
    graph, model = graph_of("llama"), tiny("llama").build_on_meta()
    selective, full = (Recompute.SELECTIVE, Recompute.FULL)
    plan = replace(plan_by_hand(graph, "4", modes=(FREE,), recompute=(selective, full)), compiled=True)
    assert traced_for(plan, "fsdp2").compiled and not traced_for(plan, "accelerate").compiled
    made = export(plan, graph, model, target="fsdp2")
    assert not made.degraded.lost
    with fake_world(4):
        found = run_text(made.text)
        sharded = found["parallelize"](model, "cpu")
    assert found["COMPILED"] == ["model.layers.0", "model.layers.1"]
    inner, outer = (block.forward for block in sharded.model.layers)
    selectively = inner._torchdynamo_orig_callable.__closure__[0].cell_contents  # dynamo wraps what is no function
    assert selectively.func is checkpoint  # torch's partitioner sees what is recomputed selectively
    assert outer.func is checkpoint and hasattr(outer.args[0], "_torchdynamo_orig_callable")
    lost = export(plan, graph, model, target="transformers").degraded.lost
    assert "compiled blocks: they run eager" in lost


@pytest.mark.parametrize("target", TARGETS)
def test_a_loss_in_chunks_is_said_to_be_lost(target: str) -> None:
    plan = replace(plan_by_hand(graph_of("llama"), "4", modes=(FREE,)), loss_chunks=8)
    assert traced_for(plan, target).loss_chunks == 1
    made = export(plan, graph_of("llama"), tiny("llama").build_on_meta(), target=target)
    assert any("the loss in 8 chunks" in line for line in made.degraded.lost)


def test_parameters_are_stored_as_the_plan_says() -> None:
    for precision, dtype in (("bf16", "float32"), ("pure-bf16", "bfloat16")):
        plan = replace(plan_by_hand(graph_of("llama"), "4", modes=(FREE,)), precision=precision)
        assert (
            f'dtype="{dtype}"'
            in export(plan, graph_of("llama"), tiny("llama").build_on_meta(), target="transformers").text
        )


def test_where_the_rest_does_not_fit_the_micro_batch_is_smaller() -> None:
    graph, model = graph_of("llama"), tiny("llama").build_on_meta()
    plan = plan_by_hand(graph, "8", modes=(FREE,), splits=((4, 4),), batch_size=5, device="L4")
    limit = export(plan, graph, model, target="transformers").degraded.peak_bytes - 1
    plan = replace(plan, predicted=replace(plan.predicted, limit_bytes=limit, peak_bytes=limit, samples_per_second=1.0))
    left = export(plan, graph, model, target="transformers").degraded
    assert left.fits and left.plan.batch_size == 4
    assert "micro-batch of 5 does not fit: it is 4 here" in left.lost[-1]
    none = replace(plan, predicted=replace(plan.predicted, limit_bytes=1000))
    assert "DOES NOT FIT" in export(none, graph, model, target="transformers").text


def test_what_is_no_target_or_no_model_of_transformers_is_refused() -> None:
    plan = priced()
    with pytest.raises(UsageError, match="no target; choose one of fsdp2"):
        export(plan, graph_of("llama"), tiny("llama").build_on_meta(), target="jax")
    with pytest.raises(UsageError, match="choose --to fsdp2"):
        export(plan, graph_of("llama"), nn.Linear(2, 2), target="transformers")
