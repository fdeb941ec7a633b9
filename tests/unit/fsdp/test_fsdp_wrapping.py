"""Which modules are units: attributes, functions, options, shared parameters."""

import pytest
from torch import nn

from smpc.errors import ConfigError, ConfigTypeError
from smpc.fsdp import units_of
from smpc.fsdp.wrapping import recomputed


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)


class Model(nn.Module):
    def __init__(self, answer=None):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(2, 2)
        if answer is not None:
            self.fsdp_wrap_fn = answer
            self.activation_checkpointing_fn = lambda module: isinstance(module, Block | nn.Linear)


def _names(model):
    return [unit.name for unit in units_of(model)]


def test_rules():
    assert _names(Model()) == [""]
    model = Model(lambda module: isinstance(module, Block))
    assert _names(model) == ["blocks.0", "blocks.1", ""]
    model.blocks[1]._fsdp_wrap = False
    model.head._fsdp_wrap = True
    assert _names(model) == ["blocks.0", "head", ""]
    model.blocks[0].inner._fsdp_wrap = True
    assert _names(model) == ["blocks.0.inner", "blocks.0", "head", ""], "inner ones first"
    model.blocks[0].inner.weight = model.head.weight
    assert _names(model) == [""], "what two modules share belongs to what is around both"


def test_options():
    model = Model(
        lambda module: {"process_group": "node", "mixed_precision": "FULL"} if isinstance(module, Block) else False
    )
    assert [(unit.name, unit.options.get("process_group")) for unit in units_of(model)] == [
        ("blocks.0", "node"),
        ("blocks.1", "node"),
        ("", None),
    ]
    with pytest.raises(ConfigError, match="unknown options 'group'; known are sharding_strategy, process_group"):
        units_of(Model(lambda module: {"group": "node"}))
    with pytest.raises(
        ConfigError, match=r"fsdp_wrap_fn\(blocks\): expected a module that is called, found a ModuleList"
    ):
        units_of(Model(lambda module: isinstance(module, nn.ModuleList)))
    with pytest.raises(ConfigTypeError, match="fsdp_wrap_fn: expected a bool or a dict for ModuleList, found 'yes'"):
        units_of(Model(lambda module: "yes"))


def test_recomputed():
    model = Model(lambda module: False)
    assert recomputed(model) == ["blocks.0", "blocks.1", "head"], "none inside of another"
    model.blocks[0]._activation_checkpointing = False
    assert recomputed(model) == ["blocks.0.inner", "blocks.1", "head"]
    assert recomputed(Model()) == []
    model._activation_checkpointing = True
    assert recomputed(model) == [""], "a child of the model says it of itself"
