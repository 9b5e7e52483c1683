"""The ranks of a run: how they start, how they tell each other a few numbers, and how a failure is said once."""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from osdp.accelerator import backends_for, take_own_device
from osdp.cluster.schema import MOST_DEVICES
from osdp.errors import OsdpError, UsageError

# A hung peer is the watchdog's business, which knows what was being done; collectives give up later, as a last resort.
_COLLECTIVES_WAIT = 2.0
_ANSWER_SECONDS = 5.0


@dataclass(frozen=True)
class World:
    """This rank's place among all; `store` is what ranks meet at."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    store: dist.Store

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def speaks_first(self) -> bool:
        """Whether this rank is the first to fail: it says why, and the others, which fail with it, are silent.

        The store asks without a limit, and the rank that holds it may be the one that hangs: then this one speaks.
        """
        answers: list[bool] = []

        def ask() -> None:
            try:
                answers.append(self.store.add("failed", 1) == 1)
            except RuntimeError:  # the store has gone with the rank that held it
                answers.append(True)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(_ANSWER_SECONDS)
        return answers[0] if answers else True

    def all_numbers(self, *numbers: float) -> list[list[float]]:
        """Every rank's numbers, in the order of ranks; equal on all."""
        own = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        everyone = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(everyone, own)
        return torch.stack(everyone).tolist()


@contextmanager
def started(*, timeout_seconds: float) -> Iterator[World]:
    """The world that torchrun, or whoever sets its variables, describes; else a world of this process alone."""
    size, local_size = _variable("WORLD_SIZE", 1, least=1), _variable("LOCAL_WORLD_SIZE", 1, least=1)
    rank, local_rank = _variable("RANK", 0, below=size), _variable("LOCAL_RANK", 0, below=local_size)
    if "RANK" in os.environ:
        _variable("MASTER_PORT", 0, least=1, below=1 << 16)
    device = take_own_device(local_rank)
    if size % local_size:
        raise UsageError(f"{size} ranks do not divide into nodes of {local_size}; start as many on every node")
    store = _met(device, rank, size, timeout_seconds)
    try:
        yield World(rank, size, local_rank, local_size, device, store)
        dist.barrier()  # a rank that leaves early breaks the connections of those that still work
    finally:
        dist.destroy_process_group()


def _met(device: torch.device, rank: int, size: int, timeout_seconds: float) -> dist.Store:
    """Starts the process group; gives what its ranks meet at."""
    wait = timedelta(seconds=_COLLECTIVES_WAIT * timeout_seconds)
    store: dist.Store = dist.HashStore()
    try:
        if "RANK" in os.environ:
            store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_seconds)))
            store = dist.PrefixStore(_meeting(store, rank, size, timeout_seconds), store)
        dist.init_process_group(backends_for(device), store=store, rank=rank, world_size=size, timeout=wait)
    except (RuntimeError, ValueError) as error:  # dist.DistError is one too
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        cause = str(error).partition("\n")[0]
        if "EADDRINUSE" in cause:
            told = f"{where}, where rank {rank} is to meet the others, is taken by another process"
            raise OsdpError(f"{told}; set MASTER_PORT to a port that is free") from None
        raise OsdpError(f"rank {rank} did not meet all {size} ranks at {where} ({cause}); start all of them") from None
    return store


def _meeting(store: dist.Store, rank: int, size: int, timeout_seconds: float) -> str:
    """A name that only the ranks that run now learn from rank 0.

    torchrun keeps one store for all restarts, so that ranks find the addresses of those before them. What a rank says
    here counts when it answers: the dead do not.
    """
    own = secrets.token_hex(8)
    if rank:
        store.set(f"here/{rank}", own)
        store.wait([f"name/{own}"], timedelta(seconds=timeout_seconds))
        name = store.get(f"name/{own}").decode()
        store.set(f"heard/{own}/{name}", "")
        return name
    missing, end = set(range(1, size)), time.monotonic() + timeout_seconds
    while missing:
        if time.monotonic() > end:
            raise RuntimeError(f"rank {min(missing)} is missing")
        for other in sorted(missing):
            if store.check([f"here/{other}"]):
                word = store.get(f"here/{other}").decode()
                store.set(f"name/{word}", own)
                if store.check([f"heard/{word}/{own}"]):
                    missing.discard(other)
        time.sleep(0.02)
    return own


def _variable(name: str, default: int, *, least: int = 0, below: int = MOST_DEVICES + 1) -> int:
    """A whole number of the environment, written in the digits 0 to 9, within its limits."""
    text = os.environ.get(name, str(default))
    value = int(text) if re.fullmatch("[0-9]{1,9}", text) else -1
    if not least <= value < below:
        raise UsageError(
            f"the environment says {name}={text[:40]!r}, which is no whole number from {least} to {below - 1};"
            " start ranks with torchrun"
        )
    return value
