"""Whether a run goes as its plan says: the median step and the peak beside the predicted ones, and why they part."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from osdp.cluster import format_bytes
from osdp.planfile import Plan
from osdp.report.numbers import format_rate, format_seconds, format_share

WARM_UP_STEPS = 2  # the first ones load libraries and make buffers: they are not what a plan predicts
ENOUGH_STEPS = 8  # of which the median is taken
TOLERANCE = 0.15
_NOTICED = 0.05  # the part of a step from which on something is named as a cause


@dataclass(frozen=True)
class Timing:
    """What a step took, on the rank where it took most.

    `data_seconds` made and moved its batches. `waited_seconds` is what the training thread did not compute in, with
    the network, other ranks or other processes; None where computing is not that thread's work. `saving` says that a
    checkpoint was being written when it began.
    """

    seconds: float
    data_seconds: float
    waited_seconds: float | None
    peak_bytes: int
    saving: bool = False


def typical_seconds(timings: Sequence[Timing]) -> float:
    """The median step, of those that are what a plan predicts if there are any."""
    timed = [each.seconds for each in timings[WARM_UP_STEPS:] if not each.saving]
    return statistics.median(timed or [each.seconds for each in timings])


class Pace:
    """Compares steps with a plan, and says once if they part by more than the tolerance."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._seen = 0
        self._timings: list[Timing] = []
        self._spoken = False

    def parted(self, timing: Timing) -> str | None:
        """Takes a step's timing; a sentence once enough steps were seen and they are not as predicted."""
        self._seen += 1
        if self._seen > WARM_UP_STEPS and not timing.saving:
            self._timings.append(timing)
        if self._spoken or len(self._timings) < ENOUGH_STEPS:
            return None
        self._spoken = True
        return "; ".join([*self._time(), *self._memory()]) or None

    def _time(self) -> Iterator[str]:
        seconds, predicted = self._median("seconds"), self._plan.predicted.step_seconds
        if predicted <= 0 or abs(seconds - predicted) <= TOLERANCE * predicted:
            return
        ratio = f"{format_rate(seconds / predicted)} times the predicted {format_seconds(predicted)}"
        yield f"a step takes {format_seconds(seconds)}, {ratio}: {'; '.join(self._causes(seconds, predicted))}"

    def _causes(self, seconds: float, predicted: float) -> Iterable[str]:
        cluster, found = self._plan.cluster, []
        if not cluster.measured and not cluster.stages:
            found.append(f"{cluster.label} is not measured, so times are from data sheets (`osdp profile` measures it)")
        data = self._median("data_seconds") / seconds
        if seconds > predicted and data > _NOTICED:
            found.append(f"loading data takes {format_share(data)} of it (give files of tokens, on a faster disk)")
        planned = self._plan.predicted.time_parts.get("exposed communication", 0.0) / predicted
        waited = (self._median("waited_seconds") / seconds - data) if self._knows_waits else None
        if seconds > predicted and waited is not None and waited > planned + _NOTICED:
            found.append(
                f"ranks wait {format_share(waited)} of it for the network, each other or busy cores, where "
                f"{format_share(planned)} of exposed communication is planned"
            )
        elif seconds > predicted and waited is None and planned > _NOTICED:
            found.append(f"{format_share(planned)} of it is planned as exposed communication (is the network slower?)")
        return found or [f"{cluster.label} is not as it was measured (run `osdp profile` again, with nothing beside)"]

    def _memory(self) -> Iterator[str]:
        """Resident memory has libraries' buffers in it too: on CPUs only what passes the limit counts."""
        peak, predicted = max(each.peak_bytes for each in self._timings), self._plan.predicted
        on_cpu = self._plan.cluster.device.is_cpu
        if predicted.peak_bytes <= 0 or (on_cpu and peak <= predicted.limit_bytes):
            return
        if abs(peak - predicted.peak_bytes) > TOLERANCE * predicted.peak_bytes:
            limit = f"of {format_bytes(predicted.limit_bytes)}"
            yield (
                f"the peak is {format_bytes(peak)}, predicted {format_bytes(predicted.peak_bytes)} {limit}: "
                + ("plan with a smaller --memory" if peak > predicted.peak_bytes else "a larger batch may fit")
            )

    @property
    def _knows_waits(self) -> bool:
        return all(each.waited_seconds is not None for each in self._timings)

    def _median(self, field: str) -> float:
        return statistics.median(getattr(each, field) for each in self._timings)
