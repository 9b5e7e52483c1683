"""Reductions of neighbouring replicas that are joined into one all-reduce.

[Note: Joined reductions]
An all-reduce has a latency that does not depend on its size, and a host's work that hardly does. So a unit that every
rank holds whole can leave its gradients to the all-reduce of a unit that backward leaves after it (`reduced_with`).
FSDP2 copies each unit's gradients into a buffer of their own, as ever. When the last of the units has been left, all
buffers are copied into one, that one is averaged over all ranks, and copied back once the next reduction has begun.
The asynchronous engine alone does so, as it makes reductions itself, and only where no cast waits for a result.

[Note: Rule of joining]
The search prices every unit's reduction by itself. Its answer, and every plain way in its space, is then joined: in the
order in which backward leaves units, whole replicas that follow each other are reduced together up to a size. The size
is the one with the shortest step of those that fit the memory, and what is stated of the plan is that of what runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from osdp.cluster import Cluster
from osdp.cost.layout import Layout
from osdp.cost.positions import Places
from osdp.cost.training import Training
from osdp.cost.units import Option, Unit
from osdp.errors import UsageError

DDP_BUCKET_BYTES = 25 << 20  # torch's own
BUCKET_BYTES = (*(1 << power for power in range(18, 31, 2)), DDP_BUCKET_BYTES)  # the sizes that are tried


def can_join(training: Training, cluster: Cluster) -> bool:
    """See [Note: Joined reductions]."""
    is_cast = training.reduce_bytes != training.precision.master_bytes
    return cluster.engine.reduces_before_waiting and cluster.world_size > 1 and not is_cast


def joined(layout: Layout, options: Sequence[Option], nbytes: int, training: Training) -> list[Option]:
    """The options with reductions joined up to so many bytes; see [Note: Rule of joining]."""
    found = apart(options)
    bucket: list[int] = []
    for index in _left(layout):
        unit, option = layout.units[index], found[index]
        fits = sum(_trained(layout.units[i]) for i in (*bucket, index)) * training.reduce_bytes <= nbytes
        if not (bucket and fits and _is_joinable(unit, option) and option.reduce_once == found[bucket[0]].reduce_once):
            _close(layout, found, bucket)
            bucket = []
        if _is_joinable(unit, option):
            bucket.append(index)
    _close(layout, found, bucket)
    return found


def apart(options: Sequence[Option]) -> list[Option]:
    """The options with every unit reduced by itself."""
    return [replace(option, reduced_with=None, carries=0) for option in options]


def _close(layout: Layout, options: list[Option], bucket: Sequence[int]) -> None:
    for index in bucket[:-1]:
        options[index] = replace(options[index], reduced_with=layout.units[bucket[-1]].name)
    if bucket:
        options[bucket[-1]] = replace(options[bucket[-1]], carries=_elements(layout, bucket[:-1]))


def with_carried(layout: Layout, options: Sequence[Option]) -> list[Option]:
    """The options of a plan, of which each says with which unit it is reduced: those units carry the others."""
    found, waiting = list(options), list[int]()
    left = _left(layout)
    for index in left:
        option = options[index]
        is_carried = option.reduced_with is not None
        target = option.reduced_with if is_carried else layout.units[index].name
        if waiting and target != options[waiting[0]].reduced_with:
            break
        if (waiting or is_carried) and not _is_joinable(layout.units[index], option):
            waiting.append(index)
            break
        waiting.append(index)
        if not is_carried:
            _close(layout, found, waiting)
            waiting = []
    missed = waiting or [index for index in carried(options) if index not in left]
    if missed:
        raise UsageError(
            f"the plan joins the reduction of {layout.units[missed[0]].name} with one that does not come right after"
            " it; plan again"
        )
    return found


def places_of(layout: Layout, options: Sequence[Option]) -> list[Places]:
    """The layout's places, where a reduction gives way to the next that begins: a unit that is carried begins none."""
    places = list(layout.places)
    left = _left(layout)
    if not carried(options):
        return places
    gives_way = ends = places[left[-1]].reduced
    for number in range(len(left) - 1, -1, -1):
        index = left[number]
        if options[index].reduced_with is None:
            ends, gives_way = gives_way, places[left[number - 1]].reduced if number else gives_way
        places[index] = replace(places[index], reduced=ends)
    return places


def carried(options: Iterable[Option]) -> frozenset[int]:
    """The places of the units that begin no reduction of their own."""
    return frozenset(index for index, option in enumerate(options) if option.reduced_with is not None)


def _left(layout: Layout) -> list[int]:
    """Units in the order in which backward leaves them."""
    places = layout.places
    found = [(p.leave_backward, index) for index, p in enumerate(places) if p.leave_backward is not None and not p.late]
    return [index for _, index in sorted(found)]


def _is_joinable(unit: Unit, option: Option) -> bool:
    return unit.trained and option.slices == 1 and not option.mode.is_sharded


def _trained(unit: Unit) -> int:
    return sum(parameter.numel for parameter in unit.parameters if parameter.trainable)


def _elements(layout: Layout, indices: Iterable[int]) -> int:
    return sum(_trained(layout.units[index]) for index in indices)
