"""LoRA with peft and TRL's SFTTrainer under a plan: the adapter that our own loop trains, and peft reads it.

The base is frozen: its parameters stay what they were, and only the adapter is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from architectures import LENGTH, VOCAB, tiny
from frameworks import BATCH, CLIP, RANKS, RATE, as_torchrun_starts_it, samples
from planned import plan_by_hand, whole_parameters
from ranks import run_ranks
from torch import Tensor, nn

import osdp
from osdp.model.capture import capture
from osdp.planfile import Plan
from osdp.sharding import FREE, KEEP, REPLICATE

STEPS = 3


def adapted(folder: Path) -> Any:
    model = type(tiny("llama").build_on_meta()).from_pretrained(folder)
    model.config.use_cache = False
    torch.manual_seed(7)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", lora_dropout=0.0)
    return peft.get_peft_model(model, config)  # type: ignore[arg-type]


def planned(folder: Path) -> Plan:
    model = adapted(folder)
    tokens = torch.zeros(1, LENGTH, dtype=torch.long)
    graph = capture(model, {"input_ids": tokens, "labels": tokens}, compute_dtype="fp32", name="lora")
    return plan_by_hand(graph, str(RANKS), modes=(FREE, REPLICATE, KEEP), batch_size=BATCH)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(VOCAB)}
    own = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=own, eos_token="w1", pad_token="w2", unk_token="w0")


def own_loop(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.0)
    for step in range(STEPS):
        start = (step * RANKS + dist.get_rank()) * BATCH
        tokens = torch.stack([each["input_ids"] for each in samples()[start : start + BATCH]])
        model(input_ids=tokens, labels=tokens).loss.backward()
        osdp.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()


def trained(plan: Plan, folder: Path, out: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    as_torchrun_starts_it()
    import datasets
    import trl

    from osdp.integrations.trainer import TrainerMixin

    class InOrder(TrainerMixin, trl.SFTTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, *unused: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    own = osdp.parallelize(adapted(folder), plan)
    own_loop(own)
    arguments = trl.SFTConfig(
        **{"output_dir": str(out), "use_cpu": True, "bf16": False, "max_steps": STEPS, "learning_rate": RATE},
        **{"max_grad_norm": CLIP, "per_device_train_batch_size": BATCH, "lr_scheduler_type": "constant"},
        **{
            "weight_decay": 0.0,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "optim": "adamw_torch",
        },
        **{"gradient_checkpointing": False, "logging_steps": 1, "max_length": LENGTH},
    )
    data = datasets.Dataset.from_list([{"input_ids": each["input_ids"].tolist()} for each in samples()])
    model = osdp.parallelize(adapted(folder), plan)
    trainer = InOrder(model, arguments, train_dataset=data, processing_class=tokenizer())
    trainer.train()
    trainer.save_model(str(out))
    return whole_parameters(own), whole_parameters(model)


def test_sft_with_lora_equals_our_own_loop_and_peft_reads_the_adapter(tmp_path: Path) -> None:
    torch.manual_seed(1)
    tiny("llama").build().save_pretrained(tmp_path / "base")
    plan = planned(tmp_path / "base")
    before = {name: parameter.detach().clone() for name, parameter in adapted(tmp_path / "base").named_parameters()}
    (own, found), _ = run_ranks(RANKS, trained, plan, tmp_path / "base", tmp_path / "out", timeout_seconds=250)
    assert own.keys() == found.keys() == before.keys()
    assert all(torch.allclose(own[name], found[name], rtol=1e-5, atol=1e-6) for name in own)
    moved = {name for name in own if not torch.equal(own[name], before[name])}
    assert moved == {name for name in own if "lora_" in name}
    assert (tmp_path / "out" / "adapter_config.json").is_file() and not (
        tmp_path / "out" / "model.safetensors"
    ).exists()
    base = type(tiny("llama").build_on_meta()).from_pretrained(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "out")
    assert all(torch.equal(parameter, found[name]) for name, parameter in again.named_parameters())
