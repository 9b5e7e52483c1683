"""Many plans of one model: over memory, devices and lengths of samples; the smallest cluster that is fast enough."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated

from msgspec import Meta

from osdp.cluster import Cluster, parse_bytes
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.errors import DoesNotFit, OsdpError, UsageError
from osdp.files import convert, read_toml
from osdp.model.graph import ModelGraph
from osdp.planfile import Plan
from osdp.planning import plan_graph
from osdp.report.page import WORTH_IT, way_name

SEARCH_SECONDS = 5.0  # of each plan: many are made
MOST_DEVICES = 16_384
DAY_SECONDS = 86_400


@dataclass(frozen=True)
class Case:
    """One cluster and length of samples with its best plan; figures are None where nothing fits."""

    devices: int
    nodes: int
    memory_bytes: int
    seq_len: int | None
    batch_size: int | None = None
    accumulation: int | None = None
    samples_per_second: float | None = None
    mfu: float | None = None
    peak_bytes: int | None = None
    best_usual: str | None = None
    gain: float | None = None  # over the best baseline; None where none of them fits
    gap: float | None = None  # what the proof leaves open

    @property
    def fits(self) -> bool:
        return self.samples_per_second is not None

    @property
    def tokens_per_second(self) -> float | None:
        if self.samples_per_second is None or self.seq_len is None:
            return None
        return self.samples_per_second * self.seq_len

    @property
    def worth_it(self) -> bool:
        return self.gain is not None and self.gain >= WORTH_IT


@dataclass(frozen=True)
class Asked:
    """How every case is trained."""

    training: Training
    global_batch: int | None = None
    batch: int | None = None
    search_seconds: float = SEARCH_SECONDS


def case_of(graph: ModelGraph, cluster: Cluster, asked: Asked) -> Case:
    size = {"devices": cluster.world_size, "nodes": cluster.nodes, "memory_bytes": cluster.total_bytes}
    empty = Case(**size, seq_len=graph.seq_len)
    try:
        plan = plan_graph(
            graph,
            cluster,
            asked.training,
            Rules(),
            batch=asked.batch,
            global_batch=asked.global_batch,
            search_seconds=asked.search_seconds,
        )
    except DoesNotFit:
        return empty
    usual, gain = best_usual(plan)
    return replace(
        empty,
        batch_size=plan.batch_size,
        accumulation=plan.accumulation,
        samples_per_second=plan.predicted.samples_per_second,
        mfu=plan.predicted.mfu,
        peak_bytes=plan.predicted.peak_bytes,
        best_usual=usual,
        gain=gain,
        gap=plan.certificate.gap,
    )


def best_usual(plan: Plan) -> tuple[str | None, float | None]:
    """The fastest baseline that fits, and how many times faster the plan is."""
    fitting = [each for each in plan.baselines if each.feasible]
    if not fitting:
        return None, None
    best = max(fitting, key=lambda each: each.samples_per_second)
    name = way_name(best.name, best.recompute)
    return name, plan.predicted.samples_per_second / best.samples_per_second


def cases(
    graphs: Iterable[ModelGraph], cluster: Cluster, *, memories: Sequence[int], devices: Sequence[int], asked: Asked
) -> Iterator[Case]:
    """Every combination; without memories or devices, the cluster's own."""
    for graph in graphs:
        for count in devices or [cluster.world_size]:
            resized = with_devices(cluster, count)
            for memory in memories or [cluster.total_bytes]:
                yield case_of(graph, replace(resized, memory_bytes=memory), asked)


def with_devices(cluster: Cluster, devices: int) -> Cluster:
    """As many devices in nodes like the cluster's; fewer than a node has are one node."""
    if cluster.measured and devices != cluster.world_size:
        raise UsageError(
            f"the collectives of {cluster.label} were measured on {cluster.world_size} devices and say nothing of "
            f"{devices}; give a cluster without measurements, such as '2x8xA100-80GB'"
        )
    each = min(devices, cluster.devices_per_node)
    if devices % each:
        raise UsageError(
            f"{devices} devices do not divide into nodes of {each}; give a multiple of {each}, or --cluster with "
            "other nodes"
        )
    return replace(cluster, nodes=devices // each, devices_per_node=each)


def read_memories(text: str) -> list[int]:
    """'16,24,40,80GiB': a size without a unit takes that of the last."""
    sizes = [size.strip() for size in text.split(",")]
    match = re.search(r"[A-Za-z]+$", sizes[-1])
    unit = match[0] if match else ""
    return [parse_bytes(size if re.search(r"[A-Za-z]$", size) else size + unit) for size in sizes]


# ---- the smallest cluster


@dataclass(frozen=True)
class Target:
    """What a cluster must reach: tokens or samples a second; `tokens` in `days` where that was asked."""

    per_second: float
    unit: str  # tok/s or samples/s
    tokens: float | None = None
    days: float | None = None

    def rate(self, case: Case) -> float:
        found = case.tokens_per_second if self.unit == "tok/s" else case.samples_per_second
        return found or 0.0


@dataclass(frozen=True)
class Sized:
    """The smallest cluster of one device that reaches the target; costs are None without a price."""

    device: str
    cluster: str
    case: Case
    reached: bool
    rate: float
    price_per_hour: float | None
    days: float | None
    cost: float | None  # of all tokens, where they were given


@dataclass(frozen=True)
class PriceFile:
    """Dollars an hour of one device, by its name in the catalogue."""

    prices: Mapping[str, Annotated[float, Meta(gt=0, le=1e6)]]


def read_prices(path: str) -> dict[str, float]:
    remedy = 'give a TOML file with [prices] and lines such as "A100-80GB" = 1.79, dollars an hour of one device'
    table = read_toml(path, remedy=remedy)
    try:
        found = dict(convert(PriceFile, table, name="prices", remedy=remedy).prices)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    if not found:
        raise UsageError(f"{path} has no price; {remedy}")
    return found


def read_target(text: str) -> Target:
    match = re.fullmatch(r"\s*([0-9.eE+]+)\s*(tok|tokens|samples)/s\s*", text)
    try:
        value = float(match[1]) if match else 0.0
    except ValueError:
        value = 0.0
    if match is None or not 0 < value < 1e15:
        raise UsageError(f"{text!r} is not a throughput; write it as '20000tok/s' or '500samples/s'")
    return Target(value, "samples/s" if match[2] == "samples" else "tok/s")


def smallest(
    graph: ModelGraph,
    base: Cluster,
    target: Target,
    asked: Asked,
    *,
    price: float | None = None,
    most_devices: int = MOST_DEVICES,
    say: Callable[[Case], None] = lambda _: None,
) -> Sized:
    """The smallest cluster of a device that reaches the target; where none does, the largest that was tried.

    Counts double, at first within a node; between the last two of them, whole nodes are tried by halves.
    """

    def tried(count: int) -> Case:
        found = case_of(graph, with_devices(base, count), asked)
        say(found)
        return found

    node, low = base.devices_per_node, 0
    counts = [count for count in _counts(node, most_devices) if not (asked.global_batch or 0) % count]
    best = tried(counts[0])
    for before, count in pairwise(counts):
        if target.rate(best) >= target.per_second:
            break
        low, best = before, tried(count)
    reached, count = target.rate(best) >= target.per_second, best.devices
    while reached and low >= node and count - low > node:
        middle = (low + count) // 2 // node * node
        if (asked.global_batch or 0) % middle:
            break
        found = tried(middle)
        if target.rate(found) >= target.per_second:
            count, best = middle, found
        else:
            low = middle
    return _sized(base, best, target, reached, price)


def _counts(node: int, most: int) -> list[int]:
    """1, 2, 4 and so on up to a node, then nodes by doubling."""
    inside = [1 << power for power in range(node.bit_length()) if 1 << power < node]
    nodes = [node << power for power in range(most.bit_length())]
    return [count for count in (*inside, *nodes) if count <= most] or [1]


def _sized(base: Cluster, best: Case, target: Target, reached: bool, price: float | None) -> Sized:
    rate = target.rate(best)
    hourly = None if price is None else price * best.devices
    days = target.tokens / rate / DAY_SECONDS if target.tokens and rate else None
    cost = None if hourly is None or days is None else hourly * 24 * days
    word = with_devices(base, best.devices).word
    return Sized(base.device.name, word, best, reached, rate, hourly, days, cost)


def ranked(found: Sequence[Sized]) -> list[Sized]:
    """Those that reach the target first: the cheapest, then the fewest devices."""

    def key(each: Sized) -> tuple[bool, float, int]:
        cost = each.cost if each.cost is not None else each.price_per_hour
        return not each.reached, cost if cost is not None else 0.0, each.case.devices

    if not any(each.reached for each in found):
        best = max(found, key=lambda each: each.rate)
        raise OsdpError(
            f"no cluster that was tried is fast enough; the fastest, {best.cluster}, reaches {best.rate:,.0f}: lower "
            "the target, or allow more with --most-devices"
        )
    return sorted(found, key=key)
