"""A plan for an accelerator traces the accelerator's kernels.

- Attention is the kernel that torch chooses on the device, by mask, dtype, head width and generation.
- A layer with dropout saves what the published formula says, and not the scores.
- The dry run of such a model needs what its timeline says, to the byte.
- Nothing stays replaced, whatever the model's own modules imported.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planned import plan_by_hand
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention  # by name, as users' modules do

from osdp._torch import FakeTensorMode, TorchDispatchMode
from osdp.cluster.device import device
from osdp.cost.graph import step_graph_of
from osdp.cost.units import OPERATORS
from osdp.model.capture import capture, scaled_inputs
from osdp.model.device_kernels import kernels_of
from osdp.sharding import FREE, KEEP, REPLICATE
from osdp.verify import verify

pytestmark = pytest.mark.filterwarnings("ignore:.*returned a view tensor.*")
WIDTH, HEADS, LENGTH = 64, 4, 32


class Block(nn.Module):
    """A layer as in Megatron: what the formula counts, each once."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        batch = x.shape[0]
        qkv = self.qkv(self.norms[0](x)).view(batch, LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = scaled_dot_product_attention(*qkv, attn_mask=mask, dropout_p=0.1, is_causal=mask is None)
        x = x + dropout(self.proj(scores.transpose(1, 2).reshape(batch, LENGTH, WIDTH)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), 0.1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, None if mask is None else mask[:, None])
        return self.head(x).float().logsumexp(-1).mean()


def example(*, masked: bool) -> tuple[Tensor, ...]:
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    return (tokens, torch.ones(2, LENGTH, LENGTH, dtype=torch.bool).tril()) if masked else (tokens,)


@pytest.mark.parametrize("masked", [False, True])
def test_a_layer_with_dropout_saves_what_the_formula_says(masked: bool) -> None:
    """34·s·h bytes of a layer and, instead of the scores, 4 bytes a head and token; with a mask, the mask too."""
    layer = {
        on: capture(Model(), example(masked=masked), device=device(on)).blocks[1].plain.forward_delta.per_sample
        for on in ("A100-80GB", "CPU")
    }
    size = LENGTH * WIDTH
    statistics = 2 * 2 * LENGTH * 2  # mean and scale of two norms
    fused = 34 * size + 4 * HEADS * LENGTH + statistics + (2 * LENGTH**2 if masked else 0)
    assert layer["A100-80GB"] == fused
    assert layer["CPU"] > fused + 4 * HEADS * LENGTH**2


@pytest.mark.parametrize("masked", [False, True])
def test_the_dry_run_needs_what_the_timeline_says(masked: bool) -> None:
    inputs = example(masked=masked)
    graph = capture(Model(), inputs, device=device("A100-80GB"))
    plan = plan_by_hand(
        graph,
        "2x2",
        modes=(FREE, KEEP, REPLICATE),
        granularity=OPERATORS,
        recompute=(True, False),
        precision="bf16",
        device="A100-80GB",
    )
    peak = step_graph_of(plan, graph).timeline().peak_bytes
    found = verify(plan, graph, build=Model, inputs=scaled_inputs(inputs), loss=None)
    assert abs(found.measured_peak_bytes - peak) <= 8


class Kernels(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
MATH = "bmm"


@pytest.mark.parametrize(
    ("on", "dtype", "width", "key_heads", "masked", "kernel"),
    [
        ("A100-80GB", torch.bfloat16, 64, 4, False, FLASH),
        ("A100-80GB", torch.bfloat16, 64, 2, False, FLASH),
        ("A100-80GB", torch.bfloat16, 60, 4, False, FLASH),
        ("A100-80GB", torch.bfloat16, 64, 4, True, EFFICIENT),
        ("A100-80GB", torch.float32, 64, 4, False, EFFICIENT),
        ("A100-80GB", torch.bfloat16, 512, 4, False, EFFICIENT),
        ("A100-80GB", torch.float32, 63, 4, True, MATH),
        ("A100-80GB", torch.bfloat16, 64, 2, True, MATH),
        ("V100-32GB", torch.float16, 64, 4, False, EFFICIENT),
        ("V100-32GB", torch.bfloat16, 64, 4, False, MATH),
        ("CPU", torch.bfloat16, 64, 4, False, "_scaled_dot_product_flash_attention_for_cpu"),
    ],
)
def test_attention_is_the_kernel_that_torch_chooses(
    on: str, dtype: torch.dtype, width: int, key_heads: int, masked: bool, kernel: str
) -> None:
    with FakeTensorMode(), kernels_of(device(on), nn.Identity()), Kernels() as seen:
        query = torch.empty(2, 4, 10, width, dtype=dtype, requires_grad=True)
        key = torch.empty(2, key_heads, 10, width, dtype=dtype, requires_grad=True)
        mask = torch.ones(10, 10, dtype=torch.bool) if masked else None
        grouped = key_heads != 4
        out = F.scaled_dot_product_attention(query, key, key, attn_mask=mask, enable_gqa=grouped)
        assert out.shape == query.shape
        out.sum().backward()
        assert key.grad is not None and key.grad.shape == key.shape
    assert kernel in seen.names
    fused = sum(name.startswith("_scaled_dot_product") for name in seen.names)
    assert fused == (0 if kernel == MATH else 2)  # and its backward


def test_nothing_stays_replaced() -> None:
    before = F.scaled_dot_product_attention, F.dropout, F.rms_norm, scaled_dot_product_attention, dropout
    with pytest.raises(KeyError), kernels_of(device("A100-80GB"), Model()):
        assert globals()["dropout"] is F.dropout is not before[1]
        raise KeyError
    assert (F.scaled_dot_product_attention, F.dropout, F.rms_norm) == before[:3]
    assert (globals()["scaled_dot_product_attention"], globals()["dropout"]) == before[3:]


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = norm(x)
        return self.head(x).mean()


def test_a_norm_saves_its_input_and_a_number_a_row() -> None:
    saved = {
        on: capture(Norms(), (torch.ones(2, LENGTH, WIDTH),), device=device(on)).blocks[1].plain.forward_delta
        for on in ("A100-80GB", "CPU")
    }
    assert saved["A100-80GB"].per_sample == 2 * LENGTH * WIDTH + 4 * LENGTH < saved["CPU"].per_sample


class Grouped(nn.Module):
    """Experts whose tokens are sorted by expert: one product of groups."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        ends = torch.arange(1, 5, dtype=torch.int32) * (rows.shape[0] // 4)
        return self.head(torch._grouped_mm(rows, self.weight, offs=ends)).mean()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_products_of_groups_are_traced_in_either_precision(dtype: str) -> None:
    graph = capture(Grouped(), (torch.ones(2, LENGTH, WIDTH),), compute_dtype=dtype)
    forward = 2 * LENGTH * WIDTH * WIDTH
    head = 2 * LENGTH * WIDTH
    assert graph.flops_at(2) == 2 * (2 * forward + 3 * head)
