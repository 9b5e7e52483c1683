"""Surveys the architectures of the installed transformers.

Each one is shrunk, trained for one real step in a plain process, planned with `osdp.plan(model, inputs, "4xCPU",
batch=2)`, and with --dry-run played through on fake tensors; each in a forked process of its own, with a time-out.
With --out and --for it runs in pieces, of which each goes on where the last one ended.
"""

from __future__ import annotations

import json
import random
import sys
import time
from argparse import ArgumentParser
from collections import Counter, defaultdict
from pathlib import Path

from benchmarks.survey.architectures import KINDS, architectures
from benchmarks.survey.one import PLANNED, surveyed, warm_up


def main() -> None:
    parser = ArgumentParser(prog="python -m benchmarks.survey", description=__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS), help="of " + ", ".join(KINDS))
    parser.add_argument("--limit", type=int, default=0, help="so many of each kind; 0 for all")
    parser.add_argument("--every", type=int, default=1, help="every so many-th of them, as a sample (%(default)s)")
    parser.add_argument("--sample", type=int, default=0, help="so many of them at random, the same for the same --seed")
    parser.add_argument("--seed", type=int, default=0, help="of --sample (%(default)s)")
    parser.add_argument("--only", default="", help="architectures whose name has this in it, several with commas")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds of a core for each")
    parser.add_argument("--dry-run", action="store_true", help="compare each plan's peak with a dry run's")
    parser.add_argument("--out", type=Path, help="a file of one JSON line for each; what is in it is not run again")
    parser.add_argument("--again", action="store_true", help="run those in --out again that train and are not planned")
    parser.add_argument("--shuffle", action="store_true", help="in the order that --seed gives: a piece is a sample")
    parser.add_argument("--for", dest="budget", type=float, default=float("inf"), help="begin none after these seconds")
    options = parser.parse_args()
    began = time.monotonic()
    done = _read(options.out)
    if options.again:
        done = {name: row for name, row in done.items() if row["outcome"] in ("not trained", PLANNED)}
    chosen = _limited(architectures(options.kinds.split(",")), options.limit)[:: options.every]
    if options.sample or options.shuffle:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample or len(chosen), len(chosen)))
    wanted = [part for part in options.only.split(",") if part]
    chosen = [each for each in chosen if not wanted or any(part in each.name for part in wanted)]
    warm_up()
    for number, architecture in enumerate(chosen):
        if architecture.name in done:
            continue
        if time.monotonic() - began > options.budget:
            break
        row = surveyed(architecture, seconds=options.timeout, dry_run=options.dry_run)
        done[architecture.name] = row
        said = f"{number + 1}/{len(chosen)} {row['seconds']:.0f} s {architecture.name}: {row['outcome']} {row['why']}"
        print(said[:240])
        sys.stdout.flush()
        if options.out:
            options.out.write_text("".join(json.dumps(each) + "\n" for each in done.values()))
    _print([done[each.name] for each in chosen if each.name in done])


def _read(path: Path | None) -> dict[str, dict]:
    if path is None or not path.exists():
        return {}
    return {row["name"]: row for row in map(json.loads, path.read_text().splitlines())}


def _limited(found: list, limit: int) -> list:
    seen: Counter[str] = Counter()
    chosen = []
    for each in found:
        seen[each.kind] += 1
        if not limit or seen[each.kind] <= limit:
            chosen.append(each)
    return chosen


def _print(rows: list[dict]) -> None:
    by_kind: dict[str, list[dict]] = defaultdict(list)
    for row in rows:
        by_kind[row["kind"]].append(row)
    print()
    for kind, mine in [*by_kind.items(), ("all", rows)]:
        trained = [row for row in mine if row["outcome"] != "not trained"]
        planned = [row for row in trained if row["outcome"] == PLANNED]
        share = f"{len(planned) / len(trained):.1%}" if trained else "none"
        print(f"{kind}: {len(mine)} architectures, {len(trained)} train, {len(planned)} are planned ({share})")
    compared = [row for row in rows if row.get("error") is not None]
    if compared:
        near = [row for row in compared if abs(row["error"]) <= 0.01]
        print(f"dry runs: {len(compared)}, peak within 1 % in {len(near)} ({len(near) / len(compared):.1%})")
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        if row["outcome"] not in (PLANNED, "not trained"):
            reasons[row["outcome"], row["why"]].append(row["name"])
        if row.get("dry_run_why"):
            reasons["dry run", row["dry_run_why"]].append(row["name"])
    for (outcome, why), names in sorted(reasons.items(), key=lambda item: -len(item[1])):
        print(f"\n{len(names)} {outcome}: {why}\n    {', '.join(names)}")


main()
