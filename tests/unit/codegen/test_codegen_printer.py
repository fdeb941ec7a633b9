"""The source of nodes and calls: how it reads, and that it computes what the node computes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smpc.codegen.printer import attribute_source, call_source, context_source, is_addressable, is_plain, node_source
from smpc.tracer import Autocast, NodeKind, flatten, record, replay
from smpc.tracer.constants import Ref
from smpc.tracer.targets import function


class Expression(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.register_buffer("table", torch.arange(12.0).reshape(3, 4))

    def forward(self, x, y):
        return self.function(self, x, y)


# what a person writes -> what is printed for its last node
EXPRESSIONS = {
    "add": (lambda m, x, y: x + y, "x + y"),
    "negative constant": (lambda m, x, y: x * -1.5, "x * (-1.5)"),
    "constant on the left": (lambda m, x, y: -2 - x, "(-2) - x"),
    "division": (lambda m, x, y: x / 3, "x / 3"),
    "divided": (lambda m, x, y: 1 / x, "1 / x"),
    "power": (lambda m, x, y: x**-2, "x ** (-2)"),
    "power of a constant": (lambda m, x, y: 2**x, "2 ** x"),
    "matrix product": (lambda m, x, y: x @ y.T, "x @ T"),
    "comparison": (lambda m, x, y: x >= 0.5, "x >= 0.5"),
    "infinity": (lambda m, x, y: x > float("-inf"), "x > float('-inf')"),
    "not a number": (lambda m, x, y: torch.full_like(x, float("nan")), "torch.full_like(x, float('nan'))"),
    "negation": (lambda m, x, y: -x, "-x"),
    "floor": (lambda m, x, y: 7 // x, "7 // x"),
    "not": (lambda m, x, y: ~(x > 1), "~gt"),
    "masks": (lambda m, x, y: (x > 1) & (y > 0), "gt & gt_1"),
    "slices": (lambda m, x, y: x[:, 1:-1], "x[:, 1:-1]"),
    "steps": (lambda m, x, y: x[::2, None, ...], "x[::2, None, ...]"),
    "one index": (lambda m, x, y: x[-1], "x[-1]"),
    "index by tensor": (lambda m, x, y: x[y[0].long()], "x[long]"),
    "attribute": (lambda m, x, y: x.T, "x.T"),
    "method": (lambda m, x, y: x.view(-1, 2), "x.view(-1, 2)"),
    "method with keywords": (lambda m, x, y: x.sum(dim=1, keepdim=True), "x.sum(dim=1, keepdim=True)"),
    "function": (lambda m, x, y: F.gelu(x, approximate="tanh"), "F.gelu(x, approximate='tanh')"),
    "list": (lambda m, x, y: torch.cat([x, y], dim=-1), "torch.cat([x, y], dim=-1)"),
    "dtype": (lambda m, x, y: x.to(torch.float64), "x.to(torch.float64)"),
    "device": (lambda m, x, y: torch.zeros(2, device=x.device), "torch.zeros(2, device=self._device)"),
    "memory format": (
        lambda m, x, y: x.clone(memory_format=torch.contiguous_format),
        "x.clone(memory_format=torch.contiguous_format)",
    ),
    "buffer": (lambda m, x, y: x + m.table, "x + self.table"),
    "einsum": (lambda m, x, y: torch.einsum("ij,ij->i", x, y), "torch.einsum('ij,ij->i', x, y)"),
}


class Holder:
    """Stands for a stage: what the printed code calls `self`."""

    def __init__(self, model):
        self.table, self._device = model.table, torch.device("cpu")


@pytest.mark.parametrize("case", EXPRESSIONS)
def test_expressions(case):
    function_, expected = EXPRESSIONS[case]
    model, x, y = Expression(function_), torch.rand(3, 4) + 0.5, torch.rand(3, 4).round()
    trace = record(model, (), {"x": x, "y": y})
    names = {"torch": torch, "F": F, "function": function, "self": Holder(model), "x": x, "y": y}

    def name_of(name):
        node = trace.node(name)
        return attribute_source(node.target) if node.kind is NodeKind.GET_ATTR else name

    for node in trace.nodes:
        if node.kind is NodeKind.CALL_FUNCTION:
            source = node_source(node, name_of)
            names[node.name] = eval(source, names)
    found = names[trace.output_names[0]]
    assert torch.equal(found.nan_to_num(), model(x, y).nan_to_num())
    assert source == expected


class Statements(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        y = x.clone()
        y[0, 1:] = -1.0
        y[x > 0] = 0.5
        y.data = y * 2
        y.add_(1)
        self.seen = self.seen + y.sum(0)
        return y


def test_statements():
    trace = record(Statements(), (torch.ones(3, 4),))
    found = [node_source(node, str) for node in trace.nodes if node.kind not in ("placeholder", "get_attr")]
    assert found[:4] == ["args_0.clone()", "clone[0, 1:] = -1.0", "args_0 > 0", "clone[gt] = 0.5"]
    assert "clone.data = mul" in found
    assert found[-1] == "self.seen = add_1"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("weight", "self.weight"),
        ("h.0.ln_1.weight", "self.h[0].ln_1.weight"),
        ("0", "self[0]"),
        ("heads.x-y.class", "getattr(getattr(self.heads, 'x-y'), 'class')"),
        ("tables..'cos'", "self.tables['cos']"),
        ("scales..1", "self.scales[1]"),
        ("scales[1]", "getattr(self, 'scales[1]')"),
        ("a.print(1)#", "getattr(self.a, 'print(1)#')"),
        ("h.01", "getattr(self.h, '01')"),
        ("h.\u0663", "getattr(self.h, '\u0663')"),
        ("\ufb01ne", "getattr(self, '\ufb01ne')"),
        ("__x", "getattr(self, '__x')"),
    ],
)
def test_attributes(path, expected):
    assert attribute_source(path) == expected


def test_calls_of_modules_with_nested_arguments():
    _, structure = flatten((((1, (2,)), [3]), {"mask": {"a": 4, 0: None}, "in": slice(5, 6), "b": ()}))
    leaves = (Ref("x"), Ref("y"), 0.5, Ref("z"), None, 5, 6, None)
    assert is_plain(structure)
    assert call_source("h.1", structure, leaves, str.upper) == (
        "self.h[1]((X, (Y,)), [0.5], mask={'a': Z, 0: None}, **{'in': slice(5, 6, None)}, b=())"
    )


def test_arguments_that_cannot_be_written_down():
    assert not is_plain(flatten(((torch.return_types.max([torch.ones(1), torch.ones(1)]),), {}))[1])
    assert not is_plain(flatten((({(1, 2): 3},), {}))[1])
    assert not is_addressable(flatten({"a": {1, 2}})[1])
    assert is_addressable(flatten({"a": [1, (2,)]})[1])


def test_contexts():
    assert context_source(True, None) == ""
    assert context_source(False, None) == "torch.no_grad()"
    assert context_source(False, Autocast("cpu", "bfloat16", True)) == (
        "torch.no_grad(), torch.autocast('cpu', torch.bfloat16, enabled=True)"
    )


def test_functions_without_a_plain_name_are_looked_up():
    cell = nn.LSTMCell(2, 2)
    trace = record(cell, (torch.ones(1, 2),))
    sources = [node_source(n, str) for n in trace.nodes if n.kind is NodeKind.CALL_FUNCTION]
    assert any("lstm_cell" in source for source in sources)
    assert replay(trace, cell, (torch.ones(1, 2),))[0].shape == (1, 2)
