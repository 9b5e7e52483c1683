"""Runs a function on real gloo ranks: processes forked from a server that has torch loaded already.

The function and its arguments are pickled, so it stands at the top of a test module. Its result comes back pickled too.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

# What ranks need and are slow to load: a second of CPU time for each rank. The first forward of an FSDP2 module loads
# torch's compiler, the first model of Hugging Face the list of all its models.
_LOADED = [
    "hypothesis",
    "osdp.api",
    "osdp.model.source",
    "osdp.runtime.apply",
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.masking_utils",
    "transformers.modeling_layers",
    "transformers.models.auto.modeling_auto",
    "transformers.pytorch_utils",
]


class RankFailed(AssertionError):
    """A rank raised, died or hung; the message has its traceback."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout_seconds: float = 60) -> list[Any]:
    """What `function(*args)` returns on each rank of a process group, in order. The first failure ends all ranks."""
    # A collective may take half of the time: on a busy machine rank 0 plans for long while the others wait for it.
    collective_seconds = max(30.0, timeout_seconds / 2)
    payload = pickle.dumps(
        (function, args, collective_seconds)
    )  # not multiprocessing's way, which shares tensors' memory
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_start(rank, world_size, f"file://{folder}/store", payload) for rank in range(world_size)]
        try:
            return _collect(ranks, time.monotonic() + timeout_seconds)
        finally:
            for process, receiver in ranks:
                process.kill()
                process.join()
                receiver.close()


@functools.cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LOADED)
    return context


def _start(rank: int, world_size: int, store: str, payload: bytes) -> tuple[Any, Connection]:
    receiver, sender = _context().Pipe(duplex=False)
    process = _context().Process(target=_rank, args=(sender, rank, world_size, store, payload), daemon=True)
    process.start()
    sender.close()
    return process, receiver


def _collect(ranks: list[tuple[Any, Connection]], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = {receiver: rank for rank, (_, receiver) in enumerate(ranks)}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"ranks {sorted(waiting.values())} of {len(ranks)} did not end in time")
        failures = []  # of all that are there: one rank's failure brings others down
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = waiting.pop(receiver)
            try:
                failure, results[rank] = pickle.loads(receiver.recv_bytes())
            except EOFError:
                ranks[rank][0].join()
                failure = f"it died with exit code {ranks[rank][0].exitcode}"
            if failure:
                failures.append(f"rank {rank} of {len(ranks)}: {failure}")
        if failures:
            raise RankFailed("\n".join(failures))
    return [results[rank] for rank in range(len(ranks))]


def _rank(sender: Connection, rank: int, world_size: int, store: str, payload: bytes) -> None:
    import torch
    import torch.distributed as dist

    gc.freeze()  # or the first collection goes through, and copies, all that the server has loaded
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # A Linear's output is a view of its matrix product; FSDP2 says that it must not be changed in place.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
    try:
        function, args, seconds = pickle.loads(payload)
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=seconds)
        )
        answer = pickle.dumps((None, function(*args)))
        dist.barrier()  # a rank that leaves early breaks the connections of those that still compute
        dist.destroy_process_group()
    except BaseException:
        answer = pickle.dumps((traceback.format_exc(), None))
    sender.send_bytes(answer)
