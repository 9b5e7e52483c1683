"""Prints the tables, and writes the documentation's page with its plots, from the results alone."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Row as Printed
from benchmarks.common import deliver

from .cells import settings
from .log import Log
from .results import CellRows, Claim, Row, claims, read
from .rivals import ALONE, OSDP

MIB = 1 << 20
INTRODUCTION = """# osdp beside every usual way to train

Real ranks on one machine; hosts are network namespaces, and links between them carry the stated rate and no more.
Every way gets the same model, data, AdamW (fused) and fp32, and is run at its best: every feasible batch size (two
small ones say where memory ends, the largest is tried there), with no, with every second and with every block
recomputed, and with its own switches (bucket sizes, prefetch, resharding, micro-batches); the last two are left out
for a way that is below 60 % of the fastest. No way takes more than 64 samples a rank and step. One meter counts what
torch's
allocator holds, from building the model on; it refuses what would pass the limit, so that a run fails as it would on a
device. All ways of a cell are then held at once and timed in turn, in rounds. `±` is half the range of the rounds. "of
limit" compares with the longer of compute alone and of the bytes that gradients need at the row's batch; ways that move
activations instead (TP, PP) are compared with compute alone.

FSDP2 waits for its collectives on gloo, and our runtime does not: "FSDP2's plan on our engine" shows what the plan
alone gains. "paper's space" is osdp with replicate and free only and nothing split.

`python -m benchmarks.rivals --minutes 25` measures (root needed), `--page` writes this page from the results.
"""


def show(folder: Path, names: Sequence[str], what: str) -> int:
    """The tables of these cells, on the terminal."""
    if what != "throughput":
        deliver({title: rows for title, rows in plain_tables(folder, what).items()}, as_json=False)
        return 0
    found = read(folder, names)
    tables: dict[str, Sequence[Printed]] = {each.title: [printed(row) for row in each.rows] for each in found}
    deliver({**tables, "Claims": [claim_row(claim) for claim in claims(found)]}, as_json=False)
    return 0


def plain_tables(folder: Path, what: str) -> dict[str, list[Printed]]:
    """Tables of `size` and `ablations`: their files have the rows already."""
    found = [json.loads(file.read_text()) for file in sorted(folder.glob(f"{what}-*.json"))]
    return {data["name"]: [{"way": name, **_plain(row)} for name, row in data["rivals"].items()] for data in found}


def _plain(row: dict[str, Any]) -> Printed:
    """A way's figures: of one that was timed its rate, and what its plan had predicted."""
    if "seconds" not in row:
        return row
    seconds = statistics.median(row.get("rounds", [row["seconds"]]))
    figures = {"samples/s": row["samples"] / seconds, "batch": row["batch"], "peak MiB": row["peak_bytes"] / MIB}
    return {**figures, "predicted": row.get("predicted"), "gap": row.get("gap")}


def printed(row: Row) -> Printed:
    if row.rate is None:
        peak = None if row.peak_bytes is None else row.peak_bytes / MIB
        return {"way": row.rival, "why not": row.why[:70], "peak MiB": peak}
    return {
        "way": row.rival,
        "samples/s": row.rate,
        "±": f"{row.spread:.0%}",
        "batch": row.batch,
        "recompute": row.recompute,
        "peak MiB": (row.peak_bytes or 0) / MIB,
        "of osdp": row.of_osdp,
        "of limit": row.of_limit,
    }


def claim_row(claim: Claim) -> Printed:
    verdict = "met" if claim.met else "missed"
    return {"osdp": claim.what, "factor": claim.value, "target": claim.target, "cells": claim.cells, "": verdict}


def write_page(folder: Path, docs: Path) -> None:
    """docs/benchmarks/rivals.md and its plots."""
    found = read(folder, [setting.name for setting in settings()])
    parts = [INTRODUCTION]
    if found:
        about = found[0].about
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
        machine = about["machine"]
        parts.append(
            f"Measured {about['date'][:10]} on {machine['cores']} cores ({machine['processor']}); {versions}.\n"
        )
        parts.append("## Claims\n\n" + _markdown([claim_row(claim) for claim in claims(found)]))
        from .plots import draw

        parts += [f"![{alt}]({file})\n" for file, alt in draw(found, docs).items()]
    else:
        parts.append("No results are there yet: run the command above.\n")
    parts += [_cell(each) for each in found]
    for what, title in (("size", "The largest model that trains"), ("ablations", "osdp without each of its parts")):
        tables = plain_tables(folder, what)
        if tables:
            parts.append(f"## {title}\n")
            parts += [f"### {name}\n\n" + _markdown(rows) for name, rows in tables.items()]
    (docs / "rivals.md").write_text("\n".join(parts))


def _cell(each: CellRows) -> str:
    unfinished = "" if each.about["done"] else "\nThis cell was interrupted: figures are those of single attempts.\n"
    balance = f"Its balance of compute and network is that of {each.alike}.\n"
    rows = sorted(each.rows, key=lambda row: (row.rival == ALONE, row.rival != OSDP, -(row.rate or 0)))
    return f"## {each.title}\n\n{balance}{unfinished}\n" + _markdown([printed(row) for row in rows])


def _markdown(rows: Sequence[dict[str, Any]]) -> str:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
    lines += ["| " + " | ".join(_text(row.get(key)) for key in keys) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return "" if value is None else str(value).replace("|", "/")
