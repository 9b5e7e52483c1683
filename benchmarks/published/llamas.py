"""Published runs of Llama models on accelerators: rows of a CSV, captured as they ran and priced by the catalogue.

Nothing of the catalogue is fitted to them. Each is priced with the attention kernel that its software has, by the
column `attention`, and with the catalogue's default. ZeRO-3 is priced as `free`, HSDP as `free_in_node`; FSDP keeps
what is outside of blocks from forward to backward, torchtitan the last block too. `selective` saves every second
product where the column `saves` says so, as torchtitan does, else every one, as osdp does. A peak is compared with what
its source reads: bytes that are allocated, or reserved, which torchtitan reads with expandable segments.
"""

from __future__ import annotations

import csv
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import osdp.model.selective
from osdp.cluster import Cluster, device
from osdp.cluster.reserve import FRAGMENTS
from osdp.cost.graph import StepGraph, step_graph
from osdp.cost.layout import Layout, Variants
from osdp.cost.training import Training
from osdp.cost.units import Option
from osdp.model.capture import capture
from osdp.model.graph import ModelGraph
from osdp.model.source import load_model
from osdp.recompute import Recompute
from osdp.sharding import FREE, FREE_IN_NODE, KEEP, KEEP_IN_NODE, ShardingMode

from .runs import HERE

FILE = HERE / "llama-fsdp.csv"
GIB = 1 << 30
KEPT = {FREE: KEEP, FREE_IN_NODE: KEEP_IN_NODE}
SHAPE = ("layers", "width", "ffn", "heads", "kv_heads", "vocab")


@dataclass(frozen=True)
class LlamaRun:
    """One published run; figures that its source does not give are the catalogue's."""

    source: str
    model: str
    shape: tuple[int, ...]
    tied: bool
    seq_len: int
    cluster: Cluster
    batch: int
    training: Training
    mode: ShardingMode
    recompute: Recompute
    half_of_products: bool
    keeps_root: bool
    keeps_last: bool
    tokens_per_second_per_gpu: float
    peak_gib: float | None
    peak_is_reserved: bool


def read_llamas(path: Path = FILE) -> list[LlamaRun]:
    with path.open(encoding="utf-8", newline="") as file:
        return [_run(row) for row in csv.DictReader(file)]


def _run(row: dict[str, str]) -> LlamaRun:
    training = Training.of(row["precision"], "adamw-fused", accumulation=int(row["accumulation"]))
    return LlamaRun(
        source=row["source"],
        model=row["model"],
        shape=tuple(int(row[key]) for key in SHAPE),
        tied=row["tied"] == "yes",
        seq_len=int(row["seq_len"]),
        cluster=_cluster(row),
        batch=int(row["batch"]),
        training=replace(training, compiled=row["compiled"] == "yes"),
        mode=ShardingMode(row["mode"]),
        recompute=Recompute(row["recompute"]),
        half_of_products=row["saves"] == "every second product",
        keeps_root=row["engine"] in ("fsdp", "torchtitan"),
        keeps_last=row["engine"] == "torchtitan",
        tokens_per_second_per_gpu=float(row["tokens_per_second_per_gpu"]),
        peak_gib=float(row["peak_gib"]) if row["peak_gib"] else None,
        peak_is_reserved=row["peak_is"] == "reserved",
    )


def _cluster(row: dict[str, str]) -> Cluster:
    """The catalogue's device, with the rates that the source states in place of a data sheet's."""
    chosen = device(row["device"]).with_attention(row["attention"])
    if row["memory_tbytes"]:
        chosen = replace(chosen, memory_bytes_per_second=float(row["memory_tbytes"]) * 1e12)
    if row["node_gbytes"]:
        usual = 300e9  # NVLink 3, which the device is sold with
        rate = chosen.node_link.bytes_per_second * float(row["node_gbytes"]) * 1e9 / usual
        chosen = replace(chosen, node_link=replace(chosen.node_link, bytes_per_second=rate))
    made = Cluster.of(chosen, nodes=int(row["nodes"]), devices_per_node=int(row["devices_per_node"]))
    made = replace(made, expandable_segments=row["peak_is"] == "reserved")
    return made.with_network(float(row["network_gbit"]) * 1e9 / 8) if row["network_gbit"] else made


def _half_of_products() -> osdp.model.selective.Contexts:
    """Contexts that save attention and every second product of a block, as torchtitan's selective checkpoint does."""
    counts: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = operator is torch.ops.aten.mm.default
        counts[context.is_recompute] += is_product
        saved = operator in osdp.model.selective.KEPT and not (is_product and counts[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@contextmanager
def _saving(half_of_products: bool) -> Iterator[None]:
    usual = osdp.model.selective.selective_contexts
    osdp.model.selective.selective_contexts = _half_of_products if half_of_products else usual
    try:
        yield
    finally:
        osdp.model.selective.selective_contexts = usual


@cache
def _graph(shape: tuple[int, ...], tied: bool, seq_len: int, compiled: bool, half_of_products: bool) -> ModelGraph:
    layers, width, ffn, heads, kv_heads, vocab = shape
    config: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": seq_len,
        "attn_implementation": "sdpa",
        "tie_word_embeddings": tied,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        source = load_model(str(path), seq_len=seq_len)
    given = {"loss": source.loss, "seq_len": seq_len, "name": "llama", "device": device("A100-80GB")}
    with _saving(half_of_products):
        return capture(source.build_on_meta(), source.inputs, compute_dtype="bf16", compiled=compiled, **given)


def layout_of(run: LlamaRun) -> Layout:
    """Every block whole, and recomputed as it was."""
    variants = Variants(_graph(run.shape, run.tied, run.seq_len, run.training.compiled, run.half_of_products))
    wanted = [replace(plain, recompute=run.recompute) for plain in variants.plainest()]
    chosen = [
        again if again in variants.of(index) else plain
        for index, (plain, again) in enumerate(zip(variants.plainest(), wanted, strict=True))
    ]
    return variants.layout(chosen)


class PricedLlama(NamedTuple):
    run: LlamaRun
    tokens_per_second_per_gpu: float
    with_default: float
    peak_bytes: float

    @property
    def error(self) -> float:
        """Of the throughput: above 0 it was predicted too high."""
        return self.tokens_per_second_per_gpu / self.run.tokens_per_second_per_gpu - 1

    @property
    def peak_error(self) -> float | None:
        """Of the peak, where the source has one."""
        return None if self.run.peak_gib is None else self.peak_bytes / GIB / self.run.peak_gib - 1

    @property
    def error_with_default(self) -> float:
        """The same with the attention kernel that the catalogue takes where none is asked for."""
        return self.with_default / self.run.tokens_per_second_per_gpu - 1


def step_of(run: LlamaRun, layout: Layout, cluster: Cluster | None = None) -> StepGraph:
    kept = Option(KEPT.get(run.mode, run.mode))
    blocks = [index for index, each in enumerate(layout.staged) if each.stage.is_block]
    freed = set(blocks[:-1] if run.keeps_last else blocks if run.keeps_root else range(len(layout.staged)))
    options = [
        Option(run.mode) if index in freed else kept for index, each in enumerate(layout.staged) for _ in each.units
    ]
    return step_graph(layout, options, run.batch, run.training, cluster or run.cluster)


def price(run: LlamaRun) -> PricedLlama:
    layout = layout_of(run)
    step, usual = step_of(run, layout), device(run.cluster.device.name).attention
    tokens = run.batch * run.training.accumulation * run.seq_len
    with_default = tokens / step_of(run, layout, run.cluster.with_attention(usual)).seconds
    timeline, cluster = step.timeline(), run.cluster
    peak = float(timeline.peak_bytes)
    if run.peak_is_reserved:
        fragments = cluster.reserve[FRAGMENTS]
        peak = (peak + timeline.idle_pool_bytes) * (cluster.limit_bytes + fragments) / cluster.limit_bytes
    return PricedLlama(run, tokens / step.seconds, with_default, peak)


def llama_rows(priced: Sequence[PricedLlama]) -> list[dict[str, Any]]:
    return [
        {
            "source": each.run.source,
            "model": each.run.model,
            "tokens": each.run.seq_len,
            "devices": each.run.cluster.word,
            "batch": f"{each.run.batch}x{each.run.training.accumulation}",
            "mode": each.run.mode,
            "attention": each.run.cluster.device.attention,
            "recompute": each.run.recompute,
            "compiled": each.run.training.compiled,
            "published": round(each.run.tokens_per_second_per_gpu),
            "predicted": round(each.tokens_per_second_per_gpu),
            "error %": round(100 * each.error, 1),
            "default %": round(100 * each.error_with_default, 1),
            "peak GiB": each.run.peak_gib,
            "predicted GiB": round(each.peak_bytes / GIB, 1),
            "peak %": None if each.peak_error is None else round(100 * each.peak_error, 1),
        }
        for each in priced
    ]
