"""Measures rivals beside osdp, cell by cell, the most telling first (root needed); writes results as it goes.

python -m benchmarks.rivals --minutes 25        # what fits into 25 minutes; cells that are done are not repeated
python -m benchmarks.rivals --smoke             # two tiny cells, a few minutes
python -m benchmarks.rivals --cells deep-2x2    # cells whose names begin like this
python -m benchmarks.rivals --what size         # the largest model that trains within a limit
python -m benchmarks.rivals --what ablations    # osdp without each of its parts
python -m benchmarks.rivals --page              # tables, plots and the documentation's page from the results
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from .cells import cells, smoke
from .run import Limits, run_cells

RESULTS = Path(__file__).parents[1] / "results"
PAGE = Path(__file__).parents[2] / "docs" / "benchmarks"
WHATS = ("throughput", "size", "ablations")


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=WHATS, default=WHATS[0])
    parser.add_argument("--minutes", type=float, default=25.0, help="to spend (default %(default)g)")
    parser.add_argument("--smoke", action="store_true", help="two tiny cells with few rounds")
    parser.add_argument("--cells", help="only those whose names begin with one of these, separated by commas")
    parser.add_argument("--rounds", type=int, default=5, help="of every cell (default %(default)s)")
    parser.add_argument("--profile-seconds", type=float, default=30.0, help="for osdp's profile (default 30)")
    parser.add_argument("--rungs", action="store_true", help="try every power of two as a batch size")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON (default %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="measure cells again that are done")
    parser.add_argument("--page", action="store_true", help="do not measure; write the page and its plots")
    parser.add_argument("--list", action="store_true", help="show the cells in order")
    args = parser.parse_args()
    chosen = smoke() if args.smoke else list(cells(args.what))
    if args.cells:
        chosen = [cell for cell in chosen if cell.name.startswith(tuple(args.cells.split(",")))]
    if args.list:
        print("\n".join(cell.name for cell in chosen))
        return 0
    if not args.page:
        few = args.smoke
        limits = Limits(60 * args.minutes, 2 if few else args.rounds, 6.0 if few else args.profile_seconds, args.rungs)
        run_cells(chosen, args.results, limits, what=args.what, fresh=args.fresh or args.smoke)
    from .page import show, write_page

    if args.page:
        write_page(args.results, PAGE)
    return show(args.results, [cell.name for cell in chosen], args.what)


if __name__ == "__main__":
    sys.exit(main())
