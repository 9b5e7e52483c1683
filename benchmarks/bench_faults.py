"""Kills, stops, cuts off and starves real runs of `osdp train`, and checks what is left of them.

    python -m benchmarks.bench_faults --out faults.jsonl      # 320 cases, 200 of them with SIGKILL
    python -m benchmarks.bench_faults --cases 16              # one round: two of every SIGKILL, one of each other kind

A rank of 2 to 4 is sent SIGKILL at a random moment of forward, backward, a save, planning or profiling, or SIGSTOP; the
disk is full or the folder read-only; a file of the newest checkpoint is damaged, each in turn; two runs share a folder;
a host's link is taken away (network namespaces: Linux and root). What must hold: ranks that live end with the right
code within the time-out, without a traceback; the last checkpoint is whole, and a run that goes on from it has the
losses of one that nothing happened to, bit for bit; no process is left.

Cases are appended to --out as they end, and those that it has are not run again, but for those that failed with
--failed. The last run of a case counts.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.common import Row, deliver, met, parser
from benchmarks.faults.kinds import STOPPED_SECONDS, TIMEOUT_SECONDS, Faults, Outcome, Unprepared, kinds


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cases", type=int, default=320)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, default=Path("faults.jsonl"))
    options.add_argument("--minutes", type=float, default=600, help="begin no case after so long")
    options.add_argument("--kind", nargs="*", help="these kinds alone")
    options.add_argument("--failed", action="store_true", help="run again what failed")
    given = options.parse_args()
    known = kinds(Faults(given.seed))
    names = given.kind or list(known)
    entries = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    done = {(entry["name"], entry["number"]): entry for entry in entries if entry["seed"] == given.seed}
    until = time.monotonic() + 60 * given.minutes
    for case in _cases(names, given.cases):
        if (case in done and not (given.failed and done[case]["problems"])) or time.monotonic() > until:
            continue
        name, number = case
        entry = {"seed": given.seed, "name": name, "number": number, **asdict(_outcome(known[name], name, number))}
        done[case] = entry
        with given.out.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        print(f"{entry['kind']} ({entry['detail']}): {'; '.join(entry['problems']) or 'all held'}", flush=True)
    deliver(tables(list(done.values())), as_json=given.json)


def _cases(names: Sequence[str], count: int) -> Iterator[tuple[str, int]]:
    """Kind and number of so many cases, in rounds over all kinds, with each SIGKILL twice."""
    order = cycle([name for name in names for _ in range(2 if name.startswith("kill") else 1)])
    numbers = Counter[str]()
    for name in islice(order, count):
        yield name, numbers[name]
        numbers[name] += 1


def _outcome(run: Callable[[int], Outcome], name: str, number: int) -> Outcome:
    """A case whose runs without a fault fail has failed too, and the next ones are run."""
    try:
        return run(number)
    except Unprepared as error:
        return Outcome(name, "not run", (f"a run that nothing happened to failed: {error}",))


def tables(entries: Sequence[dict[str, Any]]) -> dict[str, Sequence[Row]]:
    """One row for each kind of fault."""
    rows: list[Row] = []
    for kind in dict.fromkeys(entry["kind"] for entry in entries):
        mine = [entry for entry in entries if entry["kind"] == kind]
        held = sum(not entry["problems"] for entry in mine)
        noticed = [entry["noticed_seconds"] for entry in mine if entry["noticed_seconds"] is not None]
        rows.append(
            {
                "fault": kind,
                "cases": len(mine),
                "all held": held,
                "time-out, s": _timeout(kind),
                "median to notice, s": statistics.median(noticed) if noticed else None,
                "slowest to notice, s": max(noticed, default=None),
                "target: all": met(len(mine) - held, 0),
            }
        )
    return {"faults": rows}


def _timeout(kind: str) -> int | None:
    if kind.startswith("SIGKILL"):
        return TIMEOUT_SECONDS
    return STOPPED_SECONDS if kind.startswith(("SIGSTOP", "link")) else None


if __name__ == "__main__":
    main()
