"""A plan as settings: transformers' `_fsdp_plan`, and Accelerate's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from osdp.export.python_text import template
from osdp.planfile import Plan
from osdp.sharding import FREE, KEEP, ShardingMode

if TYPE_CHECKING:
    from torch import nn

_WEIGHT = {KEEP: "keep_full_weight", FREE: "free_full_weight"}

_TRANSFORMERS = '''
from transformers import AutoConfig, {architecture}
from transformers.distributed import DistributedConfig

BATCH_SIZE, ACCUMULATION = {batch}, {accumulation}  # micro-batch of a device, micro-batches of a step
FSDP_PLAN = {{
{plan}
}}


class Planned({architecture}):
    _fsdp_plan = FSDP_PLAN


def load(folder: str):
    """The model with the weights of a folder, sharded; make the optimizer after it."""
    config = AutoConfig.from_pretrained(folder)
    config.base_model_fsdp_plan = {{}}  # or it would override entries of the plan
    distributed = DistributedConfig(fsdp_size={ranks}, fsdp_mixed_precision={mixed})
    model = Planned.from_pretrained(folder, config=config, distributed_config=distributed, dtype="{stored}")
{recompute}    return model.train()
'''


def transformers_text(plan: Plan, head: str, model: nn.Module) -> str:
    """Exact names come before wildcards, so the most frequent mode of blocks is the wildcard's."""
    blocks = [(unit.name, unit.mode) for unit in plan.units if unit.block is not None]
    entries = {}
    for wildcard in dict.fromkeys(t[0].replace("{i}", "*") for name, _ in blocks if (t := template(name)) is not None):
        mine = [mode for name, mode in blocks if (t := template(name)) and t[0].replace("{i}", "*") == wildcard]
        entries[wildcard] = max(set(mine), key=mine.count)
    for unit in plan.units:
        found = template(unit.name)
        wildcard = found[0].replace("{i}", "*") if found is not None and unit.block is not None else None
        if wildcard is None or entries[wildcard] != unit.mode:
            entries |= dict.fromkeys(unit.modules, unit.mode)
    entries.pop("", None)
    recompute = any(unit.recompute for unit in plan.units)
    text = _TRANSFORMERS.format(
        architecture=type(model).__name__,
        batch=plan.batch_size,
        accumulation=plan.accumulation,
        plan="\n".join(f'    "{name}": "{_WEIGHT[ShardingMode(mode)]}",' for name, mode in entries.items()),
        ranks=plan.cluster.world_size,
        mixed=plan.precision == "bf16",
        stored="bfloat16" if plan.precision == "pure-bf16" else "float32",
        recompute="    model.gradient_checkpointing_enable()\n" if recompute else "",
    )
    return head + "\n" + text.lstrip("\n")


_ACCELERATE = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: {classes}
  fsdp_reshard_after_forward: {reshard}
  fsdp_activation_checkpointing: {recompute}
  fsdp_state_dict_type: SHARDED_STATE_DICT
mixed_precision: {precision}
num_machines: {nodes}
num_processes: {ranks}
machine_rank: 0
main_training_function: main
# in the script: a micro-batch of {batch} a device, gradient_accumulation_steps={accumulation}
"""


def accelerate_text(plan: Plan, head: str, model: nn.Module) -> str:
    blocks = [unit for unit in plan.units if unit.block is not None]
    classes = dict.fromkeys(type(model.get_submodule(unit.name)).__name__ for unit in blocks)
    text = _ACCELERATE.format(
        classes=",".join(classes),
        reshard=str(any(unit.mode == FREE for unit in blocks)).lower(),
        recompute=str(any(unit.recompute for unit in blocks)).lower(),
        precision=plan.precision if plan.precision in ("bf16", "fp16") else "no",
        nodes=plan.cluster.nodes,
        ranks=plan.cluster.world_size,
        batch=plan.batch_size,
        accumulation=plan.accumulation,
    )
    return head + "\n" + text
