"""Cases of cluster files: `osdp plan --cluster FILE`."""

from __future__ import annotations

import copy
import datetime
import math
import random
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.fuzz.case import HOSTILE, Case, at, flipped, kind_of, odd_file, places, put

PLAN = ("plan", "gpt-tiny", "--batch", "1", "--modes", "replicate,free", "--no-split", "--no-recompute", "--quiet")
FREE_TABLES = ("peak_flops", "source")
BASE: dict[str, Any] = {
    "name": "lab",
    "nodes": 2,
    "devices_per_node": 4,
    "memory": "40GiB",
    "overlap": 0.5,
    "reserve_fraction": 0.1,
    "unit_overhead_seconds": 1e-5,
    "device": {"like": "A100-80GB", "name": "A100-PCIe", "peak_flops": {"bf16": 3e14}, "matmul_efficiency": 0.6},
    "network": {"bytes_per_second": 25e9, "latency_seconds": 12e-6},
    "collective": [
        {"kind": "all_gather", "group": "world", "latency_seconds": 45e-6, "bytes_per_second": 20e9},
        {"kind": "all_reduce", "group": "node", "latency_seconds": 45e-6, "bytes_per_second": 20e9},
    ],
    "optimizer": [{"name": "adamw", "tensor_seconds": 2e-5, "byte_seconds": 2e-9}],
    "stage": [
        {
            "signature": "5b2e",
            "name": "layers.0",
            "batches": [1, 2, 4],
            "forward_seconds": [0.01, 0.02, 0.04],
            "backward_seconds": [0.02, 0.04, 0.08],
        }
    ],
}
NEEDED = ("device", "bytes_per_second", "latency_seconds", "kind", "group", "byte_seconds", "signature", "batches")


def cluster_case(folder: Path, chance: random.Random) -> Case:
    path = folder / "cluster.toml"
    good = tomli_w.dumps(BASE).encode()
    choice = chance.random()
    if choice > 0.97:
        path.write_bytes(good)
        return Case("plan --cluster: unchanged", (*PLAN, "--cluster", str(path)), good=True)
    if choice < 0.1:
        what, nonsense = odd_file(path, good, chance), True
        nonsense = what not in ("cut short", "device")  # a shorter file may be whole; /dev/null is refused as no file
    elif choice < 0.3:
        path.write_bytes(flipped(good, chance))
        what, nonsense = "bytes", False
    else:
        table = copy.deepcopy(BASE)
        what, nonsense = chance.choice(CHANGES)(table, chance)
        path.write_bytes(_toml(table))
    return Case(f"plan --cluster: {what}", (*PLAN, "--cluster", str(path)), nonsense)


def _toml(table: dict[str, Any]) -> bytes:
    """TOML has no null and knows no lone surrogates."""
    return tomli_w.dumps(_without_null(table)).encode(errors="replace")


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_null(each) for key, each in value.items() if each is not None}
    return [_without_null(each) for each in value if each is not None] if isinstance(value, list) else value


def _another_kind(table: dict[str, Any], chance: random.Random) -> tuple[str, bool]:
    place = chance.choice(list(places(table)))
    old = at(table, place)
    new = chance.choice(
        [v for v in (*HOSTILE, datetime.date(2026, 1, 1)) if v is not None and kind_of(v) != kind_of(old)]
    )
    put(table, place, new)
    free = place in (("overlap",), ("memory",), ("device",)) or new in ([None], {"": None})
    return f"{place} {kind_of(old)} -> {kind_of(new)}", not free


def _another_value(table: dict[str, Any], chance: random.Random) -> tuple[str, bool]:
    place = chance.choice(list(places(table)))
    put(table, place, chance.choice(HOSTILE))
    return f"{place} changed", False


def _bad_number(table: dict[str, Any], chance: random.Random) -> tuple[str, bool]:
    place = chance.choice([p for p in places(table) if kind_of(at(table, p)) == "number"])
    put(table, place, chance.choice((-1, math.nan, math.inf, -math.inf, 10**30, 2**64, -1e-9)))
    return f"{place} = {at(table, place)}", True


def _too_small(table: dict[str, Any], chance: random.Random) -> tuple[str, bool]:
    wanted = ("bytes_per_second", "bf16", "matmul_efficiency")
    place = chance.choice([p for p in places(table) if p[-1] in wanted])
    put(table, place, chance.choice((0, 0.0, 1e-320, 1e-9)))
    return f"{place} = {at(table, place)}", True


def _missing(table: dict[str, Any], chance: random.Random) -> tuple[str, bool]:
    place = chance.choice([p for p in places(table) if p[-1] in NEEDED])
    del at(table, place[:-1])[place[-1]]
    return f"no {place}", True


def _unknown(table: dict[str, Any], chance: random.Random) -> tuple[str, bool]:
    tables = [(), *(p for p in places(table) if isinstance(at(table, p), dict) and p[-1] not in FREE_TABLES)]
    place = chance.choice(tables)
    at(table, place)["colour"] = "red"
    return f"an unknown field in {place}", True


def _contradiction(table: dict[str, Any], chance: random.Random) -> tuple[str, bool]:
    changes = {
        "measured twice": lambda: table["collective"].append(table["collective"][0]),
        "both memories": lambda: table.update(memory_bytes=1 << 30),
        "batches that fall": lambda: table["stage"][0].update(batches=[4, 2, 1]),
        "a time too few": lambda: table["stage"][0]["forward_seconds"].pop(),
        "an unknown device": lambda: table.update(device="A999"),
        "an unknown kind": lambda: table["collective"][0].update(kind="gather"),
        "an unknown group": lambda: table["collective"][0].update(group="rack"),
        "an unknown dtype": lambda: table["device"]["peak_flops"].update(fp4=1e15),
        "a size without a unit": lambda: table.update(memory="40G"),
        "too many devices": lambda: table.update(nodes=2**20, devices_per_node=2),
    }
    what = chance.choice(list(changes))
    changes[what]()
    return what, True


CHANGES = (_another_kind, _another_value, _bad_number, _bad_number, _too_small, _missing, _unknown, _contradiction)
