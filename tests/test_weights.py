"""Weights go in and out of a model that runs a plan, as Hugging Face writes and reads them.

- What `save_pretrained` of transformers wrote is in the sharded model, to the bit: whole, split, tied, stacked experts,
  every mode, sharded over one file or several.
- What `osdp.save_pretrained` writes, `from_pretrained` reads, to the bit; and an adapter, peft.
- A rank reads its own part of a parameter and nothing else.
- A head that the files lack is initialised if asked for; anything else that does not fit is refused with a sentence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import batch_of, graph_of, tiny
from planned import plan_by_hand, whole_parameters
from ranks import run_ranks
from safetensors.torch import load_file, save_file

import osdp
from osdp.errors import OsdpError, UsageError
from osdp.planfile import Plan
from osdp.runtime import weights
from osdp.sharding import FREE, FREE_IN_NODE, FREE_TO_NODE, KEEP, KEEP_IN_NODE, REPLICATE

MIXED = (FREE, REPLICATE, KEEP)
NODES = (FREE_TO_NODE, FREE_IN_NODE, KEEP_IN_NODE, REPLICATE, KEEP, FREE)


def reference(name: str, folder: Path, max_shard_size: str = "20KB") -> Any:
    """A model with weights, as transformers writes it, in many files."""
    torch.manual_seed(3)
    model = tiny(name).build()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def plan_for(name: str, world: str, modes: tuple[str, ...]) -> Plan:
    return plan_by_hand(graph_of(name), world, modes=modes, granularity="operators", splits=((1, 1), (3, 2), (2, 2)))


def round_trip(name: str, plan: Plan, folder: Path, out: Path) -> dict[str, torch.Tensor]:
    model = osdp.parallelize(tiny(name).build_on_meta(), plan)
    osdp.load_pretrained(model, folder)
    osdp.save_pretrained(model, out, shard_bytes=20_000)
    return whole_parameters(model)


@pytest.mark.parametrize(
    ("name", "world", "modes"),
    [("llama", "2x2", NODES), ("qwen2", "2", MIXED), ("mixtral", "2", MIXED), ("gpt2", "2", MIXED), ("t5", "2", MIXED)],
)
def test_weights_go_in_and_out_to_the_bit(name: str, world: str, modes: tuple[str, ...], tmp_path: Path) -> None:
    model = reference(name, tmp_path / "in")
    plan = plan_for(name, world, modes)
    assert any(unit.splits > 1 for unit in plan.units) and {unit.mode for unit in plan.units} == set(modes)
    found = run_ranks(plan.cluster.world_size, round_trip, name, plan, tmp_path / "in", tmp_path / "out")
    own = dict(model.named_parameters())
    for rank in found:
        assert rank.keys() == own.keys()
        assert all(torch.equal(tensor, own[key]) for key, tensor in rank.items())
    again = type(model).from_pretrained(tmp_path / "out")
    assert all(torch.equal(tensor, again.state_dict()[key]) for key, tensor in model.state_dict().items())
    args, kwargs = batch_of(name, 2, seed=0)
    assert torch.equal(again.eval()(*args, **kwargs).loss, model.eval()(*args, **kwargs).loss)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1 and not list((tmp_path / "out").glob("*.partial"))


def read_shapes(plan: Plan, folder: Path) -> dict[str, tuple[int, int]]:
    read: dict[str, tuple[int, int]] = {}
    original = weights._Reader.slice

    class Watched:
        def __init__(self, part: Any, key: str) -> None:
            self.part, self.key, self.get_shape = part, key, part.get_shape

        def __getitem__(self, at: Any) -> torch.Tensor:
            tensor = self.part[at]
            total = torch.Size(self.part.get_shape()).numel()
            read[self.key] = read.get(self.key, (0, 0))[0] + tensor.numel(), total
            return tensor

    weights._Reader.slice = lambda reader, key: Watched(original(reader, key), key)  # type: ignore[method-assign]
    osdp.load_pretrained(osdp.parallelize(tiny("llama").build_on_meta(), plan), folder)
    return read


def test_a_rank_reads_its_own_part_and_nothing_else(tmp_path: Path) -> None:
    reference("llama", tmp_path)
    plan = plan_by_hand(graph_of("llama"), "2", modes=(FREE,), granularity="operators", splits=((1, 1), (2, 2)))
    first, second = run_ranks(2, read_shapes, plan, tmp_path)
    assert len(first) > 10 and first.keys() == second.keys()
    for key, (own, total) in first.items():
        assert own + second[key][0] == total and own < 0.52 * total, key  # 90 rows in two slices do not halve evenly


def head(plan: Plan, folder: Path) -> tuple[str, dict[str, torch.Tensor]]:
    model = osdp.parallelize(tiny("roberta").build_on_meta(), plan)
    with pytest.raises(UsageError) as refused:
        osdp.load_pretrained(model, folder)
    osdp.load_pretrained(model, folder, strict=False, seed=1)
    return str(refused.value), whole_parameters(model)


def test_a_new_head_is_initialised_if_asked_for(tmp_path: Path) -> None:
    """The files are of the base model: names without its prefix, and no classifier."""
    torch.manual_seed(3)
    base = tiny("roberta").build().roberta
    base.save_pretrained(tmp_path)
    plan = plan_by_hand(graph_of("roberta"), "2", modes=MIXED)
    (said, found), (_, other) = run_ranks(2, head, plan, tmp_path)
    assert "lacks classifier.dense.weight and 3 more" in said and "strict=False" in said
    assert all(torch.equal(found[f"roberta.{key}"], value) for key, value in base.named_parameters())
    assert 0.01 < found["classifier.dense.weight"].std() < 0.03 and not found["classifier.dense.bias"].any()
    assert all(torch.equal(found[key], other[key]) for key in found)


def test_a_plain_model_loads_casts_and_saves_without_ranks(tmp_path: Path) -> None:
    model = reference("gpt2", tmp_path, "5GB")
    other = tiny("gpt2").build()
    osdp.load_pretrained(other, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    osdp.save_pretrained(other, tmp_path, dtype=torch.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    saved = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert torch.equal(saved["transformer.wte.weight"], model.transformer.wte.weight.bfloat16())


def test_what_does_not_fit_is_refused_with_a_sentence(tmp_path: Path) -> None:
    model = reference("gpt2", tmp_path, "5GB")
    with pytest.raises(UsageError, match=r"neither model.safetensors nor .*`hf download"):
        osdp.load_pretrained(model, tmp_path / "nowhere")
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    save_file({**whole, "transformer.wpe.weight": torch.zeros(4, 32)}, file)
    before = model.transformer.wte.weight.detach().clone()
    with pytest.raises(UsageError, match=r"wpe.weight is \[4, 32\] in .* and \[16, 32\] in the model"):
        osdp.load_pretrained(model, tmp_path)
    save_file({**whole, "extra.weight": torch.zeros(4)}, file)
    with pytest.raises(UsageError, match=r"has extra.weight, which the model lacks"):
        osdp.load_pretrained(model, tmp_path)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UsageError, match="no safetensors file"):
        osdp.load_pretrained(model, tmp_path)
    (tmp_path / weights.INDEX).write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    with pytest.raises(UsageError, match="no weight_map of file names"):
        osdp.load_pretrained(model, tmp_path)
    assert torch.equal(model.transformer.wte.weight, before)


def save_to_nowhere(plan: Plan) -> str:
    model = osdp.parallelize(tiny("gpt2").build_on_meta(), plan)
    osdp.initialize(model)
    with pytest.raises(OsdpError) as refused:
        osdp.save_pretrained(model, Path("/dev/full/model"))
    return str(refused.value)


def test_what_cannot_be_written_is_said_on_every_rank() -> None:
    plan = plan_by_hand(graph_of("gpt2"), "2", modes=MIXED)
    first, second = run_ranks(2, save_to_nowhere, plan)
    assert first == second and "/dev/full" in first
