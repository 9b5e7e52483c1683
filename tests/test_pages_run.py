"""Claim: every Python block of README and docs runs as it stands, and does what its page says.

A cluster that is not here is exchanged for gloo ranks of this machine. A block that cannot run says why in its page.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from architectures import graph_of, tiny
from frameworks import as_torchrun_starts_it, samples
from pages import PAGES, blocks, run_page
from planned import plan_by_hand, whole_parameters
from ranks import run_ranks
from test_pipeline_stages import StageOf, built, loss_of, plan_for
from test_pipeline_stages import batch as pipeline_batch
from torch import Tensor, nn

import osdp
from osdp.model.gpt import GPT, GPTConfig
from osdp.sharding import FREE, KEEP, REPLICATE

ROWS = 4  # of a micro-batch
GIVEN = {"osdp": osdp, "torch": torch, "dist": dist}
ON_THIS_MACHINE = {'device="cuda"': 'device="cpu"'}


def batch() -> dict[str, Tensor]:
    first = dist.get_rank() * ROWS
    tokens = torch.stack([each["input_ids"] for each in samples()[first : first + ROWS]])
    return {"input_ids": tokens, "labels": tokens}


def llama() -> Any:
    return tiny("llama").build_on_meta().train()


def small() -> GPT:
    return GPT(GPTConfig(vocab_size=64, positions=8, layers=(2,), widths=(32,), head_width=16))


def tokens() -> Tensor:
    return torch.arange(8).repeat(2, 1) + dist.get_rank()


def plan() -> osdp.Plan:
    return osdp.Plan.load("llama.json")


def moved(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return any(not torch.equal(value, before[name]) for name, value in whole_parameters(model).items())


# ---- planning, and your own loop


def readme() -> None:
    with torch.device("meta"):
        given = {"model": small(), "tokens": tokens(), "targets": tokens()}
    space = run_page("README.md", GIVEN | given, {"model": llama(), "plan": plan()})
    assert osdp.Plan.load("plan.json").global_batch == 256 and space["model"](**batch()).loss.isfinite()


def models() -> None:
    space = run_page("docs/reference/models.md", GIVEN | {"MyModel": lambda: nn.Conv2d(3, 8, 3)})
    model, inputs, loss = space["make"]()
    assert loss(model(inputs[0])).ndim == 0 and space["kwargs"]["input_ids"].shape == (2, 4096)


def running() -> None:
    data = [[(tokens(), tokens())] * 2]
    given = {"model": small(), "example_inputs": (tokens(), tokens()), "data": data}
    before = {name: value.detach().clone() for name, value in given["model"].named_parameters()}
    space = run_page("docs/running.md", GIVEN | given)
    assert moved(space["model"], before)
    if dist.get_rank() == 0:
        space["plan"].save("plan.json")
    dist.barrier()


def tutorial() -> None:
    """The loop runs the plan that the loop of the page on running made."""
    data = [[(tokens(), tokens())] * 2]
    space = run_page("docs/tutorial.md", GIVEN | {"data": data}, {"build": small})
    assert space["optimizer"].state


def weights() -> None:
    space = run_page("docs/weights.md", {"model": llama(), "plan": plan()})
    assert Path("out/model.safetensors").is_file() and space["model"](**batch()).loss.isfinite()


def fine_tune() -> None:
    start = 'dist.init_process_group("cpu:gloo,cuda:nccl")\n'
    start += "torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())\n"
    given = {"data": [[batch()] * plan().accumulation]}
    run_page("docs/howto/fine-tune.md", given, exchanged=ON_THIS_MACHINE | {start: "", "plan.json": "llama.json"})
    assert Path("tuned/model.safetensors").is_file()


def resumed() -> None:
    space = run_page("docs/howto/resume-on-fewer.md", GIVEN | {"model": llama(), "plan": plan()})
    assert space["done"] is None


def evaluation() -> None:
    model = osdp.load_pretrained(osdp.parallelize(llama(), plan()), "qwen")
    optimizer = torch.optim.AdamW(model.parameters())
    model(**batch()).loss.backward()
    given = {"model": model, "optimizer": optimizer, "validation": [batch()], "evaluate": lambda m: m(**batch())}
    space = run_page("docs/howto/evaluation-and-ema.md", GIVEN | given)
    assert model.training and not space["losses"][0].requires_grad and Path("averaged/model.safetensors").is_file()


def lengths() -> None:
    given = {"batch": {"mask": torch.ones(2, 8)}, "token_losses": torch.ones(2, 8)}
    assert run_page("docs/howto/variable-lengths.md", GIVEN | given)["loss"] == 1


def preferences() -> None:
    pair = batch() | {"answer_mask": torch.ones(ROWS, 8)}
    given = {"policy": llama(), "inputs": dict(batch())}
    models = {name: tiny("llama").build() for name in ("policy", "reference")}
    for model in models.values():
        model.load_state_dict(torch.load("weights.pt"))
    before = {name: value.detach().clone() for name, value in models["policy"].named_parameters()}
    space = run_page("docs/howto/dpo.md", GIVEN | given, models | {"batch": pair}, exchanged={"8xA100-80GB": "2xCPU"})
    assert space["plan"].batch_size == 8 and moved(space["policy"], before)


def compiled() -> None:
    model = small()
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), 0)
    expected = copy.deepcopy(model)(tokens(), tokens())
    made = osdp.plan(model, (tokens(), tokens()), batch=2, precision="fp32")
    exchanged = {"block.compile()": 'block.compile(backend="aot_eager")'}  # or a C++ compiler takes most of the time
    run_page("docs/howto/compile.md", GIVEN | {"model": model, "plan": made}, exchanged=exchanged)
    loss = model(tokens(), tokens())
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert all(block._compiled_call_impl is not None for block in model.blocks)


# ---- where people already work


def adapters() -> None:
    from transformers import AutoModelForCausalLM

    given = {"AutoModelForCausalLM": AutoModelForCausalLM, "tokens": batch()["input_ids"]}
    torch.manual_seed(0)
    space = run_page("docs/howto/lora.md", GIVEN | given, exchanged={"8xL4": "2xCPU"})
    assert Path("adapter/adapter_model.safetensors").is_file()
    space["model"](**batch()).loss.backward()
    space["optimizer"].step()
    assert 0 < space["plan"].model.trained < space["plan"].model.parameters / 2


def trainer() -> None:
    model = llama()
    loader = torch.utils.data.DataLoader(samples(16), batch_size=2)  # type: ignore[arg-type]
    planned = osdp.load_pretrained(osdp.parallelize(llama(), plan()), "qwen")
    second = {"model": planned, "optimizer": torch.optim.AdamW(planned.parameters()), "loader": loader}
    given = GIVEN | {"model": model, "dataset": samples(16)}
    on_cpus = {
        "Accelerator(grad": "Accelerator(cpu=True, grad",
        'output_dir="run1",': 'output_dir="run1", use_cpu=True,',
    }
    space = run_page("docs/howto/trainer.md", given, second, exchanged=on_cpus | {"plan.json": "llama.json"})
    assert space["trainer"].state.global_step == 3 * 16 // (2 * ROWS) and Path("state").is_dir()


def in_lightning() -> None:
    loader = torch.utils.data.DataLoader(samples(16), batch_size=2)  # type: ignore[arg-type]
    given = {"build": llama, "loader": loader}
    exchanged = {"data_parallel_size=8": "data_parallel_size=2", "plan.json": "llama.json"}
    exchanged |= {"max_epochs=1,": 'max_epochs=1, accelerator="cpu", devices=2,'}
    space = run_page("docs/howto/lightning.md", GIVEN | given, exchanged=exchanged)
    assert space["trainer"].global_step == 16 // (2 * 2)


def in_ray() -> None:
    given = {"build": small, "example": (tokens(), tokens())}
    space = run_page("docs/howto/ray-and-slurm.md", GIVEN | given)
    space["train_loop_per_worker"]({"cluster": "2xCPU", "checkpoint": "ray"})


def titan() -> None:
    space = run_page("docs/howto/torchtitan.md", GIVEN, exchanged={'"8B"': '"debugmodel"', "8192": "32"})
    with torch.device("meta"):
        model, inputs, loss = space["build"]()
    assert osdp.plan(model, inputs, "8xH100-80GB", loss=loss, batch=1).batch_size == 1


ON_TWO_RANKS: dict[str, Callable[[], None]] = {
    "README.md": readme,
    "docs/reference/models.md": models,
    "docs/running.md": running,
    "docs/tutorial.md": tutorial,
    "docs/weights.md": weights,
    "docs/howto/fine-tune.md": fine_tune,
    "docs/howto/resume-on-fewer.md": resumed,
    "docs/howto/evaluation-and-ema.md": evaluation,
    "docs/howto/variable-lengths.md": lengths,
    "docs/howto/dpo.md": preferences,
    "docs/howto/compile.md": compiled,
    "docs/howto/lora.md": adapters,
    "docs/howto/trainer.md": trainer,
    "docs/howto/lightning.md": in_lightning,
    "docs/howto/ray-and-slurm.md": in_ray,
    "docs/howto/torchtitan.md": titan,
}


def larger_layout() -> None:
    """Both blocks on 2 × 2 ranks, then a step of each."""
    source = tiny("llama")
    given = {"plan": osdp.plan(source.build_on_meta(), batch(), "4xCPU", tensor=2, batch=ROWS, precision="fp32")}
    if dist.get_rank() == 0:
        given["plan"].save("plan.json")
    dist.barrier()
    model = source.build()
    model.load_state_dict(torch.load("weights.pt"))
    stage = dist.get_rank() // 2
    stages = {"stage_module": StageOf(built(), stage), "device": torch.device("cpu"), "loss_fn": loss_of}
    plans = [replace(plan_for(StageOf(built(), each), each, 2), accumulation=2) for each in range(2)]
    exchanged = {'"cuda", (4, 2)': '"cpu", (2, 2)', '"cuda", (2, 4)': '"cpu", (2, 2)'}
    page = "docs/howto/tensor-and-pipeline.md"
    space = run_page(page, {"model": model}, stages | {"plans": plans}, exchanged=exchanged)
    model(**batch()).loss.backward()
    osdp.clip_grad_norm_(model.parameters(), 1.0)
    space["optimizer"].step()
    losses: list[Tensor] = []
    inputs, targets = pipeline_batch(0, space["mesh"].get_local_rank("dp"), 2)
    space["schedule"].step(*([inputs] if stage == 0 else []), target=targets, losses=losses)
    assert len(losses) == (2 if stage else 0)


def experts() -> None:
    """The block on 2 × 2 ranks, a step of it, and the weights written as a single process reads them."""
    source = tiny("mixtral")
    asked: dict[str, Any] = {"batch": ROWS, "expert": 2, "split": False, "recompute": "none"}
    made = osdp.plan(source.build_on_meta(), source.inputs, "4xCPU", loss=source.loss, **asked)
    if dist.get_rank() == 0:
        replace(made, precision="fp32").save("plan.json")
    dist.barrier()
    torch.manual_seed(0)
    model: Any = source.build()
    space = run_page("docs/howto/experts.md", {"model": model}, exchanged={'"cuda", (4, 8)': '"cpu", (2, 2)'})
    before = whole_parameters(model)
    model(**batch()).loss.backward()
    osdp.clip_grad_norm_(model.parameters(), 1.0)
    space["optimizer"].step()
    assert moved(model, before)
    osdp.save_pretrained(model, "mixtral")
    written = type(source.build()).from_pretrained("mixtral").state_dict()
    assert all(torch.equal(value, written[name]) for name, value in whole_parameters(model).items())


ON_FOUR_RANKS = {"docs/howto/tensor-and-pipeline.md": larger_layout, "docs/howto/experts.md": experts}


def run_pages(folder: Path, names: list[str]) -> None:
    os.chdir(folder)
    as_torchrun_starts_it()
    for page in names:
        torch.manual_seed(0)  # ranks build the same model
        (ON_TWO_RANKS | ON_FOUR_RANKS)[page]()


def test_every_page_with_python_is_run() -> None:
    assert {page for page in PAGES if blocks(page)} == {*ON_TWO_RANKS, *ON_FOUR_RANKS}


def as_a_user_has_it(folder: Path) -> Path:
    """Stored weights, and a plan for two ranks."""
    torch.manual_seed(3)
    model: Any = tiny("llama").build()
    model.save_pretrained(folder / "Qwen3-8B")
    torch.save(model.state_dict(), folder / "weights.pt")
    (folder / "qwen").symlink_to("Qwen3-8B")
    made = plan_by_hand(graph_of("llama"), "2", modes=(FREE, REPLICATE, KEEP), batch_size=ROWS)
    made.save(folder / "llama.json")
    return folder


def test_blocks_run_on_two_ranks_as_they_stand(tmp_path: Path) -> None:
    run_ranks(2, run_pages, as_a_user_has_it(tmp_path), list(ON_TWO_RANKS), timeout_seconds=300)


def test_blocks_on_a_larger_layout_run_on_four(tmp_path: Path) -> None:
    run_ranks(4, run_pages, as_a_user_has_it(tmp_path), list(ON_FOUR_RANKS), timeout_seconds=100)
