"""A planned step in the formats that people's viewers open: a Chrome trace, and a snapshot of the allocator.

[Note: Chrome trace]
One process with two threads, compute and collectives, and the memory as counters: by part, and as a whole beside the
limit. Perfetto and chrome://tracing open it beside what torch.profiler measures. Times are whole nanoseconds: Perfetto
drops an operation that begins before the one ahead of it on its thread has ended, be it by a rounding error.

[Note: Snapshot]
The form of torch.cuda.memory._snapshot(), which torch.cuda._memory_viz and pytorch.org/memory_viz open. What units hold
are allocations of their own, with the unit and the part as frames. Activations and temporaries are known by their bytes
at every mark only, so each rise is an allocation and each fall frees the newest ones.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from osdp.cost.graph import COMMUNICATION, StepGraph
from osdp.cost.lifetimes import unit_allocations
from osdp.cost.positions import CONSTANTS, PARTS, SAVED, TEMPORARIES
from osdp.cost.step_trace import step_trace
from osdp.cost.timeline import Timeline, column_of
from osdp.files import write_bytes, write_text
from osdp.report.step_picture import column_seconds

_BY_LEVEL = (CONSTANTS, SAVED, TEMPORARIES)
_FIRST_ADDRESS = 0x7F0000000000
_STREAM = 0
MEMORY_TOTAL, MEMORY_LIMIT = "memory: all parts", "memory: limit"


def chrome_trace(graph: StepGraph) -> dict[str, Any]:
    """See [Note: Chrome trace]; times are microseconds."""
    trace, timeline = step_trace(graph), graph.timeline()
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "osdp: predicted step of every rank"}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "compute"}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 1, "args": {"name": "collectives"}},
    ]
    for span in trace.spans:
        begin, end = _nanoseconds(span.start), _nanoseconds(span.start + span.seconds)
        details = {"stage": span.stage, "phase": span.phase, "bytes": span.nbytes, "group": span.group}
        events.append(
            {
                "ph": "X",
                "name": f"{span.kind} {span.name}",
                "cat": span.kind,
                "pid": 0,
                "tid": int(span.stream == COMMUNICATION),
                "ts": _microseconds(begin),
                "dur": _microseconds(end - begin),
                "args": {key: value for key, value in details.items() if value},
            }
        )
    for column, second in enumerate(column_seconds(timeline, trace)):
        at = {"ph": "C", "pid": 0, "ts": _microseconds(_nanoseconds(float(second)))}
        args = {name: int(timeline.parts[row, column]) for row, name in enumerate(PARTS)}
        events.append({**at, "name": "memory", "args": args})
        events.append({**at, "name": MEMORY_TOTAL, "args": {"bytes": int(timeline.total[column])}})
    events.append({"ph": "C", "pid": 0, "ts": 0.0, "name": MEMORY_LIMIT, "args": {"bytes": graph.cluster.limit_bytes}})
    return {
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "otherData": {
            "model": graph.layout.graph.name,
            "cluster": graph.cluster.label,
            "micro_batch": graph.batch,
            "accumulation": graph.training.accumulation,
            "step_seconds": trace.step_seconds,
        },
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _microseconds(nanoseconds: int) -> float:
    """What gives these nanoseconds back to readers that round and to those that cut off."""
    value = nanoseconds / 1000
    return value if int(value * 1000) == nanoseconds else math.nextafter(value, math.inf)


@dataclass(frozen=True)
class Allocation:
    """Bytes that are alive from one slot of the timeline up to another, and what they are."""

    part: str
    name: str
    nbytes: int
    begin: int
    end: int


def allocations(graph: StepGraph, timeline: Timeline) -> Iterator[Allocation]:
    """Allocations whose sum at every slot is the timeline's."""
    columns = len(timeline.total)
    for unit, option, places in zip(graph.layout.units, graph.options, graph.layout.places, strict=True):
        for hold in unit_allocations(unit, option, places, graph.training, graph.cluster):
            begin, end = (column_of(at, timeline.starts, columns) for at in (hold.start, hold.end))
            if hold.part not in _BY_LEVEL and hold.nbytes and end > begin:
                yield Allocation(hold.part, unit.name, hold.nbytes, begin, end)
    for part in _BY_LEVEL:
        yield from _levels(part, timeline)


def _levels(part: str, timeline: Timeline) -> Iterator[Allocation]:
    """A part that is known by its bytes at every slot; see [Note: Snapshot]."""
    row, before = timeline.parts[PARTS.index(part)], 0
    alive: list[tuple[int, str, int]] = []  # begin, name, bytes; the newest last
    for column, value in enumerate(row.tolist()):
        change, before = value - before, value
        if change > 0:
            alive.append((column, str(timeline.moment(column)), change))
        while change < 0:
            begin, name, nbytes = alive.pop()
            yield Allocation(part, name, nbytes, begin, column)
            change += nbytes
            if change > 0:
                alive.append((column, name, change))
                break
    for begin, name, nbytes in alive:
        yield Allocation(part, name, nbytes, begin, len(row))


def memory_snapshot(graph: StepGraph) -> dict[str, Any]:
    """See [Note: Snapshot]. Every allocation is a segment of its own: nothing is reserved beyond what is used."""
    timeline = graph.timeline()
    seconds = column_seconds(timeline, step_trace(graph))
    columns = len(timeline.total)
    begins: dict[int, list[tuple[int, Allocation]]] = {}
    ends: dict[int, list[tuple[int, Allocation]]] = {}
    addresses = count(_FIRST_ADDRESS, 1 << 40)
    for each in allocations(graph, timeline):
        at = next(addresses), each
        begins.setdefault(each.begin, []).append(at)
        ends.setdefault(each.end, []).append(at)
    events: list[dict[str, Any]] = []
    for column in range(columns):
        time = round(float(seconds[column]) * 1e6)
        for address, each in ends.get(column, ()):
            for action in ("free_requested", "free_completed", "segment_free"):
                events.append(_event(action, address, each, time))
        for address, each in begins.get(column, ()):
            for action in ("segment_alloc", "alloc"):
                events.append(_event(action, address, each, time))
    left = ends.get(columns, ())
    return {
        "segments": [_segment(address, each) for address, each in left],
        "device_traces": [events],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _event(action: str, address: int, each: Allocation, time: int) -> dict[str, Any]:
    event = {"action": action, "addr": address, "size": each.nbytes, "stream": _STREAM, "time_us": time}
    return {**event, "frames": _frames(each)}


def _frames(each: Allocation) -> list[dict[str, Any]]:
    return [{"filename": each.part, "name": each.name, "line": 0}]


def _segment(address: int, each: Allocation) -> dict[str, Any]:
    block = {
        "address": address,
        "size": each.nbytes,
        "requested_size": each.nbytes,
        "state": "active_allocated",
        "frames": _frames(each),
    }
    return {
        "device": 0,
        "address": address,
        "total_size": each.nbytes,
        "allocated_size": each.nbytes,
        "active_size": each.nbytes,
        "requested_size": each.nbytes,
        "stream": _STREAM,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [block],
    }


def write_predicted(graph: StepGraph, trace: Path, memory: Path) -> None:
    """Writes the predicted step: the Chrome trace, and the snapshot."""
    write_text(json.dumps(chrome_trace(graph), allow_nan=False), trace)
    write_bytes(pickle.dumps(memory_snapshot(graph), protocol=4), memory)
