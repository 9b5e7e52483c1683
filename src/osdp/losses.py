"""The cross entropy of a language head without its whole logits.

[Note: Chunked cross entropy]
Logits of N tokens over a vocabulary of V take N V numbers, in fp32, and so do their gradient and a copy or two: with
128,000 words that is most of a step's memory. Here the sequence is cut into chunks. Of each, logits l = h Wᵀ are made,
its part of the loss, Σ (log Σ exp l − l_target), and at once its gradient, softmax(l) − onehot(target), from which
follow this chunk's gradient of h and its share of W's. Then the logits are gone. What is kept for backward is the
gradient of h, as large as h, and that of W, in fp32 where W has 16 bits, as shares are added up. The products are those
of the usual loss: nothing is computed twice.
Backward multiplies by the gradient that it is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from osdp.errors import UsageError

IGNORED = -100
MOST_CHUNKS = 1024
# Causal models of transformers whose loss is the cross entropy of what their head returns, and nothing more.
HUGGING_FACE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, chunks: int, ignore_index: int = IGNORED
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight).float(), targets)`, the mean, without its whole logits.

    `hidden` has a vector for every target: (batch, sequence, width), which is cut along the sequence, or
    (tokens, width). See [Note: Chunked cross entropy].
    """
    if hidden.shape[:-1] != targets.shape or weight.shape[-1] != hidden.shape[-1]:
        raise UsageError(
            f"hidden states of shape {list(hidden.shape)}, a weight of {list(weight.shape)} and targets of"
            f" {list(targets.shape)} do not go together; give (batch, sequence, width), (words, width) and"
            " (batch, sequence)"
        )
    if not 1 <= chunks <= MOST_CHUNKS:
        raise UsageError(f"{chunks} chunks are impossible; give 1 to {MOST_CHUNKS}")
    return _Chunked.apply(hidden, weight, targets, chunks, ignore_index)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunks: int, ignored: int) -> Tensor:
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        weights = (targets != ignored) / (targets != ignored).sum()  # of each token in the mean
        for place in _places(targets, chunks):
            part, target, own = hidden[place].flatten(0, -2), targets[place].flatten(), weights[place].flatten()
            gradient, loss = _chunk(part, weight, target, own, wants_gradient=any(ctx.needs_input_grad))
            total += loss
            if of_hidden is not None:
                of_hidden[place] = (gradient @ weight).view_as(of_hidden[place])
            if of_weight is not None:
                of_weight += gradient.T @ part
            del gradient  # before the next chunk's logits are made
        ctx.save_for_backward(of_hidden, of_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[bad-override]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        of_hidden, of_weight = ctx.saved_tensors
        return (
            None if of_hidden is None else of_hidden * gradient,
            None if of_weight is None else (of_weight * gradient).to(ctx.weight_dtype),
            *(None, None, None),
        )


def _chunk(
    hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, *, wants_gradient: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of a chunk's part of the mean by its logits, in the dtype of the hidden states, and that part.

    `weights` are those of the tokens in the mean, 0 where a target is ignored.
    """
    logits = F.linear(hidden, weight).float()
    weights = weights.unsqueeze(1)
    own = torch.where(weights > 0, targets.unsqueeze(1), 0)
    most = logits.logsumexp(1, keepdim=True)
    loss = ((most - logits.gather(1, own)) * weights).sum()
    if not wants_gradient:
        return logits, loss
    softmax = logits.sub_(most).exp_()
    softmax.scatter_add_(1, own, torch.full_like(most, -1.0))
    return softmax.mul_(weights).to(hidden.dtype), loss


def _places(targets: Tensor, chunks: int) -> Iterator[Any]:
    """Where the chunks are: along the sequence, or tokens; as many at every batch size, so that costs are lines."""
    length = targets.shape[-1]
    step = -(-length // chunks)
    for start in range(0, length, step):
        piece = slice(start, min(start + step, length))
        yield (slice(None), piece) if targets.ndim > 1 else (piece,)


class ChunkedHead(nn.Linear):
    """A language head that gives the loss instead of logits where it has targets; a whole operator, never in slices."""

    chunks = 1
    targets: Tensor | None = None  # of a Hugging Face model's call under way
    count: Tensor | float | None = None  # what the summed loss is divided by, where it is not the number of targets

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:  # type: ignore[bad-override]
        targets = self.targets if targets is None else targets
        if targets is None:
            return super().forward(hidden)
        loss = chunked_cross_entropy(hidden, self.weight, targets, chunks=self.chunks)
        return loss if self.count is None else loss * (targets != IGNORED).sum() / self.count


def chunk_loss(model: nn.Module, chunks: int) -> nn.Module:
    """Lets a language model compute its loss in chunks, in place: a GPT of osdp's, or of the known Hugging Face ones.

    Given targets (`labels`), the model returns the same loss; a Hugging Face model's `logits` are the loss then.
    """
    from osdp.model.gpt import GPT

    head = _head_of(model)
    if head is None:
        raise UsageError(
            f"the loss of a {type(model).__name__} is not known to be the cross entropy of a head without bias, so it"
            f" cannot be computed in chunks; known are GPT, {', '.join(HUGGING_FACE)}: call"
            " osdp.losses.chunked_cross_entropy in your model, or leave loss_chunks out"
        )
    if not isinstance(head, ChunkedHead):
        head.__class__ = ChunkedHead
        if not isinstance(model, GPT):
            model.register_forward_pre_hook(_take_labels, with_kwargs=True)
            model.register_forward_hook(_leave_labels, always_call=True)
            model.loss_function = _loss_of  # type: ignore[assignment]
    assert isinstance(head, ChunkedHead)
    head.chunks = chunks
    return model


def can_chunk(model: nn.Module) -> bool:
    """Whether `chunk_loss` knows the model's loss."""
    return _head_of(model) is not None


def _head_of(model: nn.Module) -> nn.Linear | None:
    """The head whose cross entropy is the model's loss, if it is known."""
    from osdp.model.gpt import GPT

    head = model.head if isinstance(model, GPT) else None
    if type(model).__name__ in HUGGING_FACE:
        head = model.get_output_embeddings()  # type: ignore[operator]
    return head if isinstance(head, nn.Linear) and head.bias is None else None


def _take_labels(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Labels are shifted as transformers shifts them: the last place has none."""
    labels, head = kwargs.get("labels"), model.get_output_embeddings()
    if labels is not None:
        shifted = kwargs.get("shift_labels")
        head.targets = F.pad(labels, (0, 1), value=IGNORED)[..., 1:] if shifted is None else shifted
        head.count = kwargs.get("num_items_in_batch")


def _leave_labels(model: Any, args: object, output: object) -> None:
    head = model.get_output_embeddings()
    head.targets = head.count = None


def _loss_of(logits: Tensor, *unused: object, **more: object) -> Tensor:
    """What the head gave is the loss already."""
    return logits
