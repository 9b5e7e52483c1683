"""A rank of `--check`: runs collectives inside a host and between hosts and prints, as rank 0, one JSON document.

The rate of a link is the bytes that pass it in one direction over the seconds; a loopback has only one direction.

[Note: Gloo's collectives and a link's rate] `send` shows what a link carries. Two ranks that send each other large
messages at once, as in an all-gather, often take turns instead: gloo asks for a message (NOTIFY_RECV_READY) on the
connection on which it sends its own, in order, so the request waits behind the data. That is gloo's, not the link's:
over plain sockets both directions reach the asked rate at once. An all-reduce sends small segments and is not slowed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

TIMES = 5


@dataclass(frozen=True)
class Link:
    """A link as this rank sees it: its group, what all who measure at once wait on, and who shares the link."""

    group: dist.ProcessGroup | None  # None: it is measured by others
    waits_on: dist.ProcessGroup | None
    num_bytes: int
    senders: int  # groups that send on the link at once
    ring_members: int  # ranks whose traffic in a ring passes the link in the same direction


def cases(link: Link, group: dist.ProcessGroup) -> dict[str, tuple[Callable[[], object], float]]:
    """What to run on so many bytes, and the bytes that the link then carries in one direction."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = torch.zeros(link.num_bytes // 4 // size * size)
    other, part = torch.zeros_like(whole), whole[: whole.numel() // size].clone()
    sent = whole.nbytes * (size - 1) / size * link.ring_members

    def send() -> None:
        if rank == 0:
            dist.send(whole, group=group, group_dst=1)
        elif rank == 1:
            dist.recv(whole, group=group, group_src=0)

    return {
        "send": (send, whole.nbytes * link.senders),
        "all_gather_into_tensor": (lambda: dist.all_gather_into_tensor(whole, part, group=group), sent),
        "all_reduce": (lambda: dist.all_reduce(whole, group=group), 2 * sent),
        "all_to_all_single": (lambda: dist.all_to_all_single(other, whole, group=group), sent),
    }


def seconds_of(run: Callable[[], object], waits_on: dist.ProcessGroup | None) -> float:
    """From the first rank's begin to the last one's end: they share a clock, but do not get a core at once."""
    dist.barrier(waits_on)
    began = perf_counter()
    run()
    moments = torch.tensor([-began, perf_counter()], dtype=torch.float64)
    dist.all_reduce(moments, dist.ReduceOp.MAX, group=waits_on)
    return float(moments.sum())


def measure(link: Link) -> dict[str, tuple[float, float]]:
    """Bits a second that the link carries in each case: the median and the best of some runs."""
    rates = {}
    if link.group is not None:
        for name, (run, link_bytes) in cases(link, link.group).items():
            run()  # opens what is opened at first use
            seconds = [seconds_of(run, link.waits_on) for _ in range(TIMES)]
            rates[name] = link_bytes * 8 / median(seconds), link_bytes * 8 / min(seconds)
    dist.barrier()
    return rates


def main() -> None:
    across_bytes, node_bytes = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    rank, hosts, ranks = dist.get_rank(), int(os.environ["GROUP_WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    # Every rank makes every group, in the same order, as torch asks.
    groups = [range(host * ranks, (host + 1) * ranks) for host in range(hosts)]
    groups += [range(local, hosts * ranks, ranks) for local in range(ranks)]
    made = [dist.new_group(list(members)) for members in groups]
    mine = [group if isinstance(group, dist.ProcessGroup) else None for group in made]  # a number where not a member
    node, first, peer = mine[0], mine[hosts], mine[hosts + rank % ranks]
    links = {}
    if hosts > 1:
        links["across"] = Link(first, first, across_bytes, 1, 1)
    if hosts > 1 and ranks > 1:
        links["across, all ranks"] = Link(peer, None, across_bytes // ranks, ranks, ranks)
    if ranks > 1:
        links["node"] = Link(node, node, node_bytes, 1, ranks)
    rates = {name: measure(link) for name, link in links.items()}
    if rank == 0:
        print(json.dumps(rates))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
