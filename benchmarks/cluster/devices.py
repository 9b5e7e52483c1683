"""A share of the CPUs for each rank's computation, so that ranks are devices of their own.

[Note: Devices] Ranks that share CPUs lend each other the time in which they wait: a pipeline's bubble, or a wait for a
collective, costs next to nothing, as another rank computes meanwhile. Devices of a real cluster cannot do that. So the
thread that computes, a rank's first one, belongs to a bandwidth group of its own, which gets `COMPUTE` of the CPUs
divided by the ranks and no more, whatever the others do. The other threads of a rank communicate; they stay outside
and have the rest of the CPUs, as collectives have little of an accelerator.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

from . import network

GROUPS = Path("/sys/fs/cgroup/cpu")  # threads of one process in several groups: the first version of control groups
COMPUTE = 0.8  # of the CPUs
PERIOD_MICROSECONDS = 10_000  # shorter ones are kept less exactly: the kernel looks every 4 ms
LOOK_SECONDS = 0.25  # for threads that a rank has made since


class Devices:
    """The groups of a cluster's ranks, from their start on; `share` is what each has of one CPU."""

    def __init__(self, name: str, ranks: int) -> None:
        if not (GROUPS / "tasks").exists():
            raise network.ClusterUnavailable(
                f"there are no CPU groups of version 1 at {GROUPS}, which give each rank a share of its own; "
                "run without them (devices=False): ranks then share all CPUs"
            )
        self.share = min(1.0, COMPUTE * (os.cpu_count() or 1) / ranks)
        self._groups = [GROUPS / f"{name}-rank{rank}" for rank in range(ranks)]

    @contextmanager
    def held(self, processes: Iterable[int]) -> Iterator[None]:
        """Until the context ends, the first threads of these processes are in their groups, and no other thread."""
        over = Event()
        groups = dict(zip(processes, self._groups, strict=True))
        for process, group in groups.items():
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
            (group / "cpu.cfs_quota_us").write_text(str(int(self.share * PERIOD_MICROSECONDS)))
            _move(group, process)
        watch = Thread(target=self._watch, args=(groups, over), daemon=True)
        watch.start()
        try:
            yield
        finally:
            over.set()
            watch.join()

    def close(self) -> None:
        """Removes the groups; the processes must have ended. Those of clusters that were killed go too."""
        leftovers = [group for group in GROUPS.glob("osdp-*") if network.is_leftover(group.name)]
        for group in (*self._groups, *leftovers):
            if group.exists():
                group.rmdir()

    def _watch(self, groups: dict[int, Path], over: Event) -> None:
        """Threads begin in the group of the one that makes them: those that are new are moved out."""
        known: set[int] = set(groups)
        while not over.wait(LOOK_SECONDS):
            for group in groups.values():
                for thread in map(int, (group / "tasks").read_text().split()):
                    if thread not in known:
                        known.add(thread)
                        _move(GROUPS, thread)


def _move(group: Path, thread: int) -> None:
    try:
        (group / "tasks").write_text(str(thread))
    except ProcessLookupError:  # it has ended meanwhile
        return
