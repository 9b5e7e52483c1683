"""Claims: presets have exactly their published parameters and trace on fake tensors; bad specs say why."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from osdp.errors import UsageError
from osdp.model.gpt import GPT, GPTConfig
from osdp.model.source import ModelSource, load_model, presets

OWN = [name for name, preset in presets().items() if preset.kind == "gpt"]
HF = [name for name, preset in presets().items() if preset.kind == "hf"]

# Typed here a second time, from the publications, so that an edit of the data cannot go unnoticed.
PUBLISHED = {
    "gpt3-175b": 174_604_259_328,
    "gpt2-xl": 1_557_611_200,
    "bert-large": 335_174_458,
    "opt-30b": 29_974_540_288,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "t5-11b": 11_307_321_344,
    "vit-huge": 632_045_800,
    "mixtral-8x7b": 46_702_792_704,
}

TINY_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "dtype": "bfloat16",
}
# Embedding and head, then per layer: q and o, k and v, three feed-forward matrices, two norms; the last norm.
TINY_LLAMA_PARAMETERS = 2 * 128 * 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64 + 2 * 32) + 32

SMALL = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2},
    "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
    "opt": {"hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "llama": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    "vit": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
    "mixtral": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return file


class Recorder(TorchDispatchMode):
    """Keeps the operators that ran, and the rows of every grouped matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.grouped_rows: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__)
        if func.__name__ == "_grouped_mm.default" and args[1].dim() == 3:
            self.grouped_rows.add(args[0].shape[0])
        return func(*args, **(kwargs or {}))


def trace(source: ModelSource, batch_size: int, dtype: torch.dtype) -> tuple[nn.Module, Recorder]:
    """Forward and backward on fake tensors; a shape that depends on data raises."""
    module = source.build_on_meta()
    args, kwargs = source.inputs(batch_size)
    real: dict[Any, Any] = {}

    def fake(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype)

    with FakeTensorMode(), Recorder() as recorder:
        for child in module.modules():
            for key, parameter in child._parameters.items():
                if parameter is not None:
                    child._parameters[key] = real.setdefault(parameter, nn.Parameter(fake(parameter)))
            for key, buffer in child._buffers.items():
                if buffer is not None:
                    child._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype)
        output = module(*map(fake, args), **{key: fake(value) for key, value in kwargs.items()})
        source.loss(output).backward()
    return module, recorder


@pytest.mark.parametrize("name", presets())
def test_preset_has_exactly_its_published_parameters(name: str) -> None:
    source = load_model(name)
    module = source.build_on_meta()
    assert {tensor.device.type for tensor in (*module.parameters(), *module.buffers())} == {"meta"}
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert module.training
    assert count(module) == source.published_parameters == presets()[name].parameters
    assert presets()[name].parameters == PUBLISHED.get(name, count(module))


@pytest.mark.parametrize("name", OWN)
def test_gpt_count_is_the_arithmetic_of_its_shape(name: str) -> None:
    config = presets()[name].config
    layers, widths, vocab = config["layers"], config["widths"], config["vocab_size"]
    expected = sum(n * (12 * d * d + 13 * d) for n, d in zip(layers, widths, strict=True))
    expected += sum(a * b + b for a, b in pairwise(widths))
    expected += (vocab + config["positions"]) * widths[0] + 2 * widths[-1]
    expected += 0 if config.get("tied", True) else vocab * widths[-1]
    assert presets()[name].parameters == expected


@pytest.mark.parametrize("name", HF)
def test_architecture_of_hf_preset_traces_with_fused_attention(name: str, tmp_path: Path) -> None:
    config = dict(presets()[name].config)
    config |= {"attn_implementation": "sdpa", **SMALL[config["model_type"]]}
    source = load_model(str(write_config(tmp_path, config)))
    if source.seq_len is not None:
        source = load_model(str(tmp_path), seq_len=32)
    module, recorder = trace(source, 2, torch.bfloat16)
    assert [key for key, parameter in module.named_parameters() if parameter.grad is None] == []
    fused = any("scaled_dot_product_flash" in operator for operator in recorder.names)
    assert fused == (config["model_type"] != "t5")  # T5 drops attention probabilities; see presets.toml
    if config["model_type"] == "mixtral":  # two experts a token, not all eight
        assert recorder.grouped_rows == {2 * 2 * 32}


@pytest.mark.parametrize("name", ["gpt-tiny", "gpt-small-27m", "gpt-pyramid"])
def test_gpt_traces(name: str) -> None:
    module, recorder = trace(load_model(name), 3, torch.float32)
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert any("scaled_dot_product_flash" in operator for operator in recorder.names)


def test_gpt_is_causal_and_learns() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=16, positions=8, layers=(1, 1), widths=(16, 32), head_width=8, tied=False))
    tokens = torch.arange(8).view(1, 8)
    changed = tokens.clone()
    changed[0, 5] = 9
    same = (model(tokens) - model(changed)).abs().amax(-1)[0] < 1e-6
    assert same.tolist() == [True] * 5 + [False] * 3
    targets = tokens.roll(-1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = model(tokens, targets)
    for _ in range(20):
        optimizer.zero_grad()
        model(tokens, targets).backward()
        optimizer.step()
    assert model(tokens, targets) < before / 2


def test_gpt_ties_its_head_and_rejects_what_does_not_fit() -> None:
    model = GPT(GPTConfig(vocab_size=16, positions=8, layers=(1,), widths=(16,), head_width=8))
    assert model.head.weight is model.tokens.weight
    for bad in ({"widths": (16, 32)}, {"layers": (1, 1), "widths": (16, 32)}, {"head_width": 5}):
        with pytest.raises(UsageError):
            GPTConfig(**({"vocab_size": 16, "positions": 8, "layers": (1,), "widths": (16,)} | bad))


def test_inputs_have_batch_and_length() -> None:
    (tokens, targets), kwargs = load_model("gpt-tiny", seq_len=16).inputs(5)
    assert tokens.shape == targets.shape == (5, 16) and tokens.is_meta and not kwargs
    args, kwargs = load_model("llama3-8b", seq_len=10_000).inputs(2)
    assert not args and {key: tuple(value.shape) for key, value in kwargs.items()} == {
        "input_ids": (2, 10_000),
        "labels": (2, 10_000),
    }
    source = load_model("t5-11b", seq_len=100)
    assert (source.seq_len, source.sample_tokens) == (100, 200)
    vit = load_model("vit-huge").inputs(2)[1]
    assert vit["pixel_values"].shape == (2, 3, 224, 224) and vit["labels"].shape == (2,)


def test_config_json_and_its_folder(tmp_path: Path) -> None:
    file = write_config(tmp_path, TINY_LLAMA)
    for spec in (file, tmp_path):
        source = load_model(str(spec))
        assert count(source.build_on_meta()) == TINY_LLAMA_PARAMETERS
        assert (source.name, source.seq_len, source.published_parameters) == (tmp_path.name, 256, None)
    real = source.build()
    tokens = torch.zeros(1, 4, dtype=torch.long)
    assert 4.0 < source.loss(real(input_ids=tokens, labels=tokens)).item() < 6.0  # ln 128 = 4.85: initialised


def test_config_json_without_architectures_is_a_causal_language_model(tmp_path: Path) -> None:
    config = {key: value for key, value in TINY_LLAMA.items() if key != "architectures"}
    source = load_model(str(write_config(tmp_path, config)))
    assert type(source.build_on_meta()).__name__ == "LlamaForCausalLM"


FUNCTIONS = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.a = nn.Linear(4, 4, device=device)
        self.b = nn.Linear(4, 4, device=device)
        self.b.weight = self.a.weight
    def forward(self, x, table, scale=1.0):
        return self.b(self.a(x)) * scale

def plain():
    "A tied pair."
    return Tied(None), (torch.randn(2, 4), torch.randn(7, 4), 0.5), lambda output: output.mean()

def on_cpu():
    return Tied("cpu"), {"x": torch.randn(1, 4), "table": torch.randn(7, 4)}

def raising():
    raise ValueError("no weights here")

def one():
    return (nn.Linear(1, 1),)

def number():
    return 3

def no_module():
    return 3, ()

def no_inputs():
    return nn.Linear(1, 1), 3

def no_tensor():
    return nn.Linear(1, 1), (3,)

def no_loss():
    return nn.Linear(1, 1), (torch.ones(1, 1),), 3

constant = 3
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_functions.py").write_text(FUNCTIONS)
    (tmp_path / "my_broken.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("my_functions", None)


@pytest.mark.usefixtures("functions")
def test_function_is_scaled_along_the_batch_only() -> None:
    source = load_model("my_functions:plain")
    (x, table, scale), kwargs = source.inputs(6)
    assert (tuple(x.shape), tuple(table.shape), scale, kwargs) == ((6, 4), (7, 4), 0.5, {})
    assert x.is_meta and source.description == "A tied pair."
    assert source.loss(torch.tensor([1.0, 3.0])) == 2.0
    assert not next(source.build().parameters()).is_meta and count(source.build_on_meta()) == 16 + 4 + 4


@pytest.mark.usefixtures("functions")
def test_function_that_insists_on_a_device_still_gives_meta_and_tied() -> None:
    source = load_model("my_functions:on_cpu")
    module = source.build_on_meta()
    assert all(parameter.is_meta for parameter in module.parameters()) and count(module) == 24
    args, kwargs = source.inputs(3)
    assert not args and kwargs["x"].shape == (3, 4) and kwargs["x"].is_meta
    for output in (torch.ones(3, 4), {"logits": torch.ones(1)}):
        with pytest.raises(UsageError, match="no scalar loss"):
            source.loss(output)


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("my_functions:raising", "raised ValueError: no weights here"),
        ("my_functions:one", "returned tuple of 1; return"),
        ("my_functions:number", "returned int; return"),
        ("my_functions:no_module", "returned int first, not an nn.Module"),
        ("my_functions:no_inputs", "returned int as inputs"),
        ("my_functions:no_tensor", "no example input is a tensor"),
        ("my_functions:no_loss", "returned int as loss"),
        ("my_functions:constant", "has no function 'constant'"),
        ("my_functions:absent", "has no function 'absent'"),
        ("my_functions:", "give both names"),
        ("my_absent:function", "cannot import 'my_absent'.*ModuleNotFoundError"),
        ("my_broken:function", "cannot import 'my_broken'.*ZeroDivisionError"),
        ("absent/config.json", "there is no such file"),
        ("absent/folder", "there is no such file"),
        (".", "config.json: there is no such file"),
        ("llama3-8", "did you mean llama3-8b.*osdp models"),
        ("zzz", "unknown model 'zzz': `osdp models`"),
    ],
)
def test_bad_spec_says_why(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_model(spec)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["NoSuchModel"]}, "has no NoSuchModel"),
        ({"architectures": ["LlamaModel"]}, "LlamaModel computes no loss"),
        ({"model_type": "vit", "architectures": None}, "no causal language model of type vit"),
        ({"model_type": "nope"}, "rejects the config.*nope"),
        ({"hidden_size": "wide"}, "rejects the config.*hidden_size"),
    ],
)
def test_bad_config_says_why(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        load_model(str(write_config(tmp_path, TINY_LLAMA | change)))


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not valid JSON"), ("[]", "no model_type"), ("{}", "no model_type")]
)
def test_file_that_is_no_config_says_why(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        load_model(str(tmp_path))


def test_layerdrop_cannot_be_planned(tmp_path: Path) -> None:
    config = dict(presets()["opt-30b"].config) | SMALL["opt"] | {"layerdrop": 0.1}
    with pytest.raises(UsageError, match=r"layerdrop 0\.1"):
        load_model(str(write_config(tmp_path, config))).build_on_meta()


@pytest.mark.parametrize("name", ["gpt-tiny", "gpt2-xl", "bert-large", "opt-30b"])
def test_length_is_limited_by_learned_positions(name: str) -> None:
    limit = presets()[name].seq_len
    assert limit is not None and load_model(name, seq_len=limit).seq_len == limit
    with pytest.raises(UsageError, match=f"length {limit + 1} exceeds the {limit} learned positions of {name}"):
        load_model(name, seq_len=limit + 1)


@pytest.mark.parametrize(("name", "length"), [("vit-huge", 8), ("gpt-tiny", 0), ("llama3-8b", -1)])
def test_length_that_means_nothing_is_refused(name: str, length: int) -> None:
    with pytest.raises(UsageError, match=r"leave --seq-len out|below 1"):
        load_model(name, seq_len=length)


@pytest.mark.parametrize("name", ["gpt-tiny", "bert-large", "vit-huge"])
def test_batch_below_one_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="batch size 0 is below 1"):
        load_model(name).inputs(0)


def test_missing_transformers_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"pip install osdp-torch\[hf\]"):
        load_model("gpt2-xl")
    assert load_model("gpt3-175b").seq_len == 2048


def test_listing_presets_imports_no_torch() -> None:
    code = "import sys; from osdp.model.source import presets; print(len(presets()), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(presets())), "False"]


def test_the_reference_page_shows_the_data() -> None:
    page = (Path(__file__).parents[1] / "docs/reference/models.md").read_text(encoding="utf-8")
    for preset in presets().values():
        length = preset.seq_len or "-"
        row = f"| `{preset.name}` | {preset.parameters:,} | {length} | {preset.description} | {preset.source} |"
        assert row in page
