"""Random small decision problems, with everything that a real one has: splits, overlap, recompute, spanning units."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from osdp.search.problem import (
    GATHERED_FIRST,
    REDUCED,
    REDUCED_LAST,
    SECONDS,
    Amount,
    CrossStageUnit,
    Problem,
    Rows,
    Seconds,
    StageTable,
    UnitOption,
    VariantTable,
)
from osdp.search.streams import Act, Op, StagePass

MIB = 1 << 20


class _Draw:
    """A seeded source of small numbers: ties are frequent on purpose."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self._hosts = np.random.default_rng([seed, 3])
        self._inputs = np.random.default_rng([seed, 4])
        self._depths = np.random.default_rng([seed, 1])  # of its own: seeds that tests name stay what they were
        self._firsts = np.random.default_rng([seed, 2])
        self._parts = np.random.default_rng([seed, 5])

    def nbytes(self, most: int = 40) -> int:
        return int(self.random.integers(0, most + 1)) * MIB + int(self.random.integers(0, 2)) * 12345

    def seconds(self, most: int = 8) -> float:
        return float(self.random.integers(0, most + 1)) / 8

    def integer(self, low: int, high: int) -> int:
        return int(self.random.integers(low, high + 1))

    def chance(self, p: float) -> bool:
        return bool(self.random.random() < p)

    def host(self) -> int:
        """Bytes of an option on the host: half of them have none."""
        return int(self._hosts.integers(1, 40)) * MIB + 321 if self._hosts.random() < 0.5 else 0

    def input(self) -> int:
        """Bytes of a variant on the host: one of four has some."""
        return int(self._inputs.integers(1, 40)) * MIB + 123 if self._inputs.random() < 0.25 else 0

    def host_limit(self, stages: int) -> int | None:
        return int(self._hosts.integers(0, 40 * stages + 1)) * MIB if self._hosts.random() < 0.6 else None

    def first(self) -> str:
        """When a unit is gathered: by every micro-batch, by the first alone, or more by the first."""
        return ("every", "every", "once", "more")[int(self._firsts.integers(0, 4))]

    def in_part(self) -> bool:
        """Whether something is in a part of the space that is searched first."""
        return bool(self._parts.random() < 0.5)

    def depth(self) -> int:
        return 2 if self._depths.random() < 0.4 else 1


def _amount(draw: _Draw, split: bool, most: int = 40) -> Amount:
    return Amount(draw.nbytes(most), draw.nbytes(most // 4) if split else 0)


def _duration(draw: _Draw, split: bool) -> Seconds:
    return Seconds(draw.seconds(), draw.seconds(2) if split else 0.0)


def _rows(draw: _Draw, length: int) -> Rows:
    tail = draw.integer(0, length)
    head = draw.integer(0, length)
    places = np.arange(length)
    activations = [draw.integer(-10, 30) * MIB for _ in range(length)]
    activations[0] = abs(activations[0])
    return Rows(
        np.array(activations, dtype=np.int64),
        places >= tail,
        places == tail,
        places < head,
    )


def _table(draw: _Draw, length: int, split: bool) -> np.ndarray:
    return np.array([[draw.nbytes(), draw.nbytes(8) if split else 0] for _ in range(length)], dtype=np.int64).reshape(
        length, 2
    )


def _times(draw: _Draw, split: bool, micro: int) -> dict[str, Seconds]:
    """What a unit takes; some are not gathered at all, not again, or once; some are reduced once, or in part."""
    when = ("every", "once", "in part")[draw.integer(0, 2)]
    names = [name for name in SECONDS if name not in GATHERED_FIRST]
    found = {name: _duration(draw, split) for name in names if split or not name.startswith("slice")}
    for name, last in zip(REDUCED, REDUCED_LAST, strict=True):
        if last in found and (micro == 1 or when == "every"):
            found[last] = Seconds()
        elif last in found and when == "once":  # all of it in the last micro-batch; else a part of it
            found[name], found[last] = Seconds(), found[name]
    for name in ("gather", "gather_again"):
        found[name] = Seconds(0.0) if draw.chance(0.3) else Seconds(draw.seconds() + 0.125)
    first = draw.first() if micro > 1 else "every"
    for name, more in zip(("gather", "copy"), GATHERED_FIRST, strict=True) if first != "every" else ():
        found[more] = found[name]
        found[name] = Seconds() if first == "once" else found[name]
    return found


def _option(draw: _Draw, key: object, forward: int, backward: int, micro: int, far: np.ndarray | None) -> UnitOption:
    slices = draw.integer(2, 4) if draw.chance(0.25) else 1
    split = slices > 1
    return UnitOption(
        key=key,
        forward=_table(draw, forward, split),
        backward=_table(draw, backward, split),
        slices=slices,
        always=_amount(draw, split),
        between=Amount() if far is not None else _amount(draw, split, 20),
        after=Amount() if far is not None else _amount(draw, split, 20),
        stepping=_amount(draw, split, 10),
        ahead=_amount(draw, split, 40),
        cast=_amount(draw, split, 6),
        ahead_backward=_amount(draw, split, 40),
        cast_backward=_amount(draw, split, 6),
        reducing=_amount(draw, split, 60),
        host=Amount(draw.host()),
        far=far,
        is_plain=draw.in_part(),
        **_times(draw, split, micro),
    )


def _forward(draw: _Draw, units: int, early: bool, depth: int) -> StagePass:
    """Units are entered one after the other, each issues the gather `depth` units on, before it waits or then."""
    ops: list[Op] = [Op(Act.RUN, seconds=draw.seconds())] if draw.chance(0.3) else []
    gather = ("gather", "gather_first")
    for unit in range(units):
        following = [Op(Act.ISSUE, unit + depth, gather)] if unit + depth < units else []
        following += [Op(Act.ISSUE_NEXT)] if unit + 1 == units else []
        wait = Op(Act.WAIT, unit, gather)
        copied = Op(Act.RUN, unit, ("copy", "copy_first", "slice_run"))
        ops += [*following, wait, copied] if early else [wait, copied, *following]
        ops.append(Op(Act.RUN, unit, ("slice_rest",), draw.seconds()))
        if draw.chance(0.1):  # a second call
            again = ("gather_again",)
            ops += [Op(Act.ISSUE, unit, again), Op(Act.WAIT, unit, again), Op(Act.RUN, unit, ("copy_again",))]
    return StagePass(tuple(ops), tuple(range(min(depth, units))), gather)


def _backward(draw: _Draw, units: int, early: bool, depth: int) -> StagePass:
    """Units are entered the other way round; each is reduced as it is left, or all at the end."""
    ops: list[Op] = []
    reductions: list[Op] = []
    nested = draw.chance(0.3)
    for unit in reversed(range(units)):
        ops += [
            Op(Act.WAIT, unit, ("gather_again",)),
            Op(Act.RUN, unit, ("copy_again", "slice_run_again", "slice_reduce", "slice_reduce_last")),
        ]
        ops += [Op(Act.ISSUE, unit - depth, ("gather_again",))] if unit >= depth else []
        ops += [] if unit else [Op(Act.ISSUE_NEXT)]
        ops.append(Op(Act.RUN, unit, ("slice_rest_again",), draw.seconds()))
        copied, wait = Op(Act.RUN, unit, ("copy_reduce", "copy_reduce_last")), Op(Act.WAIT_REDUCED)
        reduction = [copied, wait] if early else [wait, copied]
        reduction.append(Op(Act.REDUCE, unit, ("reduce", "reduce_last")))
        if nested:
            reductions += reduction
        else:
            ops += reduction
    ahead = tuple(range(units - 1, max(-1, units - 1 - depth), -1))
    return StagePass((*ops, *reductions), ahead, ("gather_again",))


def _variant(draw: _Draw, key: object, units: int, options: int, micro: int) -> VariantTable:
    early, depth = draw.chance(0.5), draw.depth()
    forward, backward = draw.integer(1, 3), draw.integer(1, 3)
    return VariantTable(
        key=key,
        units=tuple(
            tuple(_option(draw, (u, o), forward, backward, micro, None) for o in range(draw.integer(1, options)))
            for u in range(units)
        ),
        forward=_rows(draw, forward),
        backward=_rows(draw, backward),
        saved=draw.nbytes(20),
        freed=-draw.nbytes(20),
        forward_pass=_forward(draw, units, early, depth),
        backward_pass=_backward(draw, units, early, depth),
        host=draw.input(),
        is_whole=draw.in_part(),
    )


def _spanning(draw: _Draw, stages: list[StageTable]) -> list[StageTable]:
    """Gives the first stage's first unit rows in the last stage, and bytes everywhere in between."""
    first, last = stages[0].variants[0], stages[-1].variants[0]
    stage_passes = 2 * len(stages)
    options = []
    for option in first.units[0]:
        far = np.array([draw.nbytes(10) for _ in range(stage_passes)], dtype=np.int64)
        far[[0, len(stages) - 1, len(stages), stage_passes - 1]] = 0
        values = {**option.__dict__, "far": far, "between": Amount(), "after": Amount()}
        options.append(UnitOption(**values))
    guest = CrossStageUnit(
        0,
        0,
        tuple(_table(draw, len(last.forward), option.slices > 1) for option in options),
        tuple(_table(draw, len(last.backward), option.slices > 1) for option in options),
    )
    first = VariantTable(**{**first.__dict__, "units": (tuple(options), *first.units[1:])})
    unit = (0, 0)
    again = ("gather_again",)
    entered = Op(Act.ISSUE, unit, again), Op(Act.WAIT, unit, again), Op(Act.RUN, unit, ("copy_again",))
    passed = StagePass((*entered, *last.backward_pass.ops), last.backward_pass.pending, again)
    last = VariantTable(**{**last.__dict__, "cross_stage_units": (guest,), "backward_pass": passed})
    ends = StageTable((first,), stages[0].alike), StageTable((last,), stages[-1].alike)
    return [ends[0], *stages[1:-1], ends[1]]


def random_problem(seed: int) -> Problem:
    """A problem whose choices can all be tried, with a limit that is neither hopeless nor idle."""
    draw = _Draw(seed)
    micro = draw.integer(1, 3) if draw.chance(0.3) else 1

    def units() -> int:
        return draw.integer(1, 2) + draw.depth() - 1

    alike_run = draw.chance(0.4)
    if alike_run:  # one kind of stage, many times: the groups of the search are at work
        count = draw.integer(7, 8)
        table = StageTable((_variant(draw, 0, 1, 2, micro),), 0)
        if all(option.slices > 1 for option in table.variants[0].units[0]):
            table = StageTable((_variant(draw, 0, 1, 1, micro),), 0)
        stages = [table] * count
    else:
        count = draw.integer(1, 3)
        stages = [
            StageTable(
                tuple(
                    _variant(draw, s, draw.integer(1, 2) + draw.depth() - 1, 2, micro)
                    for s in range(draw.integer(1, 2))
                ),
                i,
            )
            for i in range(count)
        ]
        if count == 3 and draw.chance(0.3):
            stages = _spanning(draw, stages)
    overlap = draw.integer(0, 2) / 2  # none, in part, all
    constant, limit = draw.nbytes(10), draw.integer(60, 500) * MIB
    return Problem(tuple(stages), constant, limit, overlap, micro, draw.nbytes(10), draw.host_limit(len(stages)))


def random_blocks(seed: int) -> Problem:
    """A run of alike blocks, each in one of two variants with an option or two, between two other stages."""
    draw = _Draw(seed)
    micro = 2 if draw.chance(0.2) else 1

    def unsplit(variant: VariantTable) -> VariantTable:
        """Choices of a block are columns of the program: nothing of them is split."""
        units = tuple(tuple(replace(option, slices=1) for option in unit) for unit in variant.units)
        return replace(variant, units=units)

    block = StageTable(tuple(unsplit(_variant(draw, s, 1, 2, micro)) for s in range(2)), 1)
    ends = [StageTable((_variant(draw, 0, 1, 1, micro),), number) for number in (0, 2)]
    count = 6 if sum(len(variant.units[0]) for variant in block.variants) < 4 else 5
    stages = (ends[0], *[block] * count, ends[1])
    constant, limit, overlap = draw.nbytes(10), draw.integer(150, 700) * MIB, 1.0 if draw.chance(0.7) else 0.5
    return Problem(stages, constant, limit, overlap, micro, host_limit=draw.host_limit(len(stages)))


seeds = st.integers(min_value=0, max_value=2**32 - 1)  # of random_problem
