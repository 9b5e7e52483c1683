"""Finds every way at its best within each limit: memory first, which needs no clock, then short timed trials."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace

from .bench import Bench, OutOfTime, figures
from .cells import SHARES
from .data_parallel import ddp
from .job import FULL, HALF, NONE, SELECTIVE, NotHere
from .ladder import FIRST, Attempt, largest_batch
from .rivals import ALONE, AUTO, OSDP, Rival
from .ways import Candidate, Ways

MOST_BATCH = 64  # samples of a step for each rank, whoever takes them
FAR_BEHIND = 0.7  # of the fastest so far: such a way is not refined, as it cannot become the best
CLOSE = 0.9  # of the fastest: such a way may be the best, and is timed in all rounds
ALONE_BATCHES = (4, 8)


def limits(bench: Bench) -> dict[float, int]:
    """The bytes of each limit, from DDP's peak at one sample a rank."""
    known = bench.log.last("limits")
    if known is None:
        reference = bench.peak(1, lambda: ddp(bench.job(1)))
        bench.log.add("limits", ddp_bytes=reference.peak_bytes, bytes=[int(s * reference.peak_bytes) for s in SHARES])
        known = bench.log.last("limits")
    assert known is not None
    return dict(zip(SHARES, known["bytes"], strict=True))


class Trials:
    """Attempts that are in the log are not repeated, whichever limit they were made for."""

    def __init__(self, bench: Bench, ways: Ways) -> None:
        self.bench, self.ways, self.log = bench, ways, bench.log
        self.limits = limits(bench)

    def each(self, act: Callable[[Rival], None]) -> None:
        """Does something with every way; one that does not exist here, or fails, must not end the others."""
        for rival in self.ways:
            if self.log.last("none", way=rival.name, share=None):
                continue
            self.log.add("begin", way=rival.name)
            try:
                act(rival)
            except OutOfTime:
                raise
            except NotHere as error:
                self.log.add("none", way=rival.name, why=str(error), share=None)
            except Exception as error:
                traceback.print_exc()
                why = f"fails: {type(error).__name__}: {str(error)[:300]}"
                self.log.add("none", way=rival.name, why=why, share=None)

    def memory(self, rival: Rival) -> None:
        """Peaks of the first batches, which say where each limit will be met."""
        for recompute in (NONE, FULL):
            for batch in FIRST:
                if recompute in rival.recomputes:
                    self._peak(Candidate(rival.name, batch, recompute, rival.switches))

    def compete(self, rival: Rival) -> None:
        for share in self.limits:
            self._compete(rival, share)

    def alone(self) -> None:
        """The fastest that these ranks compute at any batch, without a limit and without communication."""
        for batch in ALONE_BATCHES:
            self.trial(Candidate(ALONE, batch))

    def _compete(self, rival: Rival, share: float) -> None:
        """Every recompute at the largest batch, then the rival's other switches at the best."""
        for recompute in (NONE, FULL, SELECTIVE, HALF):
            best = self.best(rival.name, share)
            if best is not None and best[0].recompute == NONE and best[0].batch >= self._most(rival):
                break  # recompute would make room for nothing
            if recompute in rival.recomputes and (recompute in (NONE, FULL) or self._close(rival.name, share)):
                self._largest(rival, recompute, self.limits[share])
        best = self.best(rival.name, share)
        if best is None:
            peaks = [
                line["peak_bytes"] for line in self.log.lines if line.get("way") == rival.name and "seconds" in line
            ]
            self.log.add("none", way=rival.name, why="does not fit", share=share, peak_bytes=min(peaks))
            return
        for other in rival.others if self._close(rival.name, share) else ():
            self.trial(replace(best[0], switches={**best[0].switches, **other}))

    def _largest(self, rival: Rival, recompute: str, limit: int) -> None:
        """Times the largest batch that fits."""
        candidate = Candidate(rival.name, 1, recompute, rival.switches)
        most = self._most(rival)
        expected = self._between(candidate) if recompute in (SELECTIVE, HALF) else None

        def attempt(batch: int) -> Attempt:
            tried = replace(candidate, batch=batch)
            return self._peak(tried) if batch in FIRST else self.trial(tried)

        batch, _ = largest_batch(attempt, limit_bytes=limit, most=most, expected=expected)
        if batch is not None:
            self.trial(replace(candidate, batch=batch))

    def _most(self, rival: Rival) -> int:
        """The batch that gives a step as many samples as any may have."""
        one = self._peak(Candidate(rival.name, 1, rival.recomputes[0], rival.switches))
        return max(1, MOST_BATCH * self.bench.setting.ranks // one.samples)

    def _between(self, candidate: Candidate) -> dict[int, int]:
        """Peaks where a part is recomputed: about the middle of those of none and of all."""
        peaks = [[self._peak(replace(candidate, batch=b, recompute=r)).peak_bytes for r in (NONE, FULL)] for b in FIRST]
        return {batch: sum(pair) // 2 for batch, pair in zip(FIRST, peaks, strict=True)}

    def _peak(self, candidate: Candidate) -> Attempt:
        """Timed attempts have a peak too."""
        known = self.known(candidate)
        if known is None:
            known = self.bench.peak(candidate.batch, self.ways.build(candidate))
            self.log.add("peak", **candidate.to_dict() | figures(known))
        return known

    def trial(self, candidate: Candidate) -> Attempt:
        known = self.known(candidate)
        if known is None or known.seconds is None:
            known = self.bench.trial(candidate.batch, self.ways.build(candidate))
            self.log.add("trial", **candidate.to_dict() | figures(known))
        return known

    def known(self, candidate: Candidate) -> Attempt | None:
        line = self.log.last("trial", **candidate.to_dict()) or self.log.last("peak", **candidate.to_dict())
        return line and Attempt(line["batch"], line["samples"], line["seconds"], line["peak_bytes"])

    def best(self, way: str, share: float) -> tuple[Candidate, Attempt] | None:
        """The fastest trial within the limit; a plan must have been made for it. Compute alone has no limit."""
        found = []
        for line in self.log.all("trial", way=way):
            candidate = Candidate.of(line)
            attempt = self.known(candidate)
            assert attempt is not None
            fits = way == ALONE or attempt.peak_bytes <= self.limits[share]
            if fits and (not candidate.plan or self.log.last("plan", plan=candidate.plan, share=share)):
                found.append((candidate, attempt))
        return max(found, key=lambda pair: pair[1].rate, default=None)

    def fastest(self, share: float) -> float:
        """Samples a second of the fastest so far, rival or plan."""
        found = [self.best(name, share) for name in (OSDP, AUTO, *(rival.name for rival in self.ways))]
        return max((best[1].rate for best in found if best), default=0.0)

    def _close(self, way: str, share: float) -> bool:
        best = self.best(way, share)
        return best is not None and best[1].rate >= FAR_BEHIND * self.fastest(share)
