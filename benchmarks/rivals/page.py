"""Prints the tables, and writes the documentation's page with its plots, from the results alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import Row as Printed
from benchmarks.common import deliver

from .cells import settings
from .models import TITLES
from .results import CellRows, Claim, Row, claims, logs, read
from .rivals import ALONE, AUTO, ENGINE, FSDP2, OSDP, TUNED

MIB = 1 << 20
INTRODUCTION = """# osdp beside every usual way to train

Real ranks on one machine; hosts are network namespaces, and links between them carry the stated rate and no more.
Each rank computes on a share of the CPUs of its own (80 % of them, divided by the ranks), as a device of its own would:
where ranks may use each other's idle time, a pipeline's bubble costs nothing. Threads that communicate have the rest.
Every way gets the same model, data, AdamW (fused) and fp32, and is run at its best: the largest batch that fits, with
nothing and with every block recomputed; a way within 70 % of the fastest also with all but products recomputed
(selective), with every second block recomputed, and with its own switches (bucket sizes, prefetch, resharding,
micro-batches: 4, 2 or 1 for each stage). A step has at most 64 samples a rank, whoever takes them, and no way
accumulates gradients over micro-batches but the pipelines, which must. Each choice is a short trial; the fastest that
fits is then timed.

One meter counts what torch's allocator holds, from building the model on; it refuses what would pass the limit, so that
a run fails as it would on a device. The best of all ways are then held at once and timed in turn, in five rounds (two
for a way below 90 % of the fastest; below 70 % its trial stands, with 0 rounds). `±` is half the range of the rounds.
"of limit" compares with the longer of compute alone and of the bytes that gradients need at the row's batch; ways that
move activations instead (TP, PP) are compared with compute alone.

"osdp" is the plan of `osdp plan` with a profile of these ranks, for data parallelism alone. "osdp, layout auto" prices
pipelines too, with the best plan inside each stage, from the same profile, and runs the layout that is fastest by that
price. "osdp tune" ran two or three more plans, as rivals had their trials, one of them of the best layout of the other
kind, and took the fastest. FSDP2 waits for its collectives on gloo, and our runtime does not: "FSDP2's plan on our
engine" shows what the plan alone gains. "paper's space" is osdp with replicate and free only and nothing split.

`python -m benchmarks.rivals --minutes 25` measures (root needed) and goes on where the run before ended; `--page`
writes this page from the results, which are in `benchmarks/results`.
"""


def show(folder: Path, names: Sequence[str], what: str) -> int:
    """The tables of these settings, on the terminal."""
    if what == "size":
        deliver(sizes(folder, names), as_json=False)
        return 0
    found = read(folder, names, what)
    tables: dict[str, Sequence[Printed]] = {each.title: [printed(row) for row in in_order(each)] for each in found}
    if what == "throughput":
        tables["Cells"] = [summary(each) for each in found]
        tables["Claims"] = [claim_row(claim) for claim in claims(found)]
    deliver(tables, as_json=False)
    return 0


def sizes(folder: Path, names: Sequence[str]) -> dict[str, Sequence[Printed]]:
    """The largest models that train, by setting."""
    found: dict[str, Sequence[Printed]] = {}
    for name, log in logs(folder, names, "size").items():
        rows = [{key: value for key, value in line.items() if key != "what"} for line in log.all("size")]
        for row in rows:
            row["limit MiB"] = row.pop("limit_bytes") / MIB
        found[name] = rows
    return found


def in_order(each: CellRows) -> list[Row]:
    """osdp first, then by rate; what does not train and compute alone last."""
    return sorted(each.rows, key=lambda row: (row.rival == ALONE, row.rival != OSDP, -(row.rate or 0)))


def printed(row: Row) -> Printed:
    if row.rate is None:
        peak = None if row.peak_bytes is None else row.peak_bytes / MIB
        return {"way": row.rival, "peak MiB": peak, "switches": row.why[:90]}
    return {
        "way": row.rival,
        "samples/s": row.rate,
        "±": f"{row.spread:.0%}",
        "rounds": row.rounds,
        "batch": row.batch,
        "recompute": row.recompute,
        "peak MiB": (row.peak_bytes or 0) / MIB,
        "of osdp": row.of_osdp,
        "of limit": row.of_limit,
        "predicted": row.predicted,
        "switches": ", ".join(f"{key} {value}" for key, value in row.switches.items()),
    }


def summary(each: CellRows) -> Printed:
    """A cell in one line: osdp's rate, and how many times that of others it is."""
    own, auto, tuned, best = each.rate(OSDP), each.rate(AUTO), each.rate(TUNED), each.best_rival
    engine, shipped = each.rate(ENGINE), each.rate(FSDP2)
    row = next((row for row in each.rows if row.rival == OSDP), None)
    setting = each.setting
    return {
        "model": TITLES[setting.model],
        "ranks": f"{setting.hosts} × {setting.ranks_per_host}, {setting.across}",
        "memory": f"{each.share:.0%} of DDP",
        "osdp, samples/s": own,
        "best rival": "none fits" if best is None else best.rival,
        "÷ best": own / best.rate if own and best and best.rate else None,
        "auto ÷ best": auto / best.rate if auto and best and best.rate else None,
        "tune ÷ best": tuned / best.rate if tuned and best and best.rate else None,
        "spread of both": None if best is None or row is None else (row.spread or 0) + (best.spread or 0),
        "÷ FSDP2": own / shipped if own and shipped else None,
        "÷ FSDP2's plan on our engine": own / engine if own and engine else None,
        "of limit": None if row is None else row.of_limit,
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
        parts.append("## Cells\n\n" + _markdown([summary(each) for each in found]))
        parts.append("## Claims\n\n" + _markdown([claim_row(claim) for claim in claims(found)]))
        from .plots import draw

        parts += [f"![{alt}]({file})\n" for file, alt in draw(found, docs).items()]
    else:
        parts.append("No results are there yet: run the command above.\n")
    parts += [_cell(each) for each in found]
    ablations = read(folder, [setting.name for setting in settings("ablations")], "ablations")
    if ablations:
        parts.append("## osdp without each of its parts\n")
        parts += [f"### {each.title}\n\n" + _markdown([printed(row) for row in in_order(each)]) for each in ablations]
    largest = sizes(folder, [setting.name for setting in settings("size")])
    if largest:
        parts.append("## The largest model that trains\n")
        parts += [f"### {name}\n\n" + _markdown(rows) for name, rows in largest.items()]
    (docs / "rivals.md").write_text("\n".join(parts))
    (folder / "rivals.json").write_text(json.dumps([_document(each) for each in found], indent=1) + "\n")


def _document(each: CellRows) -> dict[str, Any]:
    """A cell for other programs: when, with what and where it was measured, and every row."""
    about = {key: each.about[key] for key in ("date", "versions", "machine", "done")}
    cell = {"setting": each.setting.to_dict(), "share_of_ddp": each.share, "limit_bytes": each.limit_bytes}
    return {**cell, **about, "balance_of": each.alike, "rows": [asdict(row) for row in each.rows]}


def _cell(each: CellRows) -> str:
    unfinished = "" if each.about["done"] else "\nThis cell was interrupted: some figures are those of single trials.\n"
    balance = f"Its balance of compute and network is that of {each.alike}.\n"
    return f"### {each.title}\n\n{balance}{unfinished}\n" + _markdown([printed(row) for row in in_order(each)])


def _markdown(rows: Sequence[dict[str, Any]]) -> str:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
    lines += ["| " + " | ".join(_text(row.get(key)) for key in keys) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return "" if value is None else str(value).replace("|", "/")
