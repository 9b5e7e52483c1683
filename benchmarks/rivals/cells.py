"""The cells of the table: a model on hosts and links under a memory limit, the most telling first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.cluster import bits_per_second

from .models import SHAPES, Shape, tiny

TIGHT, ROOMY = 0.45, 1.3  # of DDP's peak at batch 1: there it does not fit, here it just does
LIMITS = {TIGHT: "DDP does not fit", ROOMY: "DDP just fits"}
# Clusters that people have, by devices of a host and what joins hosts: their ratio is compared with a cell's.
REAL = ("2x8xA100-80GB", "2x8xH100-80GB", "2x8xL4")


@dataclass(frozen=True)
class Cell:
    model: str
    hosts: int
    ranks_per_host: int
    across: str
    share: float  # of DDP's memory
    small: bool = False  # a test's size

    @property
    def shape(self) -> Shape:
        return tiny(SHAPES[self.model]) if self.small else SHAPES[self.model]

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def name(self) -> str:
        size = "-tiny" if self.small else ""
        return f"{self.model}{size}-{self.hosts}x{self.ranks_per_host}-{self.across}-{round(100 * self.share)}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def sample_tokens(self) -> int:
        return self.shape.length * (2 if self.shape.kind == "encoder-decoder" else 1)

    @property
    def link_bytes_per_second(self) -> float:
        """Of a host, one way; where there is one host, nothing limits it."""
        return math.inf if self.hosts == 1 else bits_per_second(self.across) / 8


def cells(what: str = "throughput") -> Iterator[Cell]:
    """All of them: first one of each kind of question, then the rest."""
    seen = set()
    if what == "size":
        chosen = [Cell(model, 2, 2, "500mbit", ROOMY) for model in ("deep", "wide")]
    elif what == "ablations":
        chosen = [Cell(model, 2, 2, "500mbit", TIGHT) for model in ("deep", "wide", "pyramid", "lora")]
    else:
        chosen = [*_telling(), *_all()]
    for cell in chosen:
        if cell.name not in seen:
            seen.add(cell.name)
            yield cell


def _telling() -> Iterator[Cell]:
    yield Cell("deep", 2, 2, "500mbit", TIGHT)
    yield Cell("deep", 2, 2, "500mbit", ROOMY)
    yield Cell("wide", 4, 1, "500mbit", TIGHT)
    yield Cell("pyramid", 2, 2, "200mbit", TIGHT)
    yield Cell("experts", 2, 2, "500mbit", TIGHT)
    yield Cell("lora", 4, 1, "200mbit", TIGHT)
    yield Cell("bert", 1, 4, "1gbit", TIGHT)
    yield Cell("encoder-decoder", 2, 2, "1gbit", ROOMY)
    yield Cell("vit", 4, 1, "1gbit", ROOMY)
    yield Cell("deep", 4, 1, "100mbit", ROOMY)
    yield Cell("deep", 2, 4, "1gbit", TIGHT)
    yield Cell("wide", 2, 2, "2gbit", ROOMY)


def _all() -> Iterator[Cell]:
    settings = ((2, 2, "500mbit"), (4, 1, "200mbit"), (1, 4, "1gbit"), (2, 2, "2gbit"))
    for hosts, each, across in settings:
        for share in (TIGHT, ROOMY):
            for model in SHAPES:
                yield Cell(model, hosts, each, across, share)


def smoke() -> list[Cell]:
    """A few minutes of it."""
    return [Cell("deep", 2, 2, "500mbit", TIGHT, small=True), Cell("wide", 4, 1, "200mbit", ROOMY, small=True)]


BYTES_HERE, BYTES_THERE = 8, 6  # of a parameter a step: gathered and reduced in fp32; there gathered in bf16


def alike(cell: Cell, flops_per_second: float, tokens: float) -> str:
    """The real clusters that balance compute and network like this cell, by the tokens that a device takes there.

    Compute lasts 6 FLOPs a parameter and token, the network so many bytes a parameter: their ratio is the same where
    tokens are to these as FLOPs of a host are to bytes of its link.
    """
    from osdp.cluster import Cluster

    if cell.hosts == 1:
        return "any single host"
    own = flops_per_second * cell.ranks_per_host / cell.link_bytes_per_second
    found = []
    for text in REAL:
        real = Cluster.parse(text)
        dtype = "bf16" if real.device.peak_flops.get("bf16", 0) > 0 else "fp16"
        host = real.device.peak_flops[dtype] * real.device.matmul_efficiency * real.devices_per_node
        ratio = host / real.network.bytes_per_second
        found.append(f"{text} at {tokens * ratio / own * BYTES_THERE / BYTES_HERE:,.0f} tokens a device")
    return ", ".join(found)
