"""The module tree: against the model itself."""

import torch
from report_cases import HOSTILE, NUM_PARAMETERS, WIDTH, WORSE, Net, compilation

from smpc.report.tree import module_tree


def _flat(node):
    return [node, *(below for child in node.children for below in _flat(child))]


def _tree():
    found = compilation()
    return module_tree(found.trace, found.plan)


def test_every_module_that_is_called_is_there_once():
    with torch.device("meta"):
        called = [name for name, module in Net().named_modules() if not isinstance(module, torch.nn.ModuleList)]
    nodes = _flat(_tree())
    assert sorted(node.name for node in nodes) == sorted(called)
    by_name = {node.name: node for node in nodes}
    assert by_name["blocks.1"].class_name == "Block"
    assert by_name[f"{WORSE}.inner"].class_name == "Linear"


def test_parameters_are_those_of_the_module_tied_ones_once():
    with torch.device("meta"):
        modules = dict(Net().named_modules())
    for node in _flat(_tree()):
        assert node.num_parameters == sum(p.numel() for p in modules[node.name].parameters())
    assert _tree().num_parameters == NUM_PARAMETERS


def test_flops_add_up_over_calls():
    by_name = {node.name: node for node in _flat(_tree())}
    one = 2 * 256 * WIDTH * 2 * WIDTH  # a product of 2 x 128 tokens
    assert by_name["blocks.1.inner"].forward_flops == one
    assert by_name["blocks.1"].forward_flops == 2 * one
    assert by_name["blocks.0"].forward_flops == 4 * one  # called twice
    assert by_name["head"].forward_flops == by_name["embedding"].forward_flops == one / 2
    assert by_name[""].forward_flops == 2 * 7 * one + one
    assert by_name[""].forward_flops == sum(stage.forward_flops for stage in compilation().plan.stages)


def test_stages_are_those_of_the_plan():
    by_name = {node.name: node for node in _flat(_tree())}
    assert by_name[""].stages == (0, 1, 2)
    for stage in compilation().plan.stages:
        for module in stage.modules:
            assert stage.index in by_name[module].stages
    assert any(len(by_name[name].stages) == 1 for name in (HOSTILE, "blocks.3"))
