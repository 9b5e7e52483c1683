"""Plans random small models under random limits, and trains each plan on real gloo ranks: does the promise hold?

    python -m benchmarks.bench_memory_promise --cases 200 --out promise.jsonl

Each case draws a model (own GPT, Llama, Qwen2, GPT-2, OPT, BERT, T5, ViT, all tiny: small models show what large ones
hide), ranks (2, 3, 4, 2 x 2), precision, optimizer, batch, accumulation, and a limit between the smallest peak that any
plan reaches and the peak of the plan without a limit. The plan runs in a bare loop, and, where the model takes tokens,
step by step as `osdp train` trains. The peak is what torch's allocator counts, of all ranks the highest.

Cases are appended to --out as they end, and those that it has are not run again. The same seed gives the same cases.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import Row, deliver, met, parser
from benchmarks.promise.cases import PRECISIONS, Case, case_of
from benchmarks.promise.run import Cases

MOST_ABOVE = 0.005  # of the prediction


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cases", type=int, default=200)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, default=Path("memory-promise.jsonl"))
    options.add_argument("--minutes", type=float, default=600, help="begin no case after so long")
    options.add_argument("--only", type=int, nargs="*", help="these numbers alone, whether or not they are done")
    given = options.parse_args()
    done = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    known = {entry["case"]["number"] for entry in done if entry["seed"] == given.seed}
    until = time.monotonic() + 60 * given.minutes
    with Cases() as cases:
        for number in given.only or [number for number in range(given.cases) if number not in known]:
            if time.monotonic() > until:
                break
            entry = _entry(cases, given.seed, case_of(given.seed, number))
            done.append(entry)
            with given.out.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            print(_line(entry), flush=True)
    last = {entry["case"]["number"]: entry for entry in done if entry["seed"] == given.seed}
    deliver(tables(list(last.values())), as_json=given.json)


def _entry(cases: Cases, seed: int, case: Case) -> dict[str, Any]:
    try:
        return {"seed": seed, "case": case.to_dict(), "found": asdict(cases.run(case)), "error": None}
    except RuntimeError as error:
        return {"seed": seed, "case": case.to_dict(), "found": None, "error": str(error)}


def _line(entry: dict[str, Any]) -> str:
    case, found = entry["case"], entry["found"]
    words = (case[name] for name in ("number", "kind", "world", "precision", "optimizer", "batch", "accumulation"))
    head = " ".join(map(str, words))
    if found is None:
        return f"{head}: {entry['error'].strip().splitlines()[-1]}"
    peaks = [f"{name} {_off(found, name):+.3%}" for name in ("bare", "command") if found[f"{name}_bytes"]]
    return f"{head}: predicted {found['predicted_bytes']:,} of {found['limit_bytes']:,}, {', '.join(peaks)}"


def _off(found: dict[str, Any], name: str) -> float:
    return found[f"{name}_bytes"] / found["predicted_bytes"] - 1


def tables(entries: Sequence[dict[str, Any]]) -> dict[str, Sequence[Row]]:
    """One row for each loop and precision: how many cases, how many above their limit and prediction, the worst."""
    rows = [
        _row(loop, precision, [e for e in entries if precision in ("all", e["case"]["precision"])])
        for loop in ("bare", "command")
        for precision in (*PRECISIONS, "all")
    ]
    failed = [
        {"case": e["case"]["number"], "failed": e["error"].strip().splitlines()[-1]} for e in entries if e["error"]
    ]
    return {"memory promise": rows, **({"cases that failed": failed} if failed else {})}


def _row(loop: str, precision: str, entries: Sequence[dict[str, Any]]) -> Row:
    found = [e["found"] for e in entries if e["found"] and e["found"][f"{loop}_bytes"]]
    offs = [_off(each, loop) for each in found]
    above_limit = sum(each[f"{loop}_bytes"] > each["limit_bytes"] for each in found)
    above = sum(off > MOST_ABOVE for off in offs)
    return {
        "loop": {"bare": "bare loop", "command": "osdp train"}[loop],
        "precision": precision,
        "cases": len(found),
        "above the limit": above_limit,
        "more than 0.5 % above": above,
        "highest, %": 100 * max(offs, default=0.0),
        "lowest, %": 100 * min(offs, default=0.0),
        "target: 0 and 0": met(above_limit + above, 0),
    }


if __name__ == "__main__":
    main()
