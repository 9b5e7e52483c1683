"""Claim: blocks are where a model is deep, parts and operators are what a block consists of; see [Note: Block]."""

from __future__ import annotations

import pytest
import torch
from small_models import source
from torch import nn

from osdp.model.structure import (
    find_blocks,
    find_parts,
    operators_below,
    own_blocks,
    owns_parameters,
    signature,
    split_dim,
)


class Feed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)


class Block(nn.Module):
    def __init__(self, width: int, experts: int = 0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Feed(width)
        self.experts = nn.ModuleList(Feed(width) for _ in range(experts))
        self.act = nn.GELU()


class Stack(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(8, 16)


class Stage(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.merge = nn.Linear(width, 2 * width)


def test_elements_of_a_module_list_are_blocks() -> None:
    assert find_blocks(Stack(Block(8), Block(8), Block(8))) == ["blocks.0", "blocks.1", "blocks.2"]


def test_blocks_need_not_be_alike() -> None:
    assert find_blocks(Stack(Block(8), nn.Linear(8, 16), Block(16))) == ["blocks.0", "blocks.1", "blocks.2"]


def test_elements_without_parameters_are_no_blocks() -> None:
    assert find_blocks(nn.Sequential(Block(8), nn.GELU(), Block(8))) == []  # the model itself is not looked for
    assert find_blocks(Stack(Block(8), nn.GELU(), Block(8))) == ["blocks.0", "blocks.2"]


def test_a_list_of_one_is_not_deep() -> None:
    assert find_blocks(Stack(Block(8))) == []


def test_two_lists_give_their_blocks_in_the_order_of_the_tree() -> None:
    model = nn.Module()
    model.encoder, model.decoder = Stack(Block(8), Block(8)), Stack(Block(8), Block(8))
    assert find_blocks(model) == [f"{side}.blocks.{i}" for side in ("encoder", "decoder") for i in (0, 1)]


def test_stages_of_a_pyramid_are_looked_into() -> None:
    pyramid = nn.Module()
    pyramid.stages = nn.ModuleList([Stage(8, 2), Stage(16, 3)])
    assert find_blocks(pyramid) == [
        *("stages.0.blocks.0", "stages.0.blocks.1"),
        *("stages.1.blocks.0", "stages.1.blocks.1", "stages.1.blocks.2"),
    ]


def test_experts_inside_a_block_are_no_blocks() -> None:
    assert find_blocks(Stack(*(Block(8, experts=4) for _ in range(2)))) == ["blocks.0", "blocks.1"]


def test_one_odd_element_does_not_open_a_list_of_equal_ones() -> None:
    """Only a list whose elements are all different is looked into; T5's first block, with its table, is odd."""
    odd = Block(8, experts=2)
    odd.table = nn.Embedding(4, 8)
    assert find_blocks(Stack(odd, Block(8, experts=2), Block(8, experts=2))) == ["blocks.0", "blocks.1", "blocks.2"]


def test_blocks_that_share_parameters_are_left_out() -> None:
    model = Stack(*(Block(8) for _ in range(4)))
    model.blocks[2].norm.weight = model.blocks[1].norm.weight
    assert find_blocks(model) == [f"blocks.{i}" for i in range(4)]
    assert own_blocks(model) == ["blocks.0", "blocks.3"]


def test_a_block_tied_to_the_outside_is_left_out() -> None:
    model = Stack(Block(8), Block(8))
    model.embed.weight = nn.Parameter(torch.empty(16, 8))
    model.blocks[1].attention.up.weight = model.embed.weight
    assert own_blocks(model) == ["blocks.0"]


def test_parameters_shared_within_a_block_do_not_matter() -> None:
    model = Stack(Block(8, experts=2), Block(8, experts=2))
    model.blocks[0].experts[1].up.weight = model.blocks[0].experts[0].up.weight
    assert own_blocks(model) == ["blocks.0", "blocks.1"]


def test_parts_hold_several_operators_and_containers_are_looked_into() -> None:
    assert find_parts(Block(8, experts=2), "b") == ["b.attention", "b.experts.0", "b.experts.1"]
    assert find_parts(Feed(8), "b") == []


def test_operators_own_parameters_themselves() -> None:
    block = Block(8)
    assert operators_below(block, "b") == ["b.norm", "b.attention.up", "b.attention.down"]
    assert operators_below(block.norm, "b.norm") == ["b.norm"]
    assert operators_below(block.attention, "") == ["up", "down"]
    assert owns_parameters(block.norm)
    assert not owns_parameters(block)
    block.scale = nn.Parameter(torch.empty(1))
    assert operators_below(block, "b")[0] == "b"


def test_signature_sees_shapes_and_classes_but_not_values() -> None:
    assert signature(Block(8)) == signature(Block(8))
    assert signature(Block(8)) != signature(Block(16))
    assert signature(nn.Linear(8, 8)) != signature(nn.Linear(8, 8, bias=False))
    assert signature(nn.LayerNorm(8)) != signature(nn.RMSNorm(8))


def test_split_dimension() -> None:
    assert split_dim(nn.Linear(4, 8)) == 0
    assert split_dim(nn.Embedding(4, 8)) == 1
    assert split_dim(nn.LayerNorm(8)) == -1
    conv1d = source("gpt2").build_on_meta().get_submodule("transformer.h.0.attn.c_attn")
    assert type(conv1d).__name__ == "Conv1D"
    assert split_dim(conv1d) == 1


@pytest.mark.parametrize(
    ("model", "blocks", "parts"),
    [
        ("gpt", [f"blocks.{i}" for i in range(3)], []),
        ("gpt-pyramid", [f"blocks.{i}" for i in range(5)], []),
        ("llama", [f"model.layers.{i}" for i in range(3)], ["self_attn", "mlp"]),
        ("gpt2", [f"transformer.h.{i}" for i in range(3)], ["attn", "mlp"]),
        ("vit", [f"vit.layers.{i}" for i in range(3)], ["attention", "mlp"]),
    ],
)
def test_known_models(model: str, blocks: list[str], parts: list[str]) -> None:
    module = source(model).build_on_meta()
    assert own_blocks(module) == blocks
    assert find_parts(module.get_submodule(blocks[0]), blocks[0]) == [f"{blocks[0]}.{part}" for part in parts]
