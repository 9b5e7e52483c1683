"""The cells of the table: a model on hosts and links, under each of two memory limits, the most telling first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.cluster import bits_per_second

from .models import SHAPES, Shape, tiny

TIGHT, ROOMY = 0.45, 1.3  # of DDP's peak at batch 1: there it does not fit, here it just does
SHARES = (TIGHT, ROOMY)
LIMITS = {TIGHT: "DDP does not fit", ROOMY: "DDP just fits"}
# Clusters that people have, by devices of a host and what joins hosts: their ratio is compared with a cell's.
REAL = ("2x8xA100-80GB", "2x8xH100-80GB", "2x8xL4")


@dataclass(frozen=True)
class Setting:
    """A model on hosts and links. Its cells, one for each memory limit, share ranks, profile and attempts."""

    model: str
    hosts: int
    ranks_per_host: int
    across: str
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
        return f"{self.model}{size}-{self.hosts}x{self.ranks_per_host}-{self.across}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def sample_tokens(self) -> int:
        return self.shape.length * (2 if self.shape.kind == "encoder-decoder" else 1)

    @property
    def link_bytes_per_second(self) -> float:
        """Of a host, one way; where there is one host, nothing limits it."""
        return math.inf if self.hosts == 1 else bits_per_second(self.across) / 8


def settings(what: str = "throughput") -> list[Setting]:
    """All of them: first one of each kind of question, then the rest."""
    if what == "size":
        return [Setting(model, 2, 2, "500mbit") for model in ("deep", "wide")]
    if what == "ablations":
        return [Setting(model, 2, 2, "1gbit") for model in ("deep", "wide", "pyramid", "lora")]
    return list(dict.fromkeys((*_telling(), *_all())))


def _telling() -> Iterator[Setting]:
    yield Setting("deep", 2, 2, "1gbit")
    yield Setting("wide", 4, 1, "500mbit")
    yield Setting("deep", 2, 2, "200mbit")
    yield Setting("pyramid", 2, 2, "500mbit")
    yield Setting("experts", 2, 2, "1gbit")
    yield Setting("lora", 4, 1, "500mbit")
    yield Setting("bert", 2, 2, "1gbit")
    yield Setting("encoder-decoder", 2, 2, "1gbit")
    yield Setting("vit", 1, 4, "1gbit")
    yield Setting("small-blocks", 2, 2, "1gbit")
    yield Setting("deep", 4, 1, "100mbit")
    yield Setting("deep", 2, 4, "1gbit")
    yield Setting("wide", 2, 2, "2gbit")


def _all() -> Iterator[Setting]:
    for hosts, each, across in ((2, 2, "500mbit"), (4, 1, "200mbit"), (1, 4, "1gbit"), (2, 2, "2gbit")):
        for model in SHAPES:
            yield Setting(model, hosts, each, across)


def smoke() -> list[Setting]:
    """A few minutes of it."""
    return [Setting("deep", 2, 2, "500mbit", small=True)]


BYTES_HERE, BYTES_THERE = 8, 6  # of a parameter a step: gathered and reduced in fp32; there gathered in bf16


def alike(setting: Setting, flops_per_second: float, tokens: float) -> str:
    """The real clusters that balance compute and network like this setting, by the tokens that a device takes there.

    Compute lasts 6 FLOPs a parameter and token, the network so many bytes a parameter: their ratio is the same where
    tokens are to these as FLOPs of a host are to bytes of its link.
    """
    from osdp.cluster import Cluster

    if setting.hosts == 1:
        return "any single host"
    own = flops_per_second * setting.ranks_per_host / setting.link_bytes_per_second
    found = []
    for text in REAL:
        real = Cluster.parse(text)
        dtype = "bf16" if real.device.peak_flops.get("bf16", 0) > 0 else "fp16"
        host = real.device.peak_flops[dtype] * real.device.matmul_efficiency * real.devices_per_node
        ratio = host / real.network.bytes_per_second
        found.append(f"{text} at {tokens * ratio / own * BYTES_THERE / BYTES_HERE:,.0f} tokens a device")
    return ", ".join(found)
