"""Why a model cannot be captured: where in the user's code, the cause, and a remedy that belongs to it."""

from __future__ import annotations

from torch import nn

from osdp.errors import OsdpError
from osdp.model.inputs import CaptureError
from osdp.model.values import is_foreign, named_place

_DTYPES = "its parameters are cast, other tensors are not: plan with precision='fp32', or cast there"
_SHAPES = (
    "check that the example inputs have the shapes that the model trains with; where a larger batch is not more samples"
    " along the first dimension, pass a function of the batch size that returns the inputs"
)
_REMEDIES = {
    "shape_env": "nested tensors have no shapes that can be planned: pad them, with a mask",
    "dtype": _DTYPES,
    "scalar type": _DTYPES,
    "unsupported operand": "check that the example inputs are what the model trains with",
    **dict.fromkeys(("size of tensor", "reduction dim", "shape", "broadcast", "batch_size", "channels"), _SHAPES),
    ".numpy()": "compute it with torch's operators, or in a torch.library.custom_op that has a fake kernel",
    "ScriptModules": "plan and train its modules as Python code, without torch.jit.script",
    "missing": "check that the example inputs have every argument that the model needs",
}
_OTHER = "check that the model trains with these example inputs, and that it can run on tensors without values"


def refused(model: nn.Module, error: Exception) -> OsdpError:
    """The error that a user sees. One of our own is already a sentence."""
    if isinstance(error, OsdpError):
        return error
    place = _place(error)
    text = (str(error).strip().splitlines() or ["no message"])[0][:300]
    remedy = next((remedy for words, remedy in _REMEDIES.items() if words in text), _OTHER)
    return CaptureError(
        f"{type(model).__name__} cannot be traced on fake tensors: {place}: {type(error).__name__}: {text}; {remedy}"
    )


def _place(error: Exception) -> str:
    """The innermost line of the traceback that is the user's, or of a library that is neither torch nor ours."""
    found = "before any line of its own"
    at = error.__traceback__
    while at is not None:
        if is_foreign(at.tb_frame):
            found = named_place(at.tb_frame, at.tb_lineno)
        at = at.tb_next
    return found
