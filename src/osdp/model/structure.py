"""Reads a module tree: which modules are operators, which are blocks, and what parts a block has.

[Note: Block]
Blocks are the repeated elements of module lists: the places where a model is deep. A list whose elements are all
different and hold lists themselves (the stages of a pyramid) is looked into; a list inside a block (experts) is not.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from osdp.losses import ChunkedHead


def owns_parameters(module: nn.Module) -> bool:
    """Whether the module is an operator: it has parameters of its own."""
    return any(parameter is not None for parameter in module._parameters.values())


def operators_below(module: nn.Module, name: str) -> list[str]:
    """Names of the operators at or below a module, in the order of its tree."""
    prefix = f"{name}." if name else ""
    return [
        (prefix + below).rstrip(".") if below else name
        for below, child in module.named_modules()
        if owns_parameters(child)
    ]


def signature(module: nn.Module) -> tuple[object, ...]:
    """Equal for modules of the same classes and parameter shapes: alike but for their values."""
    return tuple(
        (
            name,
            type(child).__qualname__,
            tuple((key, tuple(p.shape)) for key, p in child._parameters.items() if p is not None),
        )
        for name, child in module.named_modules()
    )


def find_blocks(model: nn.Module) -> list[str]:
    """Names of the model's blocks, in the order of its tree; see [Note: Block]."""
    return list(_blocks(model, ""))


def _blocks(module: nn.Module, name: str) -> Iterator[str]:
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and _is_deep(child):
            pyramid = not any(_has_twin(element, child) for element in child.children())
            for key, element in child.named_children():
                if pyramid and _holds_deeper_list(element):
                    yield from _blocks(element, f"{full}.{key}")
                elif any(True for _ in element.parameters()):
                    yield f"{full}.{key}"
        else:
            yield from _blocks(child, full)


def _is_deep(container: nn.Module) -> bool:
    return sum(1 for child in container.children() if any(True for _ in child.parameters())) > 1


def _holds_deeper_list(element: nn.Module) -> bool:
    return any(
        isinstance(m, (nn.ModuleList, nn.Sequential)) and _is_deep(m) for m in element.modules() if m is not element
    )


def _has_twin(element: nn.Module, container: nn.Module) -> bool:
    mine = signature(element)
    return sum(1 for child in container.children() if signature(child) == mine) > 1


def find_parts(block: nn.Module, name: str) -> list[str]:
    """Names of the largest modules below a block that hold several operators and are called as modules."""
    parts: list[str] = []
    for child_name, child in block.named_children():
        full = f"{name}.{child_name}"
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):  # containers are never called: look inside
            parts.extend(find_parts(child, full))
        elif len(operators_below(child, full)) > 1:
            parts.append(full)
    return parts


def split_dim(module: nn.Module) -> int:
    """The weight's dimension along which an operator is split into slices; -1 if it cannot be split."""
    if isinstance(module, ChunkedHead):
        return -1
    if isinstance(module, nn.Linear):
        return 0
    is_conv1d = type(module).__name__ == "Conv1D" and hasattr(module, "nf")  # Hugging Face's transposed linear
    return 1 if isinstance(module, nn.Embedding) or is_conv1d else -1


def own_blocks(model: nn.Module) -> list[str]:
    """The blocks whose parameters nobody else uses: a block tied to the outside cannot be planned by itself."""
    users: dict[int, set[str]] = {}
    blocks = find_blocks(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = next((block for block in blocks if name.startswith(block + ".")), "")
        users.setdefault(id(parameter), set()).add(owner)
    shared = {owner for owners in users.values() if len(owners) > 1 for owner in owners}
    return [block for block in blocks if block not in shared]
