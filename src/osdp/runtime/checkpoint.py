"""Checkpoints: written by all ranks, whole or not at all, and loaded under any plan, split and number of ranks.

[Note: Plain names]
A checkpoint does not know the plan it was saved under. Parameters, and what the optimizer keeps for each of them, have
the names and shapes of the plain model: slices are joined (see [Note: Joined]), shards are boxes of the whole, and a
tied parameter is there once. torch.distributed.checkpoint writes and reads the boxes; its planners and file formats are
used as they are, but the ranks agree here, so that an error on one rank is the same error on all.

[Note: Whole]
A checkpoint is written to `step-00000120.partial-…`; only when every rank's file is on the disk does rank 0 write
`checkpoint.json`, with the size and the checksum of each file, and rename the folder to `step-00000120`: the one moment
in which it comes to be. What is removed or replaced is renamed first, so a name without a suffix is always whole; the
rest is what a killed run left, and the next save removes it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.optim import Optimizer

from osdp.errors import OsdpError, UsageError
from osdp.runtime.checkpoint_files import Writer, check_file, find, remedy
from osdp.runtime.checkpoint_metadata import read_metadata
from osdp.runtime.checkpoint_states import States, check_model, document_of, merged

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was loaded; `extra` is what was given to `save_checkpoint`, as JSON gives it back."""

    step: int
    extra: Mapping[str, Any]
    path: Path


class Saving:
    """A checkpoint that is being written while training goes on."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        # Not a daemon: a process that ends meanwhile waits for it.
        self._thread = threading.Thread(target=self._run, name="osdp-checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # raised again where it is waited for
            self._error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Returns when the checkpoint is whole; raises, on all ranks alike, if it could not be written."""
        global _under_way
        self._thread.join()
        if _under_way is self:
            _under_way = None
        if self._error is not None:
            raise self._error


_under_way: Saving | None = None


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    keep: int = 2,
    asynchronous: bool = False,
) -> Saving | None:
    """Checkpointing model and optimizer, on every rank, as `folder/step-<step>`; then removes all but the last `keep`.

    With `asynchronous` the states are copied and written while training goes on. The next save, the next load, and
    `wait` of the returned saving wait for it, and raise its errors; wait for the last one before the process group is
    destroyed. `extra` is JSON, and rank 0's is saved.
    """
    global _under_way
    if _under_way is not None:
        _under_way.wait()
    if step < 0 or keep < 1:
        raise UsageError(f"step {step}, keep {keep}: a step is at least 0, and at least 1 checkpoint is kept")
    ranks = Ranks.all()
    writer = Writer(Path(folder), step, keep, ranks.rank)

    def plan_own() -> tuple[int, SavePlan, tuple[tuple[int, ...], dict[str, Any]]]:
        states = States(model, optimizer)
        document = document_of(states, step, ranks.size, extra)
        writer.planner.set_up_planner(states.tensors(ranks.rank), is_coordinator=ranks.rank == 0)
        own = ranks.rank == states.ranks[0]
        return step, writer.planner.create_local_plan(), (states.ranks, document if own else {})

    def begin(plans: list[tuple[int, SavePlan, tuple[tuple[int, ...], dict[str, Any]]]]) -> list[tuple[Path, SavePlan]]:
        writer.document = merged([said for _, _, said in plans if said[1]])
        return writer.begin([(step, plan) for step, plan, _ in plans])

    writer.partial, plan = ranks.agree(plan_own, begin)
    if not asynchronous:
        _write(writer, plan, ranks)
        return None
    _all_or_none(writer, ranks, lambda: writer.planner.copy(plan), lambda _: None)
    _under_way = Saving(functools.partial(_write, writer, plan, ranks))
    return _under_way


def _write(writer: Writer, plan: SavePlan, ranks: Ranks) -> None:
    _all_or_none(writer, ranks, lambda: writer.write_own(plan), writer.commit)


def _all_or_none(writer: Writer, ranks: Ranks, work: Callable[[], T], join: Callable[[list[T]], None]) -> None:
    """A step of saving on every rank; if it fails on one, nothing of the checkpoint stays."""
    try:
        ranks.agree(work, lambda results: [join(results)] * ranks.size)
    except OsdpError:
        if ranks.rank == 0:
            writer.give_up()
        raise


def load_checkpoint(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None, *, step: int | None = None
) -> Checkpoint | None:
    """Loads the newest checkpoint of a folder, or that of a step, on every rank; None if there is none yet.

    The model may run another plan than the one that was saved, on more or fewer ranks, or none at all. Everything is
    checked first; a checkpoint that is damaged, or of another model, changes nothing.
    """
    if _under_way is not None:
        _under_way.wait()
    ranks, root = Ranks.all(), Path(folder)
    found = ranks.agree(lambda: None, lambda _: [find(root, step)] * ranks.size)
    if found is None:
        return None
    path, document = found

    def check() -> tuple[States, Metadata]:
        states = States(model, optimizer)
        states.check_optimizer(path, document)
        for index, name in enumerate(sorted(document["files"])):
            if index % ranks.size == ranks.rank:
                check_file(path / name, **document["files"][name])
        return states, read_metadata(path, document["files"], remedy(path))

    def same_model(shapes: list[dict[str, dict[str, list[int]]]]) -> list[None]:
        check_model(path, document, shapes)
        return [None] * ranks.size

    ranks.agree(lambda: States(model, optimizer).shapes(), same_model)
    checked: list[tuple[States, Metadata]] = []
    ranks.agree(lambda: checked.append(check()), lambda _: [None] * ranks.size)
    ((states, metadata),) = checked

    def read() -> None:
        try:
            states.read(path, document, metadata)
        except pickle.UnpicklingError:
            raise OsdpError(f"{path} holds more than tensors, which could run code: {remedy(path)}") from None

    ranks.agree(read, lambda _: [None] * ranks.size)
    return Checkpoint(document["step"], document["extra"], path)


class Ranks:
    """The ranks that save or load together, or this process alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())

    @staticmethod
    def all() -> Ranks:
        if not dist.is_available() or not dist.is_initialized():
            return Ranks(None)
        return Ranks(_own_group())

    def agree(self, work: Callable[[], T], join: Callable[[list[T]], Sequence[R]]) -> R:
        """Every rank works, rank 0 joins the results and answers each rank; the first error is raised on all."""
        results = self._gather(_caught(work, self.rank))
        answers: list[Any] = []
        if self.rank == 0:
            failed = next((result for result in results if isinstance(result, OsdpError)), None)
            outcome = failed or _caught(lambda: list(join(results)), 0)
            answers = [outcome] * self.size if isinstance(outcome, OsdpError) else outcome
        answer = self._scatter(answers)
        if isinstance(answer, OsdpError):
            raise answer
        return answer

    def _gather(self, own: Any) -> list[Any]:
        if self.group is None:
            return [own]
        results: list[Any] = [None] * self.size
        with _lost():
            dist.gather_object(own, results if self.rank == 0 else None, dst=0, group=self.group)
        return results

    def _scatter(self, answers: list[Any]) -> Any:
        if self.group is None:
            return answers[0]
        own: list[Any] = [None]
        with _lost():
            dist.scatter_object_list(own, answers if self.rank == 0 else None, src=0, group=self.group)
        return own[0]


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise OsdpError(
            "another rank ended while all saved or loaded a checkpoint; see its error, and go on from the last one"
        ) from error


_own_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def _own_group() -> dist.ProcessGroup:
    """A group that only checkpoints use, so that a thread may; gloo, as it carries objects and not tensors."""
    world = dist.group.WORLD
    assert world is not None
    if world not in _own_groups:
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        _own_groups[world] = group
    return _own_groups[world]


def _caught(work: Callable[[], T], rank: int) -> T | OsdpError:
    try:
        return work()
    except OsdpError as error:
        return error
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        return OsdpError(f"rank {rank} met{where}: {error.strerror or error}")
    except Exception as error:  # another rank must not wait for this one
        return OsdpError(f"rank {rank} failed with {type(error).__name__}: {error}")
