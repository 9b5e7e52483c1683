"""Times the best of every way in rounds: all are held at once and take steps in turn.

Whatever else the machine does slows all of them alike.
"""

from __future__ import annotations

import gc

from .bench import Bench
from .cells import SHARES
from .rivals import ALONE
from .trials import CLOSE, FAR_BEHIND, Trials
from .ways import Candidate, Ways

BEFORE = ("plans", "trials")  # stages without which rounds do not end a setting
FEW_ROUNDS = 2  # for a way that is not among the fastest; where it is far behind, its trial stands
SHORT_STEP_SECONDS = 0.5  # the step before a shorter one is not timed: caches are then as training leaves them


def chosen(trials: Trials, names: list[str]) -> dict[tuple[float, str], Candidate]:
    """The fastest trial of every way within each limit; compute alone has none, and belongs to all."""
    found: dict[tuple[float, str], Candidate] = {}
    for share in trials.limits:
        for name in names:
            best = trials.best(name, share)
            if best is not None:
                found[share, name] = best[0]
    return found


def check_limits(bench: Bench, ways: Ways, trials: Trials, names: list[str]) -> None:
    """The fastest ways once more, on a device that has no more memory than the limit."""
    for (share, name), candidate in chosen(trials, names).items():
        if (
            name == ALONE
            or not _is_close(trials, candidate, share, CLOSE)
            or bench.log.last("limited", share=share, **candidate.to_dict())
        ):
            continue
        bench.log.add("begin", way=name)
        tried = bench.limited(candidate.batch, ways.build(candidate), trials.limits[share])
        bench.log.add("limited", share=share, peak_bytes=tried.peak_bytes, **candidate.to_dict())


def time_in_rounds(bench: Bench, ways: Ways, trials: Trials, names: list[str], rounds: int) -> None:
    """Goes on from the rounds that are in the log."""
    best = chosen(trials, names)
    wanted = {candidate: _rounds(trials, best, candidate, rounds) for candidate in dict.fromkeys(best.values())}
    wanted = {candidate: most for candidate, most in wanted.items() if _taken(bench, candidate) < most}
    gc.collect()
    bench.log.add("begin", way="rounds")
    held = {candidate: bench.made(ways.build(candidate)) for candidate in wanted}
    for trainer, data in held.values():
        trainer.step(*data)
    for _ in range(rounds):
        bench.check_time()
        for candidate, (trainer, data) in held.items():
            if _taken(bench, candidate) >= wanted[candidate]:
                continue
            trial = trials.known(candidate)
            if trial and trial.seconds and trial.seconds < SHORT_STEP_SECONDS:
                trainer.step(*data)
            bench.log.add("round", seconds=bench.timed(trainer, data), **candidate.to_dict())
    if all(bench.log.last("stage", name=name) for name in BEFORE):
        bench.log.add("done", shares=list(SHARES))


def _rounds(trials: Trials, best: dict[tuple[float, str], Candidate], candidate: Candidate, rounds: int) -> int:
    """Few or none where a rival is behind in every cell that it was chosen for."""
    if candidate.plan or candidate.way == ALONE:
        return rounds
    shares = [share for (share, _), each in best.items() if each == candidate]
    if any(_is_close(trials, candidate, share, CLOSE) for share in shares):
        return rounds
    return FEW_ROUNDS if any(_is_close(trials, candidate, share, FAR_BEHIND) for share in shares) else 0


def _is_close(trials: Trials, candidate: Candidate, share: float, part: float) -> bool:
    attempt = trials.known(candidate)
    assert attempt is not None
    return attempt.rate >= part * trials.fastest(share)


def _taken(bench: Bench, candidate: Candidate) -> int:
    return len(bench.log.all("round", **candidate.to_dict()))
