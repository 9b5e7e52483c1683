"""The answer: which unit is held how, at which batch size, what it costs, and the proof. Frozen, versioned, JSON.

A plan file is data: reading one runs no code, every field is checked, and so is the plan as a whole (osdp.plan_check).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from osdp.cluster import Cluster
from osdp.errors import UsageError
from osdp.files import convert, plain, read_json, write_json
from osdp.recompute import Recompute
from osdp.sharding import ShardingMode

PLAN_VERSION = 8
MOST_SAMPLES = 1 << 20  # of a step, as people may ask for it
MOST_TOKENS = 1 << 24  # of a sample
MOST_SPLITS = 16

Samples = Annotated[int, Meta(ge=1, le=1 << 32)]  # a tiny model on a large device may take many
Whole = Annotated[int, Meta(ge=0, le=1 << 60)]
Finite = Annotated[float, Meta(ge=-1e15, le=1e15)]
Granularity = Literal["whole", "parts", "operators"]
GRANULARITIES: tuple[Granularity, ...] = ("whole", "parts", "operators")
WHOLE, PARTS, OPERATORS = GRANULARITIES
Depth = Literal[1, 2]  # of prefetch
NotNegative = Annotated[float, Meta(ge=0, le=1e15)]


@dataclass(frozen=True)
class PlanModel:
    """The model a plan was made for, as far as a plan must know it.

    `uncalled` has the parameters that are in no unit, because no call of the model reaches them, with their elements.
    Of the `parameters`, `trained` are not frozen; None where it is not known.
    `sample_elements` are those of the largest input tensor, for one sample; 0 where it is not known. `assumptions` are
    what tracing took for granted, a line each; `unused` has the trainable parameters that the loss does not depend on.
    """

    name: str
    parameters: Whole
    seq_len: Annotated[int, Meta(ge=1, le=MOST_TOKENS)] | None
    uncalled: Mapping[str, Whole] = field(default_factory=dict)
    trained: Whole | None = None
    sample_elements: Whole = 0
    assumptions: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanUnit:
    """One unit: the modules that one gather brings in, and how their parameters are held.

    `name` is its first module, `modules` are all (several where parameters are tied); it holds what deeper units do
    not. Of `splits` slices, `sharded_splits` are held in `mode` and the others replicated. `block` is the block it
    belongs to, `recompute` how that block's activations are recomputed. With `reduce_once`, gradients of several
    micro-batches are reduced together after the last one; with `all_reduce_once`, each micro-batch reduce-scatters
    within the node, and only the last one all-reduces across nodes. With `gather_once`, a unit that is kept is
    gathered by the first micro-batch and freed by the last. With `two_levels`, what is exchanged over all ranks goes
    across nodes and through each node in two steps. `granularity` is how the block is gathered, the same for all
    of its units; see [Note: Granularity] in osdp.cost.units. Outside blocks it is "operators". `prefetch` is how many
    gathers each of the block's units issues ahead, the same for all of them; see [Note: Depth] in
    osdp.cost.gather_order. With `offload`, its parameters, gradients and optimizer states are on the host; see [Note:
    Offload] in osdp.cost.offload. A unit that is `reduced_with` another one leaves its gradients to that one's
    all-reduce; see osdp.cost.buckets. A unit of `experts` has those of one rank of the layout's dimension of experts,
    and is held by the ranks that have the same ones; see [Note: Expert layout] in osdp.cost.outer.
    """

    name: str
    modules: Annotated[tuple[str, ...], Meta(min_length=1)]
    block: str | None
    mode: str
    splits: Annotated[int, Meta(ge=1, le=MOST_SPLITS)]
    sharded_splits: Annotated[int, Meta(ge=0, le=MOST_SPLITS)]
    recompute: Recompute
    reduce_once: bool
    two_levels: bool
    parameters: Whole
    all_reduce_once: bool = False
    gather_once: bool = False
    granularity: Granularity = "whole"
    prefetch: Depth = 1
    offload: bool = False
    reduced_with: str | None = None
    experts: bool = False

    @property
    def sharding(self) -> ShardingMode:
        return ShardingMode(self.mode)


def unit_depths(units: Sequence[PlanUnit]) -> dict[str, int]:
    """How deep in the model every unit is: its shallowest module that holds modules of units, else its deepest one.

    Deeper units are sharded first, so that a unit gets what is left below its modules.
    """
    parts = [name.split(".") for unit in units for name in unit.modules if name]
    holders = {".".join(each[:length]) for each in parts for length in range(len(each))}

    def depth(unit: PlanUnit) -> int:
        levels = {name: len(name.split(".")) if name else 0 for name in unit.modules}
        holding = [level for name, level in levels.items() if name in holders]
        return min(holding) if holding else max(levels.values())

    return {unit.name: depth(unit) for unit in units}


Degree = Annotated[int, Meta(ge=1, le=4096)]


@dataclass(frozen=True)
class OuterLayout:
    """The dimensions of the ranks beside the data-parallel one that a plan is for.

    `tensor` ranks share every operator, `pipeline` stages share the blocks, of which the plan is for `stage`; with
    `interleave` above 1 each has so many chunks of them, which take turns. Over `expert` ranks each has some of the
    experts. The plan's cluster has the ranks of the data-parallel dimension, those of experts among them, `whole` is
    the word of all; its micro-batches are those of the pipeline. `tensor_seconds` of the step are the tensor
    dimension's collectives, the all-to-alls of experts and the messages between stages, `bubble_seconds` the pipeline's
    wait for its first and last micro-batches. With `sequence_parallel` each tensor-parallel rank has a part of the
    tokens outside of the operators that they share.
    """

    tensor: Degree = 1
    pipeline: Degree = 1
    stage: Annotated[int, Meta(ge=0, le=4095)] = 0
    whole: str = ""
    tensor_seconds: NotNegative = 0.0
    bubble_seconds: NotNegative = 0.0
    interleave: Degree = 1
    expert: Degree = 1
    sequence_parallel: bool = False

    @property
    def is_larger(self) -> bool:
        return self.tensor * self.pipeline * self.expert > 1

    def __str__(self) -> str:
        chunks = f" in {self.interleave} chunks" if self.interleave > 1 else ""
        experts = f", experts over {self.expert}" if self.expert > 1 else ""
        tokens = " by tokens" if self.sequence_parallel else ""
        return f"tensor {self.tensor}{tokens} × pipeline {self.pipeline}{chunks}{experts}"


NO_LAYOUT = OuterLayout()


@dataclass(frozen=True)
class Predicted:
    """What a step is expected to take, on every device alike.

    `step_seconds` is what the search minimises, what its proof speaks of and what the rate follows. What units on the
    host take there is `host_peak_bytes`, of all ranks of a node; 0 where there are none. `idle_pool_bytes` is what the
    caching allocator holds beyond the peak, as its streams do not share what they have freed.
    """

    step_seconds: NotNegative
    samples_per_second: NotNegative
    mfu: NotNegative  # model FLOPs utilization: of the devices' peak, without what is recomputed
    peak_bytes: Whole
    limit_bytes: Whole
    reserve_bytes: Whole  # device memory beyond the limit: context, libraries' buffers, fragmentation
    peak_at: str
    memory_parts: Mapping[str, Whole]
    time_parts: Mapping[str, Finite]
    host_peak_bytes: Whole = 0
    host_limit_bytes: Whole = 0
    idle_pool_bytes: Whole = 0


@dataclass(frozen=True)
class Certificate:
    """How it is known that no plan is faster.

    `bound` is in samples per second: no plan of the searched space exceeds it. `gap` is (bound - fastest) / bound for
    the fastest plan that was found, which has a micro-batch of `fastest_batch_size`; the plan itself may take a smaller
    one at nearly that rate.
    """

    status: str
    bound: NotNegative
    gap: Annotated[float, Meta(ge=0, le=1)]
    fastest_samples_per_second: NotNegative
    fastest_batch_size: Whole
    nodes: Whole
    seconds: NotNegative
    batches_searched: Whole
    options: Whole


@dataclass(frozen=True)
class Baseline:
    """A familiar way to train, at its own best batch size under the same cost model."""

    name: str
    recompute: Recompute
    feasible: bool
    batch_size: Whole
    accumulation: Whole
    samples_per_second: NotNegative
    step_seconds: NotNegative
    peak_bytes: Whole


@dataclass(frozen=True)
class Plan:
    """A plan; `batch_size` is the micro-batch of one device, `accumulation` how many of them make a step.

    With `compiled`, each block is compiled by torch.compile: then a block is one unit. With `loss_chunks` above 1, the
    language head and its loss are computed in so many chunks of the sequence; see osdp.losses.
    """

    version: int
    model: PlanModel
    cluster: Cluster
    precision: str
    reduce_dtype: str
    optimizer: str
    batch_size: Samples
    accumulation: Samples
    predicted: Predicted
    certificate: Certificate
    baselines: tuple[Baseline, ...]
    units: Annotated[tuple[PlanUnit, ...], Meta(min_length=1)]
    compiled: bool = False
    loss_chunks: Annotated[int, Meta(ge=1, le=1024)] = 1
    layout: OuterLayout = NO_LAYOUT

    @property
    def buckets(self) -> dict[str, tuple[str, ...]]:
        """Units that carry others' reductions, by name, each with all that it reduces, its own gradients last."""
        found: dict[str, tuple[str, ...]] = {}
        for unit in self.units:
            if unit.reduced_with is not None:
                found[unit.reduced_with] = (unit.name, *found.get(unit.reduced_with, (unit.reduced_with,)))
        return found

    @property
    def all_reduces(self) -> str:
        """How many all-reduces carry several units' gradients, in words."""
        return f"{len(self.buckets)} all-reduce{'s' if len(self.buckets) != 1 else ''}"

    @property
    def blocks(self) -> list[str]:
        """The blocks that some unit is in."""
        return sorted({unit.block for unit in self.units if unit.block})

    @property
    def has_inputs_on_host(self) -> bool:
        """Whether some block's input is on the host; see [Note: Inputs] in osdp.cost.offload."""
        return any(unit.recompute is Recompute.ON_HOST for unit in self.units)

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.accumulation * self.cluster.world_size

    def to_dict(self) -> dict[str, Any]:
        return {**plain(self), "cluster": {"word": self.cluster.word, **self.cluster.to_dict()}}

    @property
    def digest(self) -> str:
        """Equal for plans that run alike, whatever was predicted of them: ranks compare it before they run one."""
        predicted = ("predicted", "certificate", "baselines")
        run = {key: value for key, value in self.to_dict().items() if key not in predicted}
        return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()

    def _repr_html_(self) -> str:
        """What a notebook shows for a plan."""
        from osdp.report.html import plan_html  # here, because only a notebook needs it

        return plan_html(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan, all of it or nothing: the file is replaced in one step."""
        write_json(self.to_dict(), path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Reads a plan file; anything but a complete plan of this version is refused."""
        document = read_json(path, remedy="give a plan file, as osdp plan -o writes it")
        try:
            return Plan.from_dict(document)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None

    @staticmethod
    def from_dict(document: Any) -> Plan:
        """What `to_dict` gave; a plan that makes no sense as a whole is refused too."""
        from osdp.plan_check import check_plan  # here, because it imports this file

        if not isinstance(document, dict) or "version" not in document:
            raise UsageError("this is not a plan: it has no version; write one with osdp plan -o")
        version = document["version"]
        if type(version) is not int or version != PLAN_VERSION:
            raise UsageError(
                f"the plan has version {version!r:.40}, this osdp reads version {PLAN_VERSION};"
                " plan again with osdp plan"
            )
        given = document.get("cluster")
        if not isinstance(given, dict):
            raise UsageError("the plan's cluster is missing; plan again")
        try:
            cluster = Cluster.from_dict({key: value for key, value in given.items() if key != "word"})
        except UsageError as error:
            raise UsageError(f"in the plan's cluster, {error}") from None
        table = {**document, "cluster": cluster}
        plan = convert(Plan, table, name="plan", remedy="plan again", is_complete=True)
        check_plan(plan)
        return plan


def unpriced_plan(
    name: str,
    units: Sequence[PlanUnit],
    cluster: Cluster,
    *,
    precision: str,
    reduce_dtype: str,
    optimizer: str,
    batch_size: int,
    accumulation: int = 1,
    uncalled: Mapping[str, int] | None = None,
) -> Plan:
    """A plan to run that nobody searched for: it predicts and proves nothing."""
    parameters = sum(unit.parameters for unit in units) + sum((uncalled or {}).values())
    return Plan(
        version=PLAN_VERSION,
        model=PlanModel(name, parameters, None, uncalled or {}),
        cluster=cluster,
        precision=precision,
        reduce_dtype=reduce_dtype,
        optimizer=optimizer,
        batch_size=batch_size,
        accumulation=accumulation,
        predicted=Predicted(0.0, 0.0, 0.0, 0, 0, 0, "", {}, {}),
        certificate=Certificate("none", 0.0, 0.0, 0.0, 0, 0, 0.0, 0, 0),
        baselines=(),
        units=tuple(units),
    )
