"""Parameters that FSDP2 cannot hold as they are: without dimensions, or without elements.

Those without dimensions, such as the temperature of a contrastive loss, get one of size 1, which broadcasts alike;
torch loads such a tensor into a parameter without dimensions. Those without elements have nothing to train, and FSDP2
reduces no empty gradient: they are frozen.
"""

from __future__ import annotations

from torch import nn

_SCALARS = "_osdp_scalars"  # on a module: the keys of its parameters that had no dimension


def give_scalars_a_dimension(model: nn.Module) -> None:
    """In place; a parameter that several modules share stays one."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() == 0:
                if parameter not in made:
                    made[parameter] = nn.Parameter(parameter.detach().reshape(1), parameter.requires_grad)
                module._parameters[key] = made[parameter]
                setattr(module, _SCALARS, (*getattr(module, _SCALARS, ()), key))


def freeze_empty(model: nn.Module) -> None:
    for parameter in model.parameters():
        if not parameter.numel():
            parameter.requires_grad_(False)


def scalar_names(model: nn.Module) -> set[str]:
    """The parameters to which that was done, by name."""
    return {
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules()
        for key in getattr(module, _SCALARS, ())
    }
