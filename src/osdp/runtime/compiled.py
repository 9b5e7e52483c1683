"""Compiles the blocks of a model, each by itself.

[Note: Compiled blocks]
What is compiled is a block's own forward. FSDP2's hooks, which gather and reduce, are called around it, and where the
block is recomputed, the checkpoint is around it too: it keeps the block's inputs and runs the compiled forward again.
Where it is recomputed selectively, the checkpoint is inside: torch's partitioner then saves what the checkpoint would.
Blocks of one class with equal shapes share one compiled graph, however they are held: parameters are its inputs.
Nothing is compiled anew from step to step as long as inputs keep their shapes.

Memory: what a compiled block saves for backward is what torch's partitioner chooses, a cut of the graph of both passes
of least bytes, where eager code saves what its kernels ask for. Plans trace it with the partitioner itself; see [Note:
Compiled traces] in osdp.model.compiled_blocks, and docs/running.md for what was measured.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

import torch
from torch import nn

from osdp.errors import UsageError


def compile_blocks(blocks: Sequence[nn.Module], device: torch.device) -> None:
    """Lets these modules run compiled; they are compiled when they are first called."""
    if blocks and device.type == "cpu":
        _check_compiler()
    for block in blocks:
        block.forward = torch.compile(block.forward)  # type: ignore[method-assign]


def _check_compiler() -> None:
    wanted = os.environ.get("CXX")
    if not any(map(shutil.which, [wanted] if wanted else ["g++", "clang++"])):
        raise UsageError(
            f"the plan compiles its blocks, which needs a C++ compiler on CPUs, and there is no {wanted or 'g++'};"
            " install one, or plan without --compiled"
        )
