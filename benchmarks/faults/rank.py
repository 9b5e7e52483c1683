"""One rank of `osdp`, which kills or stops itself at a random moment of a phase.

    export OSDP_FAULT='{"phase": "backward", "number": 3, "seconds": 0.01, "signal": 9}'
    python -m benchmarks.faults.rank train ...

The clock starts where the phase is entered for the given time; the signal comes so many seconds later, in whatever the
process then does.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import threading
import time
from typing import Any

# Where each phase begins: a module, and what is called in it.
PHASES = {
    "forward": ("osdp.training.loop", "Trainer._loss"),
    "backward": ("torch", "Tensor.backward"),
    "saving": ("osdp.training.checkpointing", "Checkpointing.save"),
    "planning": ("osdp.model.capture", "capture"),
    "profiling": ("osdp.profiling.run", "profile_in"),
}


def arm(fault: dict[str, Any]) -> None:
    """Wraps the phase's function so that its call of that number starts the clock."""
    module_name, path = PHASES[fault["phase"]]
    owner: Any = importlib.import_module(module_name)
    *holders, name = path.split(".")
    for holder in holders:
        owner = getattr(owner, holder)
    original, calls = getattr(owner, name), 0

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fault["number"]:
            threading.Thread(target=_strike, args=(fault,), daemon=True).start()
        return original(*args, **kwargs)

    setattr(owner, name, watched)


def _strike(fault: dict[str, Any]) -> None:
    time.sleep(fault["seconds"])
    print(json.dumps({"event": "fault", "at": time.time()}), file=sys.stderr, flush=True)
    os.kill(os.getpid(), fault["signal"])


def build() -> tuple[Any, tuple[Any, ...]]:
    """The model that is trained: two layers of 32, for bytes."""
    import torch

    from osdp.model.gpt import GPT, GPTConfig

    tokens = torch.zeros(2, 32, dtype=torch.long)
    return GPT(GPTConfig(256, 32, (2,), (32,), head_width=16)), (tokens, tokens)


if __name__ == "__main__":
    if "OSDP_FAULT" in os.environ:
        arm(json.loads(os.environ["OSDP_FAULT"]))
    from osdp.cli.main import main

    sys.exit(main(sys.argv[1:]))
