"""The seconds of a unit's option on the two streams, as lines in the number of its sharded slices.

[Note: Slices in turn]
The slices of an operator take turns. The first gather is issued by the unit before; while a slice computes, the next
one is gathered, and in backward the last one is reduced, so of n slices each of the first n - 1 takes the longer of
its kernels and these collectives. The next unit's gather is issued with the last slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from osdp.cluster import Cluster
from osdp.cost.positions import Places
from osdp.cost.time_model import Collective, Compute, slice_work
from osdp.cost.training import Training
from osdp.cost.units import Option, Unit
from osdp.search.problem import Seconds
from osdp.sharding import REPLICATE

Lines = dict[str, Any]  # by the names of `UnitOption`, each a `Seconds`


class SliceWires(NamedTuple):
    """Seconds on the wire of one sharded slice, and of the reduction of a replicated one.

    What ends in `_last` comes on top in the last micro-batch.
    """

    slices: int
    gather: float
    gather_again: float
    reduce: float
    replica_reduce: float
    reduce_last: float
    replica_reduce_last: float


def option_lines(
    unit: Unit, option: Option, places: Places, training: Training, cluster: Cluster
) -> tuple[Lines, SliceWires]:
    """What does not depend on the batch size, and what slices' turns depend on."""
    own = slice_work(unit, option, option.mode, places, training, cluster)
    slices = option.slices
    replicated = not option.mode.is_sharded
    rest = own if slices == 1 else slice_work(unit, option, REPLICATE, places, training, cluster)

    def line(own: float, other: float) -> Seconds:
        """`own` for each sharded slice, `other` for each of the rest."""
        return Seconds(slices * own) if replicated or slices == 1 else Seconds(slices * other, own - other)

    (often, last), (rest_often, rest_last) = _by_when(own.reduce), _by_when(rest.reduce)
    first = [each for each in own.gather if each.first]  # of whole units only
    gather = [each for each in own.gather if not each.first]
    sent = gather, own.gather_again, often, rest_often, last, rest_last
    wires = SliceWires(slices, *(_wire(each) for each in sent))
    gathered = line(wires.gather + wires.gather_again, 0.0)
    reduced = line(wires.reduce, wires.replica_reduce)
    reduced_last = line(wires.reduce_last, wires.replica_reduce_last)
    found = {
        "gather": Seconds(wires.gather),
        "gather_again": Seconds(wires.gather_again),
        "reduce": Seconds(wires.reduce),
        "gather_first": Seconds(_wire(first)),
        "copy": line(_copies(gather), _copies(rest.gather)),
        "copy_first": Seconds(_copies(first)),
        "copy_again": line(_copies(own.gather_again), _copies(rest.gather_again)),
        "copy_reduce": line(_copies(often), _copies(rest_often)),
        "reduce_last": Seconds(wires.reduce_last),
        "copy_reduce_last": line(_copies(last), _copies(rest_last)),
        "step": line(own.step_seconds, rest.step_seconds),
    }
    if slices > 1:
        found["slice_wires"] = Seconds(gathered.base - wires.gather - wires.gather_again, gathered.slope)
        found["slice_wires_reduce"] = Seconds(reduced.base - wires.reduce, reduced.slope)
        found["slice_wires_reduce_last"] = Seconds(reduced_last.base - wires.reduce_last, reduced_last.slope)
    return found, wires


def _by_when(work: Sequence[Collective]) -> tuple[list[Collective], list[Collective]]:
    """What every micro-batch does of a reduction, and what the last one does beyond that."""
    return [each for each in work if not each.once], [each for each in work if each.once]


def _wire(work: Sequence[Collective]) -> float:
    return sum(collective.seconds for collective in work)


def _copies(work: Sequence[Collective]) -> float:
    return sum(collective.copy_seconds + collective.taken_seconds for collective in work)


class Kernels(NamedTuple):
    """The seconds of a unit's own kernels in both passes, at one batch size."""

    forward: float
    backward: float

    @staticmethod
    def of(places: Places, forward: Compute, backward: Compute, low: int, high: int) -> Kernels:
        """The kernels between where a unit is entered and left; `low` and `high` as in `Compute.between`."""
        spans = (forward, places.enter, places.leave), (backward, places.enter_backward, places.leave_backward)
        found = []
        for compute, enter, leave in spans:
            inside = enter is not None and leave is not None and enter.stage_pass == leave.stage_pass
            found.append(compute.between(enter.slot // 3, leave.slot // 3, low, high) if inside else 0.0)  # type: ignore[union-attr]
        return Kernels(*found)


def slice_lines(wires: SliceWires, kernels: Kernels, *, replicated: bool) -> Lines:
    """What slices' turns take; see [Note: Slices in turn]."""
    slices = wires.slices
    if slices == 1:
        return {}
    first, again = kernels.forward / slices, kernels.backward / slices
    gathered = _waits(wires.gather, first), _waits(wires.gather_again, again)
    reduced = _waits(wires.gather_again + wires.reduce, again)
    replica = _waits(wires.replica_reduce, again)
    reduced_last = _waits(wires.gather_again + wires.reduce + wires.reduce_last, again) - reduced
    replica_last = _waits(wires.replica_reduce + wires.replica_reduce_last, again) - replica
    reduced -= gathered[1]

    def turns(own: float, other: float) -> Seconds:
        """The waits of all turns but one sharded slice's."""
        return Seconds((slices - 1) * own) if replicated else Seconds(slices * other - own, own - other)

    def run(kernels: float, waits: Seconds) -> Seconds:
        return Seconds((slices - 1) * kernels + waits.base, waits.slope)

    return {
        "slice_run": run(first, turns(gathered[0], 0.0)),
        "slice_rest": Seconds(-(slices - 1) * first),
        "slice_run_again": run(again, turns(gathered[1], 0.0)),
        "slice_rest_again": Seconds(-(slices - 1) * again),
        "slice_reduce": turns(replica if replicated else reduced, replica),
        "slice_reduce_last": turns(replica_last if replicated else reduced_last, replica_last),
    }


def _waits(wire: float, kernels: float) -> float:
    return max(0.0, wire - kernels)
