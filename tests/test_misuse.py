"""What is easily done wrong around `parallelize` is refused, or made to work, in a sentence.

- An optimizer of before `parallelize` is refused at its first step, one of after it is not.
- A model that is compiled, checkpoints itself, or is parallelized already is refused.
- A batch larger than planned is warned of once, with its predicted peak; so is another engine than planned.
- A second backward of a graph that is retained adds the gradients once more, as in a single process.
- torch's own clipping works on mixed meshes, and clips as in a single process.
- `osdp train` on a folder with weights begins with them.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from odd_models import Model, built, data, odd_graph
from planned import plan_by_hand, whole_gradients, whole_parameters
from ranks import run_ranks
from small_models import hugging_face
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm  # before a plan runs, as users do
from trained import EVERY_MODE, close, sgd

import osdp
from osdp.cost.units import OPERATORS
from osdp.engine import ENGINES
from osdp.errors import UsageError
from osdp.model.source import load_model
from osdp.planfile import Plan
from osdp.runtime.misuse import BatchWatch


def refusal(do: Any) -> str:
    with pytest.raises(UsageError) as found:
        do()
    return str(found.value)


def misused(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["compiled"] = refusal(lambda: osdp.parallelize(torch.compile(built(Model), backend="eager"), plan))
    model = built(Model)
    early = torch.optim.AdamW(model.parameters())
    osdp.parallelize(model, plan)
    found["twice"] = refusal(lambda: osdp.parallelize(model, plan))
    model(*data(2, seed=0)).backward()
    before = whole_parameters(model)
    found["early optimizer"] = refusal(early.step)
    late = sgd(model.parameters())
    late.step()
    found["moved"] = any(not torch.equal(before[name], now) for name, now in whole_parameters(model).items())
    found["a stranger steps"] = sgd(nn.Linear(2, 2).parameters()).step() is None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for samples in (2, 5, 6):
            model(*data(samples, seed=0)).backward()
        with torch.no_grad():
            model(*data(9, seed=0))
    found["warnings"] = [str(each.message) for each in warned if "planned" in str(each.message)]
    found["twice back"] = backward_twice(osdp.parallelize(built(Model), plan))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        apart = tuple(replace(unit, reduced_with=None) for unit in plan.units)  # one of the engines joins none
        for engine in ENGINES.values():
            cluster = replace(plan.cluster, engine_name=engine.name)
            osdp.parallelize(built(Model), replace(plan, cluster=cluster, units=apart))
    found["other engine"] = [str(each.message) for each in warned if "engine" in str(each.message)]
    return found


def backward_twice(model: nn.Module) -> dict[str, Tensor | None]:
    loss = model(*data(2, seed=0))
    loss.backward(retain_graph=True)
    loss.backward()
    return whole_gradients(model)


def test_misuse_is_told() -> None:
    plan = osdp.plan(built(Model), data(2, seed=0), "2xCPU", batch=2, precision="fp32", optimizer="sgd")
    plan = replace(plan, predicted=replace(plan.predicted, limit_bytes=plan.predicted.peak_bytes - 1))
    for rank, found in enumerate(run_ranks(2, misused, plan)):
        assert "compiled model: call osdp.parallelize on the model itself" in found["compiled"]
        assert "is parallelized already" in found["twice"]
        assert "AdamW was made before osdp.parallelize: 14 of its 14 parameters" in found["early optimizer"]
        assert found["moved"] and found["a stranger steps"]
        (warning,) = found["warnings"]
        assert "shape (5, 6) came, 2.5 times the 2 samples of 6 elements that were planned" in warning
        assert "above the limit" in warning
        for name, gradient in backward_twice(built(Model)).items():
            close(found["twice back"][name], gradient, name)
        assert len(found["other engine"]) == (1 if rank == 0 else 0)
        assert all("made for the engine fsdp2 and runs on async-gloo" in each for each in found["other engine"])


def test_the_predicted_peak_of_a_larger_batch_is_close_to_that_of_its_own_plan() -> None:
    def planned(batch: int) -> Plan:
        return osdp.plan(
            built(Model), data(2, seed=0), "2xCPU", batch=batch, precision="fp32", modes=["keep"], recompute=False
        )

    small, large = planned(64), planned(160)
    estimate = BatchWatch(small).peak_bytes(2.5)
    assert estimate == pytest.approx(large.predicted.peak_bytes, rel=0.05)
    assert estimate > 1.8 * small.predicted.peak_bytes


def test_a_models_own_checkpointing_is_refused() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32))
    tokens = torch.zeros(2, 4, dtype=torch.long)
    model.gradient_checkpointing_enable()
    with pytest.raises(UsageError, match=r"checkpointing .* is on, .*gradient_checkpointing_disable\(\)"):
        osdp.plan(model, {"input_ids": tokens, "labels": tokens}, "2xCPU", batch=2)


def test_a_compiled_model_is_planned_as_the_model_inside() -> None:
    plans = [
        osdp.plan(model, data(2, seed=0), "2xCPU", batch=2, precision="fp32")
        for model in (built(Model), torch.compile(built(Model), backend="eager"))
    ]
    assert plans[0].units == plans[1].units


def gradients(model: nn.Module) -> nn.Module:
    model(*data(4, seed=0)).backward()
    return model


def clipped(plan: Plan) -> list[tuple[float, dict[str, Tensor | None]]]:
    """By torch in one call and in two, with the norms of each order."""
    found = []
    for order in (2.0, float("inf"), 1.0):
        model = gradients(osdp.parallelize(built(Model), plan))
        norm = clip_grad_norm_(model.parameters(), 0.01, order)
        found.append((float(norm), whole_gradients(model)))
    model = gradients(osdp.parallelize(built(Model), plan))
    norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    clip_grads_with_norm_(model.parameters(), 0.01, norm)
    return [*found, (float(norm), whole_gradients(model))]


def test_torchs_own_clipping_works_on_mixed_meshes() -> None:
    plan = plan_by_hand(odd_graph(Model), "2x2", modes=EVERY_MODE, granularity=OPERATORS)
    runs = run_ranks(4, clipped, plan)
    for index, order in enumerate((2.0, float("inf"), 1.0, 2.0)):
        alone = gradients(built(Model))
        norm = float(torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01, order))
        for run in runs:
            assert run[index][0] == pytest.approx(norm, rel=1e-5)
            for name, parameter in alone.named_parameters():
                own = run[index][1][name]
                assert own is not None and parameter.grad is not None
                close(own, parameter.grad, name)


def from_folder(folder: str, plan: Plan) -> dict[str, Tensor]:
    source = load_model(folder)
    assert source.pretrained is not None
    model = osdp.load_pretrained(osdp.parallelize(source.build_on_meta(), plan), source.pretrained)
    return {**whole_parameters(model), **dict(model.named_buffers())}


def test_a_folder_with_weights_begins_with_them(tmp_path: Path) -> None:
    torch.manual_seed(5)
    plain: Any = hugging_face("gpt2").build()
    plain.save_pretrained(tmp_path)
    assert load_model(str(tmp_path / "config.json")).pretrained is None
    source = load_model(str(tmp_path))
    plan = plan_by_hand(
        source.capture("fp32"), "2", modes=EVERY_MODE[:3], granularity=OPERATORS, splits=((2, 1), (1, 1))
    )
    for found in run_ranks(2, from_folder, str(tmp_path), plan):
        for key, tensor in plain.named_parameters():
            assert torch.equal(found[key], tensor), key
    (tmp_path / "model.safetensors").write_bytes(b"cut short")
    assert source.pretrained is not None
    with pytest.raises(UsageError, match=r"model.safetensors is no safetensors file .*; download it again"):
        osdp.load_pretrained(source.build_on_meta(), source.pretrained)
