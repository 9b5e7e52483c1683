"""How far planning is, on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from osdp.planning import Progress

SECONDS_BETWEEN_LINES = 5.0
STAGES = {
    "build": "building the model",
    "capture": "tracing the model",
    "search": "searching",
    "baselines": "pricing DDP, ZeRO-2, FSDP and HSDP",
}

Report = Callable[["Progress"], None]


@contextlib.contextmanager
def shown_progress(quiet: bool) -> Iterator[Report | None]:
    """The callback to give to `plan`, or None when nothing is to be shown."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        with _bar() as report:
            yield report
    else:
        yield PlainProgress(lambda line: print(line, file=sys.stderr, flush=True))


def describe(progress: Progress) -> str:
    """'searching: batch size 12, best 34.1 samples/s'."""
    text = STAGES.get(progress.stage, progress.stage)
    if progress.stage == "search" and progress.batch:
        text += f": batch size {progress.batch}"
    if progress.best_samples_per_second > 0:
        text += f", best {progress.best_samples_per_second:.4g} samples/s"
    return text


class PlainProgress:
    """Writes a line when the stage changes, and else at most every few seconds."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._stage = ""
        self._due = 0.0

    def __call__(self, progress: Progress) -> None:
        now = self._clock()
        if progress.stage == self._stage and now < self._due:
            return
        self._stage, self._due = progress.stage, now + SECONDS_BETWEEN_LINES
        count = f" ({progress.done} of {progress.total})" if progress.total > 1 else ""
        self._write(describe(progress) + count)


@contextlib.contextmanager
def _bar() -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    text = TextColumn("{task.description}")
    columns = (SpinnerColumn(), text, BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(STAGES["build"], total=None)

        def report(progress: Progress) -> None:
            bars.update(task, description=describe(progress), completed=progress.done, total=progress.total or None)

        yield report
