"""What a few steps of training gave, and how far two such runs are apart."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Run:
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]


def difference(found: Run, truth: Run) -> tuple[float, str]:
    """The largest relative error, and of what."""
    errors = [(abs(a - b) / b, f"loss {i}") for i, (a, b) in enumerate(zip(found.losses, truth.losses, strict=True))]
    errors += [(abs(a - b) / b, f"norm {i}") for i, (a, b) in enumerate(zip(found.norms, truth.norms, strict=True))]
    largest = max(float(each.abs().max()) for each in truth.gradients.values() if each is not None)
    assert found.gradients.keys() == truth.gradients.keys()
    for name, true in truth.gradients.items():
        own = found.gradients[name]
        assert true is not None and own is not None, name
        errors.append((float((own - true).abs().max()) / largest, f"gradient of {name}"))
        moved = float((found.parameters[name] - truth.parameters[name]).abs().max())
        errors.append((moved / float(truth.parameters[name].abs().max()), name))
    return max(errors)
