"""`requires_grad` read from memory is what the attribute says, whatever happens to the tensors; so are classes."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from smpc.tracer.environment import memory_words
from smpc.tracer.environment import memory_words as requires_grad
from smpc.tracer.environment.memory_words import function_reader, trained_reader, type_reader


@pytest.fixture(params=["memory", "attribute"])
def way(request, monkeypatch):
    """Both ways, whether or not this Python and torch allow the fast one."""
    if request.param == "attribute":
        monkeypatch.setattr(requires_grad, "_offsets", lambda: None)
        monkeypatch.setattr(memory_words, "_has_type", lambda: False)
    return request.param


class Tagged(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("reading a mode calls nothing")


def test_the_fast_way_is_taken_here():
    assert requires_grad._offsets() is not None
    assert memory_words._has_type()
    for name in ("__code__", "__name__", "__qualname__"):
        assert memory_words._offset_in_function(name) is not None


def test_random_changes_are_seen(way):
    numbers = random.Random(0)
    layer = nn.Linear(3, 3)
    parameters = [
        *layer.parameters(),
        nn.Parameter(torch.zeros(3, dtype=torch.long), requires_grad=False),  # has never had autograd metadata
        nn.Parameter(torch.empty(2, device="meta")),
        nn.Parameter(torch.zeros(4, 4)[1:, ::2]),
        nn.Parameter(torch.zeros(3)),  # becomes one of a subclass
        *(nn.Parameter(torch.zeros(2)) for _ in range(20)),
    ]
    parameters[5].__class__ = Tagged
    read = trained_reader(parameters)
    for _ in range(300):
        parameter = numbers.choice(parameters)
        change = numbers.randrange(5)
        if change < 2 and parameter is not parameters[2]:
            with torch._C.DisableTorchFunctionSubclass():
                parameter.requires_grad_(bool(change))
        elif change == 2 and type(parameter) is nn.Parameter:
            parameter.data = parameter.data.clone()
        elif change == 3 and type(parameter) is nn.Parameter and parameter.device.type == "cpu":
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.data.clone(), requires_grad=False))
        elif change == 4 and type(parameter) is nn.Parameter and parameter.requires_grad:
            (parameter * 2).sum().backward()
        with torch._C.DisableTorchFunctionSubclass():
            assert list(read()) == [int(p.requires_grad) for p in parameters]
    assert 0 < sum(read()) < len(parameters)


def test_no_parameters(way):
    assert trained_reader([])() == b""


def test_classes_are_seen(way):
    modules = [nn.ReLU() for _ in range(10)]
    read = type_reader(modules)
    before = read().tolist()
    assert before == [id(nn.ReLU)] * 10
    modules[3].__class__ = nn.GELU
    assert read().tolist() == [id(type(module)) for module in modules] != before


@pytest.mark.parametrize("name", ["__code__", "__name__", "__qualname__"])
def test_attributes_of_functions_are_read(name):
    def made(i):
        def function(x=i): ...

        function.__name__, function.__qualname__ = f"name {i}", f"qualified name {i}"
        return function

    numbers, functions = random.Random(1), [made(i) for i in range(30)]
    read = function_reader(functions, name)
    for i in range(30, 100):
        setattr(numbers.choice(functions), name, getattr(made(i), name))
        assert read().tolist() == [id(getattr(function, name)) for function in functions]


def test_what_no_word_of_a_function_holds_is_not_read_from_memory():
    assert function_reader([test_the_fast_way_is_taken_here], "__defaults__") is None
    assert function_reader([test_the_fast_way_is_taken_here], "__dict__") is None
