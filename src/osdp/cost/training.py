"""How a model is trained, as far as it costs memory and time: precision, optimizer, accumulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from osdp.errors import UsageError

DTYPE_BYTES = MappingProxyType({"fp32": 4, "bf16": 2, "fp16": 2})


@dataclass(frozen=True)
class Precision:
    """Bytes of a parameter as it is held and updated (`master`) and as it is computed with (`compute`).

    With `casts`, FSDP2 keeps the first and casts to the second before every gather.
    """

    name: str
    master_bytes: int
    compute_bytes: int
    compute_dtype: str
    casts: bool
    reduce_dtype: str  # the default for gradients on the wire


@dataclass(frozen=True)
class OptimizerCost:
    """Copies of a rank's parameters that an optimizer keeps (`states`) and needs while it steps (`temporaries`).

    `passes` counts how often a step reads or writes one copy: its time, as it is bound by memory bandwidth.
    `counters` is the bytes of the step counter that it keeps for every parameter.
    """

    name: str
    states: int
    temporaries: int
    passes: int
    counters: int


PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "bf16": Precision("bf16", 4, 2, "bf16", casts=True, reduce_dtype="fp32"),
        "fp32": Precision("fp32", 4, 4, "fp32", casts=False, reduce_dtype="fp32"),
        "pure-bf16": Precision("pure-bf16", 2, 2, "bf16", casts=False, reduce_dtype="bf16"),
    }
)

# AdamW, foreach: decay 2, first moment 3, second moment 2 + 3, root 2, correction 2 + 2, update 4 reads and writes, and
# the roots are one temporary copy. Fused: parameter, gradient and two moments read, all but the gradient written.
OPTIMIZERS: Mapping[str, OptimizerCost] = MappingProxyType(
    {
        "adamw": OptimizerCost("adamw", states=2, temporaries=1, passes=20, counters=4),
        "adamw-fused": OptimizerCost("adamw-fused", states=2, temporaries=0, passes=7, counters=4),
        "sgd": OptimizerCost("sgd", states=0, temporaries=0, passes=3, counters=0),
        "sgd-momentum": OptimizerCost("sgd-momentum", states=1, temporaries=0, passes=8, counters=0),
    }
)


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
        if optimizer not in OPTIMIZERS:
            raise UsageError(f"unknown optimizer {optimizer!r}; choose {', '.join(OPTIMIZERS)}")
        chosen = PRECISIONS[precision]
        reduce_dtype = reduce_dtype or chosen.reduce_dtype
        if reduce_dtype not in ("fp32", "bf16"):
            raise UsageError(f"unknown reduction dtype {reduce_dtype!r}; choose fp32 or bf16")
        return Training(chosen, OPTIMIZERS[optimizer], reduce_dtype, accumulation, compiled, loss_chunks)

    def of_stage(self, *, is_block: bool) -> Training:
        """The same for one stage of a model: what is in no block is not compiled."""
        return self if is_block or not self.compiled else replace(self, compiled=False)

    @property
    def reduce_bytes(self) -> int:
        return DTYPE_BYTES[self.reduce_dtype]
