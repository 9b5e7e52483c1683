"""The checkpoints of a run: where it goes on from, and saves that training does not wait for.

[Note: Pending save]
With `--async-save` a save copies the states, and a thread writes them while steps go on. Ranks learn from each other,
at the end of every step, whether all have written: then all of them settle it, and its error, if it has one, ends all
of them alike. The next save, the end of the run and whatever ends it early settle it first. A process that is killed
meanwhile leaves a folder that does not pass for a checkpoint; see [Note: Whole].

[Note: One run]
A save removes what killed saves have left, and cannot tell these from what another run is writing. So a run keeps
others out of its folder: rank 0 has an advisory lock on it, which goes with its process, however that ends. It is taken
after planning, whose forked workers would share it. A file system that has no locks is used without.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct, field
from torch import nn
from torch.optim import Optimizer

import osdp
from osdp.errors import OsdpError, UsageError
from osdp.files import convert
from osdp.runtime.checkpoint import Saving
from osdp.training.world import World

_WHOLE = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class CheckpointSettings:
    """Where checkpoints are, and how they are saved; without a folder there are none."""

    folder: Path | None = None
    every: int = 0
    keep: int = 2
    resume: bool = False
    asynchronous: bool = False

    def check(self) -> None:
        """Refuses a folder that cannot be saved to: at the start, and not after hours of training."""
        folder = self.folder
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--checkpoint {folder} is no folder ({error.strerror}); choose another") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"--checkpoint {folder} cannot be written to; change its rights, or choose another")
        if (folder / "checkpoint.json").exists() or (folder / ".metadata").exists():
            raise UsageError(f"--checkpoint {folder} is itself a checkpoint; give the folder it is in, {folder.parent}")
        newest = self.newest()
        if newest is not None and not self.resume:
            raise UsageError(
                f"{folder} has a checkpoint, step-{newest:08}; go on from it with --resume, or choose another folder"
            )

    @contextlib.contextmanager
    def alone(self, world: World) -> Iterator[None]:
        """Keeps other runs out of the folder; see [Note: One run]. All ranks are refused alike."""
        with contextlib.ExitStack() as stack:
            if self.folder is not None:
                is_free = not world.leads or stack.enter_context(_locked(self.folder))
                if not all(free for (free,) in world.all_numbers(is_free)):
                    raise UsageError(
                        f"--checkpoint {self.folder} is in use by another run; wait until that one has ended, or choose"
                        " another folder"
                    )
            yield

    def newest(self) -> int | None:
        """The last step that is saved; names with a suffix are of saves that were never finished."""
        names = os.listdir(self.folder) if self.folder is not None and self.folder.is_dir() else ()
        return max((int(match[1]) for match in map(_WHOLE.fullmatch, names) if match), default=None)


_SCALER = "gradient scaler"
_Factor = Annotated[float, Meta(gt=0, le=1e15)]


class ScalerState(Struct):
    """What torch's gradient scaler gives as its state."""

    scale: Annotated[float, Meta(gt=0, le=3e38)]
    growth_factor: _Factor
    backoff_factor: _Factor
    growth_interval: Annotated[int, Meta(ge=1, le=1 << 60)]
    growth_tracker: Annotated[int, Meta(ge=0, le=1 << 60)] = field(name="_growth_tracker")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Whether no other process has locked the folder; if so, this one has until the context ends."""
    descriptor, is_free = os.open(folder, os.O_RDONLY), True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        is_free = False
    except OSError:  # no locks here
        pass
    try:
        yield is_free
    finally:
        os.close(descriptor)


class Checkpointing:
    """Saves and loads a model and its optimizer; `identity` is what must be equal for a run to be the same run."""

    def __init__(
        self,
        keeping: CheckpointSettings,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        identity: Mapping[str, Any],
        watch: Callable[[str], None],
        scaler: torch.amp.GradScaler,
    ) -> None:
        self.keeping, self._identity, self._watch = keeping, identity, watch
        self._model, self._optimizer, self._scaler = model, optimizer, scaler
        self._last: int | None = None
        self._pending: tuple[int, Saving] | None = None

    def resumed(self) -> int:
        """Loads the newest checkpoint, if one is wanted and there; gives the steps that are done."""
        folder = self.keeping.folder
        if folder is None or not self.keeping.resume:
            return 0
        self._watch("loading the checkpoint")
        found = osdp.load_checkpoint(folder, self._model, self._optimizer)
        if found is None:
            return 0
        for name, value in self._identity.items():
            if found.extra.get(name) != value:
                raise UsageError(
                    f"{found.path} is of another run: its {name} is {found.extra.get(name)}, here it is {value}; "
                    "give the same, or choose another --checkpoint folder"
                )
        if self._scaler.is_enabled():
            self._load_scaler(found.extra.get(_SCALER) or self._scaler.state_dict(), found.path)
        self._last = found.step
        return found.step

    def _load_scaler(self, state: Any, path: Path) -> None:
        try:
            convert(ScalerState, state, name=f"the gradient scaler of {path}", remedy=f"remove {path}")
        except UsageError as error:  # its checksum is right: it was not written by osdp
            raise OsdpError(str(error)) from None
        self._scaler.load_state_dict(dict(state))

    def due(self, step: int) -> bool:
        return self.keeping.every > 0 and step % self.keeping.every == 0

    def save(self, step: int, *, last: bool = False) -> None:
        """Checkpointing a step; `last` waits until it is whole, as nothing is trained meanwhile."""
        self.settle()
        if self.keeping.folder is None or self._last == step:
            return
        self._watch(f"saving step {step}")
        saving = osdp.save_checkpoint(
            self.keeping.folder,
            self._model,
            self._optimizer,
            step=step,
            extra={**self._identity, **({_SCALER: scale} if (scale := self._scaler.state_dict()) else {})},
            keep=self.keeping.keep,
            asynchronous=self.keeping.asynchronous and not last,
        )
        self._pending = None if saving is None else (step, saving)
        self._last = step

    @property
    def under_way(self) -> bool:
        """Whether this rank still writes; what is written and not settled is not."""
        return self._pending is not None and not self._pending[1].done

    def settle(self) -> None:
        """Waits for the pending save; its error is raised here, as a save that is waited for would have raised it."""
        if self._pending is not None:
            (step, saving), self._pending = self._pending, None
            self._watch(f"saving step {step}")
            saving.wait()

    def settle_after_failure(self) -> None:
        """The same when the run ends by another error, which is the one to tell."""
        with contextlib.suppress(OsdpError):
            self.settle()

    def resumes(self) -> str:
        """From where a run that ends now goes on, for an error's last words."""
        folder = self.keeping.folder
        if folder is None:
            return "nothing is saved, as --checkpoint was not given"
        newest = self.keeping.newest()
        return (
            f"{folder} has no checkpoint yet" if newest is None else f"--resume goes on from step {newest} in {folder}"
        )
