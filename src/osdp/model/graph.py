"""What a model is to the planner: parameters, operators, stages and their traces. No torch in here.

[Note: Trace]
Capture runs one training step on fake tensors and writes down every kernel: its FLOPs, the bytes it moves and
the activation bytes alive once its outputs exist. Parameters and their gradients are left out: how they are held
is the plan's business. Marks divide the trace: a module is entered or left, in forward or in backward, or a
parameter's gradient is complete. Between two marks the plan changes nothing, so a segment's memory is its highest
point plus what the plan holds there.

[Note: Stage]
A step is a row of stages: the blocks in their order of execution, and what runs before, between and after them
(embeddings, head, loss). A stage's trace is relative to the bytes alive at its start, so traces of stages can be
joined in any mixture of recomputed and plain ones. A checkpoint holds its block's inputs (masks, position ids, the
first hidden states) until backward, which frames outside the block would free sooner. So where a block is recomputed
the stages outside blocks take their trace from the recomputed run too; a selective checkpoint holds the same inputs.

[Note: Growth]
Every count is affine in the batch size: constant + per_sample · batch. Two captures give both numbers, kernel by
kernel, and a third one checks them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from osdp.errors import UsageError
from osdp.model.kernels import DEEP, SCALAR_BYTES, WORKSPACE_BYTES, KernelKind
from osdp.planfile import Granularity
from osdp.recompute import Recompute

SMALL_SHARE = 0.02  # an operator below this share of its block's parameters is gathered with the block
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


def is_gathered_alone(numel: int, of_block: int) -> bool:
    """Whether an operator of so many parameters is a unit where its block is gathered by operators."""
    return numel >= SMALL_SHARE * of_block


@dataclass(frozen=True)
class Affine:
    """constant + per_sample · batch; see [Note: Growth]."""

    constant: int
    per_sample: int

    def at(self, batch: int) -> int:
        return self.constant + self.per_sample * batch

    def __add__(self, other: Affine) -> Affine:
        return Affine(self.constant + other.constant, self.per_sample + other.per_sample)

    def __sub__(self, other: Affine) -> Affine:
        return Affine(self.constant - other.constant, self.per_sample - other.per_sample)


ZERO = Affine(0, 0)


@dataclass(frozen=True)
class MeasuredSpace:
    """A kernel's level with the space that it works in: as seen at some batch sizes, else on lines above all of these.

    See [Note: Measured space] in measured_space.py.
    """

    level: Affine
    seen: tuple[tuple[int, int], ...]
    lines: tuple[Affine, ...]

    def at(self, batch: int) -> int:
        space = dict(self.seen).get(batch)
        return self.level.at(batch) + (max(line.at(batch) for line in self.lines) if space is None else space)

    def __add__(self, more: Affine) -> MeasuredSpace:
        return replace(self, level=self.level + more)


@dataclass(frozen=True)
class Parameter:
    """A parameter once, under its first name; `aliases` are the other names of a tied one."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        numel = 1
        for size in self.shape:
            numel *= size
        return numel


@dataclass(frozen=True)
class Operator:
    """A module that owns parameters itself, with what its calls cost; see [Note: Growth].

    It may be one rank's part of experts that so many ranks share, `experts`.
    """

    name: str
    kind: str
    parameters: tuple[str, ...]
    calls: int
    split_dim: int  # the weight's dimension that splitting cuts; -1 where the operator cannot be split
    forward_flops: Affine
    backward_flops: Affine
    moved_bytes: Affine
    saved_bytes: Affine
    output_bytes: Affine
    temporary_bytes: Affine
    experts: int = 1


@dataclass(frozen=True)
class TensorOperator:
    """An operator that tensor-parallel ranks share: who waits for its output, or for its input's gradient.

    `input_share` is its input's size as a part of its output's. With `by_tokens` ranks have a part of the tokens each
    outside of such operators; see [Note: Sequence parallel] in osdp.model.sequence_parallel.
    """

    name: str
    adds_outputs: bool
    gathers_outputs: bool
    input_share: float
    by_tokens: bool = False


def column_groups(shared: Sequence[TensorOperator]) -> list[list[str]]:
    """Operators divided by columns up to the next one divided by rows: they share an input, whose gradient is added up.

    So run frameworks that gather the input once; where each operator gathers its own, as DTensor's styles do by
    default, there is an all-reduce for each.
    """
    groups: list[list[str]] = [[]]
    for each in shared:
        if each.adds_outputs or each.gathers_outputs:
            groups.append([])
        if not each.adds_outputs:
            groups[-1].append(each.name)
    return [group for group in groups if group]


@dataclass(frozen=True)
class Mark:
    """A point of the trace at which the plan may act.

    `kind` is enter or leave (of a module), or gradient (of a parameter); `name` says of which. `recomputed` tells the
    second forward of a recomputed block, inside its backward, from the first.
    """

    kind: str
    name: str
    recomputed: bool = False


@dataclass(frozen=True)
class Segment:
    """What runs between one mark and the next: `mark` opens it. See [Note: Trace].

    `peak` holds the lines (constant, per_sample) whose maximum is the activation peak, `end` the bytes alive when it
    closes, `begin` the line of those once the unit that is entered has cast what it is given, if it casts, all relative
    to the start of the stage; `flops` and `moved` have one (constant, per_sample) row a kernel, `kinds` its
    `KernelKind`. `products` are the lines of products; `worked` are those of products with their working
    space, `attended` those of attention, `measured` the levels of kernels whose space is measured; `depths` of the
    depth of products that may need more. See [Note: Workspaces] in kernels.py.
    """

    mark: Mark
    peak: tuple[Affine, ...]
    end: Affine
    flops: IntArray
    moved: IntArray
    kinds: IntArray
    products: tuple[Affine, ...] = ()
    worked: tuple[Affine, ...] = ()
    attended: tuple[Affine, ...] = ()
    measured: tuple[MeasuredSpace, ...] = ()
    depths: tuple[Affine, ...] = ()
    begin: tuple[Affine, ...] = ()

    def peak_at(self, batch: int, *, workspaces: bool = False) -> int:
        """The highest level; with `workspaces`, with the working space that products and attention take."""
        peak = max(line.at(batch) for line in self.peak)
        if not workspaces:
            return peak
        worked = max((line.at(batch) for line in self.worked), default=peak)
        most = max((line.at(batch) for line in self.products), default=peak) + WORKSPACE_BYTES
        if any(line.at(batch) >= DEEP for line in self.depths):
            worked = most
        return max(peak, min(worked, most), *(line.at(batch) for line in (*self.attended, *self.measured)))


@dataclass(frozen=True)
class Trace:
    """Both passes of a stage with their segments in order, and what the stage keeps on the host in between."""

    forward: tuple[Segment, ...]
    backward: tuple[Segment, ...]
    on_host: Affine = ZERO
    timed_as: str = ""

    @cached_property
    def signature(self) -> str:
        """Equal for passes with the same kernels, and so the same time: FLOPs, bytes and kinds at every batch size.

        Collectives and messages of a larger layout are no part of it. One with casts of its own (see [Note: Held dtype]
        in held_dtype.py) is `timed_as` the one without.
        """
        if self.timed_as:
            return self.timed_as
        digest = hashlib.sha256()
        for segments in (self.forward, self.backward):
            rows = [
                np.column_stack([segment.flops, segment.moved, segment.kinds])[segment.kinds != KernelKind.COLLECTIVE]
                for segment in segments
            ]
            digest.update(b"pass" + b"".join(np.ascontiguousarray(each, dtype=np.int64).tobytes() for each in rows))
        return digest.hexdigest()[:16]

    @property
    def is_on_host(self) -> bool:
        return self.on_host != ZERO

    @property
    def forward_delta(self) -> Affine:
        return self.forward[-1].end if self.forward else ZERO

    @property
    def backward_delta(self) -> Affine:
        return self.backward[-1].end if self.backward else ZERO


@dataclass(frozen=True)
class Stage:
    """A block, or what runs between blocks; see [Note: Stage].

    `alike` numbers the kinds of stages: equal numbers have equal traces and equal operators but for their names.
    `parts` are the modules below a block that hold several operators. `recomputed` is None where nothing differs;
    `selective` is a block's trace where it is recomputed selectively, None where it cannot be; `on_host` is that with
    its input on the host, None where that cannot be or was not asked for. `finer` has the stage by parts or by
    operators where its traces differ then, see [Note: Held dtype] in held_dtype.py; None where it does not run so.
    """

    name: str
    is_block: bool
    alike: int
    operators: tuple[str, ...]
    parts: tuple[str, ...]
    plain: Trace
    recomputed: Trace | None
    selective: Trace | None = None
    on_host: Trace | None = None
    finer: Mapping[Granularity, Stage | None] = field(default_factory=dict)

    def by(self, granularity: Granularity) -> Stage:
        """The stage as it runs with its units of that size."""
        return self.finer.get(granularity) or self

    def trace(self, recompute: Recompute) -> Trace:
        """Outside blocks it matters only whether some block is recomputed; see [Note: Stage]."""
        if recompute is Recompute.SELECTIVE and self.selective is not None:
            return self.selective
        if recompute is Recompute.ON_HOST and self.on_host is not None:
            return self.on_host
        if recompute and self.recomputed is not None:
            return self.recomputed
        return self.plain


@dataclass(frozen=True)
class ModelGraph:
    """All that the planner knows of a model.

    `assumptions` are the lines that a reader of a plan must know: answers that only data has, blocks that cannot be
    recomputed. `unused` are trainable parameters on which the loss does not depend. A single entry in `batches`
    means that the counts hold at that batch size only.
    """

    name: str
    compute_dtype: str
    parameters: Mapping[str, Parameter]
    operators: Mapping[str, Operator]
    stages: tuple[Stage, ...]
    buffer_bytes: int
    input_bytes: Affine
    batches: tuple[int, ...]  # batch sizes of the captures
    seq_len: int | None = None
    assumptions: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    sample_elements: int = 0  # of the largest input tensor, for one sample

    @property
    def only_batch(self) -> int | None:
        """The one batch size that the counts hold at; None where they grow in straight lines."""
        return self.batches[0] if len(self.batches) == 1 else None

    def check_batches(self, sizes: Iterable[int]) -> None:
        """Refuses batch sizes that the counts do not hold at."""
        only = self.only_batch
        other = next((size for size in sizes if only is not None and size != only), None)
        if other is not None:
            raise UsageError(
                f"{self.name} was measured at batch {only}, and its costs do not grow in a straight line: "
                f"a plan for batch {other} needs a capture at batch {other}, so pass batch={other}"
            )

    def constant_bytes(self, batch: int, *, on_cpu: bool) -> int:
        """Buffers and inputs, and the scalars of real kernels: on an accelerator the reserve has room for those."""
        return self.buffer_bytes + self.input_bytes.at(batch) + (SCALAR_BYTES if on_cpu else 0)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel for parameter in self.parameters.values())

    def flops_at(self, batch: int) -> int:
        """What a forward and a backward of the model take, without anything being recomputed."""
        passes = (segments for stage in self.stages for segments in (stage.plain.forward, stage.plain.backward))
        return sum(_flops(segments).at(batch) for segments in passes)

    @property
    def blocks(self) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if stage.is_block)

    def recompute_gain(self, stage: Stage) -> tuple[Affine, Affine]:
        """Bytes that recomputing a block frees between its passes, and the FLOPs that it costs."""
        if stage.recomputed is None:
            return ZERO, ZERO
        freed = stage.plain.forward_delta - stage.recomputed.forward_delta
        return freed, _flops(stage.recomputed.backward) - _flops(stage.plain.backward)

    def beside_operators(self, stage: Stage) -> BesideOperators:
        """What a stage's kernels outside operators cost: attention scores, activations, residuals, the loss."""
        operators = [self.operators[name] for name in stage.operators]
        passes = (*stage.plain.forward, *stage.plain.backward)
        moved = sum((segment.moved.sum(axis=0) for segment in passes), np.zeros(2, dtype=np.int64))
        return BesideOperators(
            forward_flops=_flops(stage.plain.forward) - sum((op.forward_flops for op in operators), ZERO),
            backward_flops=_flops(stage.plain.backward) - sum((op.backward_flops for op in operators), ZERO),
            moved_bytes=Affine(int(moved[0]), int(moved[1])) - sum((op.moved_bytes for op in operators), ZERO),
            saved_bytes=stage.plain.forward_delta - sum((op.saved_bytes for op in operators), ZERO),
        )


@dataclass(frozen=True)
class BesideOperators:
    forward_flops: Affine
    backward_flops: Affine
    moved_bytes: Affine
    saved_bytes: Affine


def _flops(segments: tuple[Segment, ...]) -> Affine:
    total = sum((segment.flops.sum(axis=0) for segment in segments), np.zeros(2, dtype=np.int64))
    return Affine(int(total[0]), int(total[1]))
