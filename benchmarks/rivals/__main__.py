"""Measures rivals beside osdp, setting by setting, the most telling first (root needed); writes results as it goes.

python -m benchmarks.rivals --minutes 25        # what fits into 25 minutes; goes on where the run before ended
python -m benchmarks.rivals --smoke             # one tiny setting, a few minutes
python -m benchmarks.rivals --settings deep-2x2 # settings whose names begin like this
python -m benchmarks.rivals --stages memory,plans,limits   # what needs no clock: the machine may do other work
python -m benchmarks.rivals --what size         # the largest model that trains within a limit
python -m benchmarks.rivals --what ablations    # osdp without each of its parts
python -m benchmarks.rivals --page              # tables, plots and the documentation's page from the results
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from .cells import settings, smoke
from .run import STAGES, Limits, log_file, run_settings

RESULTS = Path(__file__).parents[1] / "results"
PAGE = Path(__file__).parents[2] / "docs" / "benchmarks"
WHATS = ("throughput", "size", "ablations")
SMOKE_ROUNDS, SMOKE_PROFILE_SECONDS = 3, 8.0


def main() -> int:
    args = _parser().parse_args()
    chosen = smoke() if args.smoke else settings(args.what)
    if args.settings:
        chosen = [each for each in chosen if each.name.startswith(tuple(args.settings.split(",")))]
    if args.list:
        print("\n".join(each.name for each in chosen))
        return 0
    if args.fresh:
        for each in chosen:
            log_file(args.results, each, args.what).unlink(missing_ok=True)
    if not args.page:
        rounds = SMOKE_ROUNDS if args.smoke else args.rounds
        profile = SMOKE_PROFILE_SECONDS if args.smoke else args.profile_seconds
        limits = Limits(60 * args.minutes, rounds, profile, tuple(args.stages.split(",")))
        run_settings(chosen, args.results, limits, what=args.what)
    from .page import show, write_page

    if args.page:
        write_page(args.results, PAGE)
    return show(args.results, [each.name for each in chosen], args.what)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=WHATS, default=WHATS[0])
    parser.add_argument("--minutes", type=float, default=25.0, help="to spend (default %(default)g)")
    parser.add_argument("--smoke", action="store_true", help="a tiny setting with few rounds")
    parser.add_argument("--settings", help="only those whose names begin with one of these, separated by commas")
    parser.add_argument("--stages", default=",".join(STAGES), help="in this order (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of every cell (default %(default)s)")
    parser.add_argument("--profile-seconds", type=float, default=20.0, help="for osdp's profile (default %(default)g)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results (default %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument("--page", action="store_true", help="do not measure; write the page and its plots")
    parser.add_argument("--list", action="store_true", help="show the settings in order")
    return parser


if __name__ == "__main__":
    sys.exit(main())
