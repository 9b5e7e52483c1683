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

    With `casts`, FSDP2 keeps the first and casts to the second before every gather. The range of fp16 is small: its
    loss is scaled (torch.amp.GradScaler), and a step whose gradients overflow is skipped by all ranks.
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
        "sgd": OptimizerCost("sgd", states=0, temporaries=0, passes=3, counters=0),
        "sgd-momentum": OptimizerCost("sgd-momentum", states=1, temporaries=0, passes=8, counters=0),
        "lion": OptimizerCost("lion", states=1, temporaries=1, passes=13, counters=0),
        "adagrad": OptimizerCost("adagrad", states=1, temporaries=2, passes=16, counters=4),
    }
)
TIMED_OPTIMIZERS = ("adamw", "adamw-fused", "sgd", "sgd-momentum")  # by `osdp profile`; others by their passes

_WHOLE = "a step of it needs whole matrices, and ranks hold shards"
REFUSED_OPTIMIZERS: Mapping[str, str] = MappingProxyType(
    {
        "adafactor": f"{_WHOLE}: means over rows and columns, and norms; choose adagrad or lion for fewer states",
        "muon": f"{_WHOLE}: it orthogonalizes each; choose adamw, or lion for fewer states",
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
