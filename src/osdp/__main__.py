"""The command `osdp`, and `python -m osdp`."""

from __future__ import annotations

import sys


def main() -> int:
    try:
        from osdp.cli.main import main as run
    except KeyboardInterrupt:  # so early that nothing is there yet to say it
        print("osdp: interrupted", file=sys.stderr)
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
