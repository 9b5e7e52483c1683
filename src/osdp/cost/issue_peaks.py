"""What gathers that are issued one after the other hold at most; a unit by itself cannot say it.

[Note: Two at once]
Where one unit issues two gathers, both are at one slot, but the second one's temporary (the cast of what the rank
sends) is made when the first one's is gone. The sum of both units' allocations has the two temporaries side by side.
What that is too much depends on both units, so it is taken back for a block as a whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from osdp.cluster import Cluster
from osdp.cost.lifetimes import forward_issue, unit_allocations
from osdp.cost.positions import BUFFERS, Allocation, Places, Position
from osdp.cost.training import Training
from osdp.cost.units import Option, Unit


def counted_twice(
    units: Sequence[Unit], options: Sequence[Option], places: Sequence[Places], training: Training, cluster: Cluster
) -> list[Allocation]:
    """What a block's allocations have too much where two gathers are issued at one place, as negative bytes."""
    issued: dict[Position, list[tuple[int, int, int]]] = defaultdict(list)
    for unit, option, own in zip(units, options, places, strict=True):
        turns = (forward_issue(own, cluster), own.turn), (own.issue_backward, own.turn_again)
        held = unit_allocations(unit, option, own, training, cluster) if any(issue for issue, _ in turns) else []
        for issue, turn in turns:
            if issue is not None:
                begun = [each for each in held if each.start == issue]
                brief = sum(each.nbytes for each in begun if each.end == issue.next())
                issued[issue].append((turn, brief, sum(each.nbytes for each in begun) - brief))
    found = []
    for issue, gathers in issued.items():
        if len(gathers) > 1:
            most = lasting = 0
            for _, brief, held_on in sorted(gathers):
                lasting += held_on
                most = max(most, lasting + brief)
            summed = lasting + sum(brief for _, brief, _ in gathers)
            found.append(Allocation(BUFFERS, most - summed, issue, issue.next()))
    return [each for each in found if each.nbytes]
