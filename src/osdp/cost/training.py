"""How a model is trained, as far as it costs memory and time: precision, optimizer, accumulation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType

from osdp.errors import UsageError

DTYPE_BYTES = MappingProxyType({"fp32": 4, "bf16": 2, "fp16": 2})


@dataclass(frozen=True)
class Precision:
    """Bytes of a parameter as it is held and updated (`master`) and as it is computed with (`compute`).

    With `casts`, FSDP2 keeps the first and casts to the second before every gather. The range of fp16 is small: its
    loss is scaled (torch.amp.GradScaler), and a step whose gradients overflow is skipped by all ranks.
    """

    name: str
    master_bytes: int
    compute_bytes: int
    compute_dtype: str
    casts: bool
    reduce_dtype: str  # the default for gradients on the wire

    @property
    def held_dtype(self) -> str:
        """That of parameters while no unit has them gathered."""
        return "fp32" if self.casts else self.compute_dtype


class StateFormat(Enum):
    """How an optimizer holds a state of a parameter."""

    COPY = "copy"  # in the parameter's dtype
    BF16 = "bf16"
    BLOCKS = "8 bit"  # a byte for every element and one fp32 number for every 256 in a row; vectors are copies
    FACTORS = "factors"  # one number for every row and one for every column; vectors are copies

    def nbytes(self, shape: Sequence[int], master_bytes: int) -> int:
        """Bytes of one state of a rank's part of a parameter."""
        numel, is_matrix = math.prod(shape), len(shape) > 1
        if self is StateFormat.BF16:
            return 2 * numel
        if self is StateFormat.BLOCKS and is_matrix and shape[-1] % BLOCK_NUMEL == 0:
            return numel + 4 * (numel // BLOCK_NUMEL)
        if self is StateFormat.FACTORS and is_matrix:
            return (numel // shape[-1] + numel // shape[-2]) * master_bytes if numel else 0
        return numel * master_bytes


BLOCK_NUMEL = 256  # elements with one scale, as in "8-bit Optimizers via Block-wise Quantization" (2021)
CHUNK_NUMEL = 1 << 20  # elements that osdp's own optimizers step at a time


@dataclass(frozen=True)
class OptimizerCost:
    """Copies of a rank's parameters that an optimizer keeps (`states`) and needs while it steps (`temporaries`).

    `passes` counts how often a step reads or writes one copy: its time, as it is bound by memory bandwidth.
    `counters` is the bytes of the numbers that it keeps for every parameter, such as steps. States are held in
    `format`. One that steps by chunks needs `chunk_temporaries` fp32 copies of one chunk. With `is_whole` a step looks
    at rows of a parameter, not at single elements, so that operators are not split into slices. `exchanges` says that
    ranks add up the factors of its states.
    """

    name: str
    states: int
    temporaries: int
    passes: int
    counters: int
    format: StateFormat = StateFormat.COPY
    chunk_temporaries: int = 0
    is_whole: bool = False
    exchanges: bool = False

    def state_bytes(self, shape: Sequence[int], master_bytes: int) -> int:
        """Bytes that are kept for a rank's part of a parameter."""
        return self.states * self.format.nbytes(shape, master_bytes) + self.counters

    def temporary_bytes(self, shape: Sequence[int], master_bytes: int) -> int:
        """Bytes that a step of all parameters needs for this one, beside those of a chunk."""
        factors = 2 * self.format.nbytes(shape, master_bytes) if self.exchanges else 0  # this rank's, and their sums
        return self.temporaries * math.prod(shape) * master_bytes + factors

    def chunk_bytes(self, largest_numel: int) -> int:
        """Bytes for one chunk while it steps; no chunk has more elements than the largest parameter."""
        return self.chunk_temporaries * 4 * min(CHUNK_NUMEL, largest_numel)


PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "bf16": Precision("bf16", 4, 2, "bf16", casts=True, reduce_dtype="fp32"),
        "fp16": Precision("fp16", 4, 2, "fp16", casts=True, reduce_dtype="fp32"),
        "fp32": Precision("fp32", 4, 4, "fp32", casts=False, reduce_dtype="fp32"),
        "pure-bf16": Precision("pure-bf16", 2, 2, "bf16", casts=False, reduce_dtype="bf16"),
    }
)

# AdamW, foreach: decay 2, first moment 3, second moment 2 + 3, root 2, correction 2 + 2, update 4 reads and writes, and
# the roots are one temporary copy. Fused: parameter, gradient and two moments read, all but the gradient written.
# All of them are what a dry run of the step finds, see [Note: Measured steps] in osdp.model.optimizer_step.
OPTIMIZERS: Mapping[str, OptimizerCost] = MappingProxyType(
    {
        "adamw": OptimizerCost("adamw", states=2, temporaries=1, passes=20, counters=4),
        "adamw-fused": OptimizerCost("adamw-fused", states=2, temporaries=0, passes=7, counters=4),
        "sgd": OptimizerCost("sgd", states=0, temporaries=0, passes=5, counters=0),
        "sgd-momentum": OptimizerCost("sgd-momentum", states=1, temporaries=0, passes=11, counters=0),
        "lion": OptimizerCost("lion", states=1, temporaries=1, passes=13, counters=0),
        "adagrad": OptimizerCost("adagrad", states=1, temporaries=2, passes=16, counters=4),
        "adam": OptimizerCost("adam", states=2, temporaries=1, passes=21, counters=4),
        "nadam": OptimizerCost("nadam", states=2, temporaries=1, passes=24, counters=8),
        "radam": OptimizerCost("radam", states=2, temporaries=1, passes=24, counters=4),
        "adamax": OptimizerCost("adamax", states=2, temporaries=1, passes=19, counters=4),
        "adadelta": OptimizerCost("adadelta", states=2, temporaries=3, passes=30, counters=4),
        "rmsprop": OptimizerCost("rmsprop", states=1, temporaries=2, passes=16, counters=4),
        "adamw-bf16": OptimizerCost(
            "adamw-bf16", states=2, temporaries=0, passes=27, counters=4, format=StateFormat.BF16, chunk_temporaries=2
        ),
        "adamw-8bit": OptimizerCost(
            "adamw-8bit",
            states=2,
            temporaries=0,
            passes=42,
            counters=4,
            format=StateFormat.BLOCKS,
            chunk_temporaries=4,
            is_whole=True,
        ),
        "adafactor": OptimizerCost(
            "adafactor",
            states=1,
            temporaries=0,
            passes=28,
            counters=4,
            format=StateFormat.FACTORS,
            chunk_temporaries=1,
            is_whole=True,
            exchanges=True,
        ),
    }
)
TIMED_OPTIMIZERS = ("adamw", "adamw-fused", "sgd", "sgd-momentum")  # by `osdp profile`; others by their passes

REFUSED_OPTIMIZERS: Mapping[str, str] = MappingProxyType(
    {
        "muon": "it orthogonalizes whole matrices, for each of which DTensor exchanges 11 to 16 times a step: traffic"
        " that no plan has; choose adamw, or adafactor for fewer states",
        "rprop": "its step copies lists of shards, which DTensor cannot (aten._foreach_copy_); choose adamw or lion",
        "asgd": "its step fails where parameters lie on several meshes, as plans place them; choose sgd or adamw",
        "lbfgs": "it evaluates the loss several times a step, which no plan has; choose adamw",
        "sparseadam": "it is for sparse gradients, and FSDP2 reduces dense ones; choose adam",
    }
)


def optimizer_cost(name: str) -> OptimizerCost:
    """What an optimizer costs; those that a plan cannot run are refused with the reason."""
    if name.lower() in REFUSED_OPTIMIZERS:
        raise UsageError(f"optimizer {name!r} cannot run under a plan: {REFUSED_OPTIMIZERS[name.lower()]}")
    if name not in OPTIMIZERS:
        raise UsageError(f"unknown optimizer {name!r}; choose {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


@dataclass(frozen=True)
class Training:
    """One way to train: what every rank's step consists of. With `compiled`, blocks run as torch.compile makes them."""

    precision: Precision
    optimizer: OptimizerCost
    reduce_dtype: str
    accumulation: int = 1
    compiled: bool = False
    loss_chunks: int = 1  # of a language head's loss; a model that is captured so has its costs

    @staticmethod
    def of(
        precision: str = "bf16",
        optimizer: str = "adamw",
        reduce_dtype: str | None = None,
        *,
        accumulation: int = 1,
        compiled: bool = False,
        loss_chunks: int = 1,
    ) -> Training:
        if precision not in PRECISIONS:
            raise UsageError(f"unknown precision {precision!r}; choose {', '.join(PRECISIONS)}")
        cost = optimizer_cost(optimizer)
        chosen = PRECISIONS[precision]
        reduce_dtype = reduce_dtype or chosen.reduce_dtype
        if reduce_dtype not in ("fp32", "bf16"):
            raise UsageError(f"unknown reduction dtype {reduce_dtype!r}; choose fp32 or bf16")
        return Training(chosen, cost, reduce_dtype, accumulation, compiled, loss_chunks)

    def of_stage(self, *, is_block: bool) -> Training:
        """The same for one stage of a model: what is in no block is not compiled."""
        return self if is_block or not self.compiled else replace(self, compiled=False)

    @property
    def reduce_bytes(self) -> int:
        return DTYPE_BYTES[self.reduce_dtype]
