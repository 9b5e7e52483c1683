"""Bad input: what becomes of thousands of changed plan files, cluster files, configurations, data files and arguments.

    python benchmarks/bench_fuzz.py            5,000 cases
    python benchmarks/bench_fuzz.py --cases 200 --kind "plan files" --seed 3 --show

Targets: no traceback, no case above the bound, no nonsense accepted, no wrong exit code.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from rich.console import Console
from rich.table import Table

from benchmarks.common import WIDE, parser
from benchmarks.fuzz import BOUND_SECONDS, KINDS, Report, fuzz
from benchmarks.fuzz.run import ACCEPTED, HANG, REFUSED, TRACEBACK, WRONG_CODE

# Most cases are those that end soonest: a configuration is built and traced, which takes a second or two.
SHARES = {"plan files": 0.34, "cluster files": 0.3, "configurations": 0.06, "data files": 0.1, "arguments": 0.2}


def _print(reports: list[Report]) -> None:
    table = Table(title=f"bad input; a case that takes more than {BOUND_SECONDS:.0f} s counts as a hang")
    for name in ("input", "cases", "done", "failed", "refused", "does not fit", *_FAULTS, "slowest s", "all s"):
        table.add_column(name, justify="left" if name == "input" else "right")
    for each in reports:
        codes = [str(each.codes[code]) for code in (0, 1, 2, 3)]
        faults = [str(each.faults[fault]) for fault in _FAULTS]
        table.add_row(each.kind, str(each.cases), *codes, *faults, f"{each.slowest_seconds:.1f}", f"{each.seconds:.0f}")
    console = Console()
    (console if console.is_terminal else Console(width=WIDE)).print(table)


_FAULTS = (TRACEBACK, HANG, ACCEPTED, REFUSED, WRONG_CODE)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--cases", type=int, default=5000, help="of all kinds (default: %(default)s)")
    options.add_argument("--kind", choices=KINDS, help="cases of this kind only")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument(
        "--show", action="store_true", help="print what every case was told, not only those that failed"
    )
    chosen = options.parse_args()
    reports = []
    for kind in [chosen.kind] if chosen.kind else KINDS:
        count = chosen.cases if chosen.kind else round(chosen.cases * SHARES[kind])
        reports.append(fuzz(kind, count, seed=chosen.seed))
        for line in (*reports[-1].sentences, *reports[-1].examples) if chosen.show else reports[-1].examples:
            print(line, file=sys.stderr, flush=True)
    if chosen.json:
        print(json.dumps([asdict(each) for each in reports]))
    else:
        _print(reports)
    return 1 if any(each.faults for each in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
