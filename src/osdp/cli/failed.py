"""What becomes of an error: a sentence and an exit code, never a traceback.

[Note: Exit codes]
0 done; 1 something failed; 2 the input must be corrected; 3 no plan fits the memory; 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from osdp.errors import DoesNotFit, OsdpError, UsageError

FAILED, USAGE, DOES_NOT_FIT, INTERRUPTED = 1, 2, 3, 130


class Failed(Exception):
    """A command has failed and has said why; what is left is the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@contextmanager
def errors_said() -> Iterator[None]:
    """Says the error that ends what runs inside."""
    try:
        yield
    except KeyboardInterrupt:
        _say("interrupted")
        raise Failed(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader has seen enough. Python would flush once more at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise Failed(FAILED) from None
    except DoesNotFit as error:
        _show_does_not_fit(error)
        raise Failed(DOES_NOT_FIT) from None
    except (OsdpError, OSError) as error:
        _say(f"error: {error}")
        raise Failed(USAGE if isinstance(error, UsageError) else FAILED) from None


def _say(sentence: str) -> None:
    print(f"osdp: {sentence}", file=sys.stderr)


def _show_does_not_fit(error: DoesNotFit) -> None:
    from osdp.report.page import misfit_page
    from osdp.report.printing import console
    from osdp.report.terminal import print_misfit

    print_misfit(misfit_page(error), console(sys.stderr))
