"""The answer: which unit is held how, at which batch size, what it costs, and the proof. Frozen, versioned, JSON.

A plan file is data: reading one runs no code, and every field is checked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from osdp.cluster import Cluster
from osdp.errors import UsageError

PLAN_VERSION = 1

REPLICATE = "replicate"
KEEP = "keep"
FREE = "free"
FREE_TO_NODE = "free_to_node"
KEEP_IN_NODE = "keep_in_node"
FREE_IN_NODE = "free_in_node"
IN_NODE = (KEEP_IN_NODE, FREE_IN_NODE)
OVER_WORLD = (KEEP, FREE, FREE_TO_NODE)
MODES = (REPLICATE, KEEP, FREE, FREE_TO_NODE, KEEP_IN_NODE, FREE_IN_NODE)


@dataclass(frozen=True)
class PlanModel:
    """The model a plan was made for, as far as a plan must know it."""

    name: str
    parameters: int
    seq_len: int | None


@dataclass(frozen=True)
class PlanUnit:
    """One unit: the modules that one gather brings in, and how their parameters are held.

    `name` is its first module, `modules` are all (several where parameters are tied); it holds what deeper units do
    not. Of `splits` slices, `sharded_splits` are held in `mode` and the others replicated. `block` is the block it
    belongs to, `recompute` whether that block's activations are recomputed. With `reduce_once`, gradients of several
    micro-batches are reduced together after the last one. With `two_levels`, what is exchanged over all ranks goes
    across nodes and through each node in two steps.
    """

    name: str
    modules: tuple[str, ...]
    block: str | None
    mode: str
    splits: int
    sharded_splits: int
    recompute: bool
    reduce_once: bool
    two_levels: bool
    parameters: int

    @property
    def depth(self) -> int:
        """How deep in the model its deepest module is; the model itself is at 0."""
        return max(len(name.split(".")) if name else 0 for name in self.modules)


@dataclass(frozen=True)
class Predicted:
    """What a step is expected to take, on every device alike.

    `step_seconds`, which the rate and `time_parts` follow, is the sum of its phases: the search minimises it.
    `expected_seconds` is nearer to what runs: the same step on two streams, node by node.
    """

    step_seconds: float
    expected_seconds: float
    samples_per_second: float
    peak_bytes: int
    limit_bytes: int
    reserve_bytes: int  # device memory beyond the limit: context, libraries' buffers, fragmentation
    peak_at: str
    memory_parts: Mapping[str, int]
    time_parts: Mapping[str, float]


@dataclass(frozen=True)
class Certificate:
    """How it is known that no plan is faster.

    `bound` is in samples per second: no plan of the searched space exceeds it. `gap` is (bound - found) / bound.
    """

    status: str
    bound: float
    gap: float
    nodes: int
    seconds: float
    batches_searched: int
    options: int


@dataclass(frozen=True)
class Baseline:
    """A familiar way to train, at its own best batch size under the same cost model."""

    name: str
    recompute: bool
    feasible: bool
    batch_size: int
    accumulation: int
    samples_per_second: float
    step_seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Plan:
    """A plan; `batch_size` is the micro-batch of one device, `accumulation` how many of them make a step."""

    version: int
    model: PlanModel
    cluster: Cluster
    precision: str
    reduce_dtype: str
    optimizer: str
    batch_size: int
    accumulation: int
    predicted: Predicted
    certificate: Certificate
    baselines: tuple[Baseline, ...]
    units: tuple[PlanUnit, ...]

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.accumulation * self.cluster.world_size

    def to_dict(self) -> dict[str, Any]:
        plain = {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return {**plain, "cluster": {"word": self.cluster.word, **self.cluster.to_dict()}}

    @property
    def digest(self) -> str:
        """Equal for plans that run alike, whatever was predicted of them: ranks compare it before they run one."""
        run = replace(self, predicted=None, certificate=None, baselines=()).to_dict()  # type: ignore[arg-type]
        return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan, all of it or nothing: the file is replaced in one step."""
        target = Path(path)
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            partial.write_text(json.dumps(self.to_dict(), indent=2) + "\n")
            partial.replace(target)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise UsageError(f"cannot write the plan to {target}: {error.strerror}; choose another path") from None

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Reads a plan file; anything but a complete plan of this version is refused."""
        try:
            document = json.loads(Path(path).read_text())
        except OSError as error:
            raise UsageError(f"cannot read the plan {path}: {error.strerror}") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} is not a plan: {error}; write one with osdp plan -o") from None
        try:
            return Plan.from_dict(document)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None

    @staticmethod
    def from_dict(document: Any) -> Plan:
        if not isinstance(document, dict) or "version" not in document:
            raise UsageError("this is not a plan: it has no version; write one with osdp plan -o")
        if document["version"] != PLAN_VERSION:
            raise UsageError(
                f"the plan has version {document['version']!r}, this osdp reads version {PLAN_VERSION}; plan again"
            )
        cluster = document.get("cluster")
        if not isinstance(cluster, dict):
            raise UsageError("the plan's cluster is missing; plan again")
        cluster = Cluster.from_dict({key: value for key, value in cluster.items() if key != "word"})
        plan = _read(Plan, {**document, "cluster": cluster}, "plan")
        wrong = [unit.mode for unit in plan.units if unit.mode not in MODES]
        if wrong:
            raise UsageError(f"unknown mode {wrong[0]!r}; the modes are {', '.join(MODES)}")
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
) -> Plan:
    """A plan to run that nobody searched for: it predicts and proves nothing."""
    return Plan(
        version=PLAN_VERSION,
        model=PlanModel(name, sum(unit.parameters for unit in units), None),
        cluster=cluster,
        precision=precision,
        reduce_dtype=reduce_dtype,
        optimizer=optimizer,
        batch_size=batch_size,
        accumulation=accumulation,
        predicted=Predicted(0.0, 0.0, 0.0, 0, 0, 0, "", {}, {}),
        certificate=Certificate("none", 0.0, 0.0, 0, 0.0, 0, 0),
        baselines=(),
        units=tuple(units),
    )


class Entered(typing.Protocol):
    """What forward enters: a unit of a plan, or one that may become one."""

    @property
    def name(self) -> str: ...

    @property
    def modules(self) -> tuple[str, ...]: ...


E = TypeVar("E", bound=Entered)


def backward_order(units: Sequence[E]) -> list[E]:
    """Units in the order in which backward reaches them: the reverse of that in which forward leaves them.

    `units` are in the order in which forward enters them. A module is left after all that is below it, a unit of
    several modules with the last of them.
    """

    def left(index: int) -> tuple[int, int]:
        unit = units[index]
        if len(unit.modules) > 1:
            return len(units), -1
        name = unit.name
        below = [i for i, other in enumerate(units) if not name or (other.name + ".").startswith(name + ".")]
        return (len(units) + 1 if not name else max(below)), -len(name.split("."))

    return [units[index] for index in sorted(range(len(units)), key=left, reverse=True)]


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Cluster)):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


T = TypeVar("T")


def _read(kind: type[T], table: Any, where: str) -> T:
    """A frozen value from plain JSON, every field present and of its declared type."""
    if not isinstance(table, dict):
        raise UsageError(f"{where} must be a table, not {type(table).__name__}; plan again")
    hints = typing.get_type_hints(kind)
    unknown, missing = set(table) - set(hints), set(hints) - set(table)
    if unknown or missing:
        what = f"unknown field {sorted(unknown)[0]!r}" if unknown else f"no field {sorted(missing)[0]!r}"
        raise UsageError(f"{where} has {what}; plan again")
    return kind(**{name: _value(hint, table[name], f"{where}.{name}") for name, hint in hints.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return None if value is None else _value(inner[0], value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_value(inner[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, dict):
        return {str(key): _value(inner[1], item, f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(hint) and not isinstance(value, Cluster):
        return _read(typing.cast(type, hint), value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(hint, type) or not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise UsageError(f"{where} is {value!r}, which is not a {getattr(hint, '__name__', hint)}; plan again")
    return value
