"""Cases of plan files: `osdp graph`, `verify` and `train` read them, and refuse the same ones."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.fuzz.case import HOSTILE, Case, at, dumped, flipped, kind_of, odd_file, places, put

FREE_TABLES = ("memory_parts", "time_parts", "uncalled", "source", "peak_flops")  # keys of these are anybody's
Document = dict[str, Any]


def plan_case(folder: Path, base: Document, chance: random.Random) -> Case:
    path = folder / "plan.json"
    good = json.dumps(base, indent=2).encode()
    choice = chance.random()
    if choice > 0.97:
        path.write_bytes(good)
        return Case("graph: unchanged", ("graph", str(path)), good=True)
    if choice < 0.1:
        what, nonsense = odd_file(path, good, chance), True
    elif choice < 0.3:
        path.write_bytes(flipped(good, chance))
        what, nonsense = "bytes", False
    else:
        document = copy.deepcopy(base)
        what, nonsense = chance.choice(CHANGES)(document, chance)
        path.write_bytes(dumped(document))
    # One rank runs here: with a plan for several, `train` would not look at the plan any closer.
    commands = ("graph", "verify", "train") if _ranks(base) == 1 else ("graph", "verify")
    command = chance.choice(commands) if nonsense else "graph"
    argv = ("train", "gpt-tiny", "--steps", "1", "--plan", str(path)) if command == "train" else (command, str(path))
    return Case(f"{command}: {what}", (*argv, *(() if command == "graph" else ("--quiet",))), nonsense)


def _ranks(document: Document) -> int:
    return document["cluster"]["nodes"] * document["cluster"]["devices_per_node"]


def _another_kind(document: Document, chance: random.Random) -> tuple[str, bool]:
    """A value of another type: always nonsense, but for the fields that may be null."""
    place = chance.choice([p for p in places(document) if p != ("cluster", "word")])
    old = at(document, place)
    new = chance.choice([value for value in HOSTILE if kind_of(value) != kind_of(old)])
    both = {kind_of(old), kind_of(new)}
    free = place[-1] == "overlap" and both <= {"True", "False", "number"}
    free = free or both <= {"True", "False"} or (new is None and place[0] == "cluster")
    put(document, place, new)
    may_be_null = place[-1] in ("block", "seq_len") or free
    return f"{place} {kind_of(old)} -> {kind_of(new)}", not may_be_null


def _another_value(document: Document, chance: random.Random) -> tuple[str, bool]:
    place = chance.choice(list(places(document)))
    put(document, place, chance.choice(HOSTILE))
    return f"{place} changed", False


def _not_finite(document: Document, chance: random.Random) -> tuple[str, bool]:
    numbers = [p for p in places(document) if kind_of(at(document, p)) == "number" and p != ("cluster", "word")]
    place = chance.choice(numbers)
    put(document, place, chance.choice([float("nan"), float("inf"), -float("inf"), 10**400, 2**64, -(2**64)]))
    return f"{place} not finite or beyond 64 bits", True


def _unknown(document: Document, chance: random.Random) -> tuple[str, bool]:
    tables = [p for p in places(document) if isinstance(at(document, p), dict) and p[-1] not in FREE_TABLES]
    place = chance.choice(tables)
    at(document, place)["colour"] = "red"
    return f"an unknown field in {place}", True


def _missing(document: Document, chance: random.Random) -> tuple[str, bool]:
    found = [p for p in places(document) if isinstance(p[-1], str) and p[0] != "cluster" and p[-1] != "uncalled"]
    place = chance.choice([p for p in found if not set(p[:-1]) & set(FREE_TABLES)])
    del at(document, place[:-1])[place[-1]]
    return f"no {place}", True


def _units(document: Document, chance: random.Random) -> tuple[str, bool]:
    units = document["units"]
    index = chance.randrange(len(units))
    unit, other = units[index], units[(index + 1) % len(units)]
    changes: dict[str, Callable[[], Any]] = {
        "a unit left out": lambda: units.remove(unit),
        "no units": units.clear,
        "a unit twice": lambda: units.append(copy.deepcopy(unit)),
        "a module in two units": lambda: unit["modules"].append(other["name"]),
        "no modules": unit["modules"].clear,
        "no slices": lambda: unit.update(splits=chance.choice((0, -1, -7))),
        "too many slices": lambda: unit.update(splits=chance.choice((17, 1000, 2**62))),
        "more sharded slices than slices": lambda: unit.update(sharded_splits=unit["splits"] + 1),
        "a mode of no cluster": lambda: unit.update(mode=chance.choice(("shard", "FREE", "", "zero3", "free "))),
        "more parameters": lambda: unit.update(parameters=unit["parameters"] + 1),
        "parameters moved": lambda: (
            unit.update(parameters=unit["parameters"] + 1),
            other.update(parameters=other["parameters"] - 1),
        ),
        "a unit that the model lacks": lambda: unit.update(name="nowhere", modules=["nowhere"], block=None),
        "another name": lambda: unit.update(name=other["name"]),
        "a block elsewhere": lambda: unit.update(block="nowhere"),
        "left out, and the model's size with it": lambda: (
            units.remove(unit),
            document["model"].update(parameters=document["model"]["parameters"] - unit["parameters"]),
        ),
        "called uncalled": lambda: (
            units.remove(unit),
            document["model"].update(uncalled={f"{unit['name']}.weight": unit["parameters"]}),
        ),
        "unsplittable split": lambda: next(u for u in units if "norm" in u["name"] or len(u["modules"]) > 1).update(
            splits=2, sharded_splits=1
        ),
    }
    if len(units) == 1 or not any("norm" in u["name"] or len(u["modules"]) > 1 for u in units):
        del changes["unsplittable split"]
    what = chance.choice(list(changes))
    changes[what]()
    return what, True


def _head(document: Document, chance: random.Random) -> tuple[str, bool]:
    changes: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("version", (0, 1, 3, "2", 2.5, True, None)),
        ("batch_size", (0, -1, 2**33, 2**63)),
        ("accumulation", (0, -1, 2**33, 2**63)),
        ("precision", ("fp8", "", "FP32")),
        ("optimizer", ("adam", "", "muon")),
        ("reduce_dtype", ("fp16", "")),
    )
    key, values = chance.choice(changes)
    document[key] = chance.choice(values)
    return f"{key} = {document[key]!r}", True


def _world(document: Document, chance: random.Random) -> tuple[str, bool]:
    cluster = document["cluster"]
    key = chance.choice(("nodes", "devices_per_node"))
    cluster[key] = chance.choice((0, -1, 2**20 + 1, 2**63, 1.5))
    return f"cluster {key} = {cluster[key]}", True


CHANGES = (_another_kind, _another_kind, _another_value, _not_finite, _unknown, _missing, _units, _units, _head, _world)
