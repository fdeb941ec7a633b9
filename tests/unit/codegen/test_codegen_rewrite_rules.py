"""Every strategy of every rule, run on two pretended ranks, against the whole operation: values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smpc.codegen.rewrite.tensor_parallel.choose_layouts import choose
from smpc.codegen.rewrite.tensor_parallel.layouts import LayoutKind
from smpc.codegen.rewrite.tensor_parallel.rules import localised, strategies
from smpc.codegen.rewrite.tensor_parallel.strategy import Carried, Facts, carried, dimension_groups
from smpc.tracer.ir import NodeKind
from smpc.tracer.record import record
from smpc.tracer.replay import evaluate

DEGREE = 2
SHARES = (0.3, 0.7)  # how a sum is split into summands


class Operation(nn.Module):
    def __init__(self, function, shapes):
        super().__init__()
        self.function = function
        self.values = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self):
        return self.function(*self.values)


OPERATIONS = {
    "add": (torch.add, [(4, 6), (6,)], {"S(0)", "S(1)", "P"}),
    "scale": (lambda x: x * 3.0, [(4, 6)], {"S(0)", "S(1)", "P"}),
    "gelu": (F.gelu, [(4, 6)], {"S(0)", "S(1)"}),
    "linear": (F.linear, [(2, 4, 6), (8, 6), (8,)], {"S(0)", "S(1)", "S(2)", "P"}),
    "addmm": (torch.addmm, [(8,), (4, 6), (6, 8)], {"S(0)", "S(1)", "P"}),
    "matmul": (torch.matmul, [(2, 4, 6), (2, 6, 8)], {"S(0)", "S(1)", "S(2)", "P"}),
    "einsum": (lambda a, b: torch.einsum("bsh,hd->bsd", a, b), [(2, 4, 6), (6, 8)], {"S(0)", "S(1)", "S(2)", "P"}),
    "conv2d": (F.conv2d, [(2, 4, 6, 6), (8, 4, 3, 3), (8,)], {"S(0)", "S(1)", "P"}),
    "conv2d in groups": (
        lambda x, w, b: F.conv2d(x, w, b, groups=2), [(2, 4, 6, 6), (8, 2, 3, 3), (8,)], {"S(0)", "S(1)"},
    ),
    "conv2d in 3 groups": (
        lambda x, w, b: F.conv2d(x, w, b, groups=3), [(2, 6, 6, 6), (12, 2, 3, 3), (12,)], {"S(0)", "S(1|4,4,4)", "P"},
    ),
    "conv_transpose2d in 3 groups": (
        lambda x, w: F.conv_transpose2d(x, w, groups=3), [(2, 12, 6, 6), (12, 2, 3, 3)], {"S(0)", "S(1|2,2,2)", "P"},
    ),
    "conv2d longer than its input, a group for each rank": (
        lambda x, w: F.conv2d(x, w, padding=(4, 0), groups=2), [(2, 2, 4, 3), (2, 1, 9, 1)], {"S(0)"},
    ),
    "conv2d longer than its input, several groups for each rank": (
        lambda x, w: F.conv2d(x, w, padding=(4, 0), groups=4), [(2, 4, 4, 3), (4, 1, 9, 1)], {"S(0)", "S(1)"},
    ),
    "conv1d in 3 groups of one filter": (
        lambda x, w: F.conv1d(x, w, groups=3), [(2, 6, 6), (3, 2, 3)], {"S(0)", "P"},
    ),
    "interpolate one size": (
        lambda x: F.interpolate(x, size=(3, 8), mode="bicubic", antialias=True), [(2, 4, 6, 8)], {"S(0)", "S(1)", "S(3)"},
    ),
    "interpolate a factor": (lambda x: F.interpolate(x, scale_factor=(0.5, 1.0)), [(2, 4, 6, 8)], {"S(0)", "S(1)"}),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), [(2, 4, 6), (6,), (6,)], {"S(0)", "S(1)"}),
    "softmax": (lambda x: x.softmax(-1), [(2, 4, 6)], {"S(0)", "S(1)"}),
    "attention": (F.scaled_dot_product_attention, [(2, 4, 6, 8)] * 3, {"S(0)", "S(1)", "S(2)"}),
    "attention of groups": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        [(2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8)], {"S(0)", "S(1)"},
    ),
    "attention of one group": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        [(2, 4, 6, 8), (2, 1, 6, 8), (2, 1, 6, 8)], {"S(0)", "S(1)"},
    ),
    "sum": (lambda x: x.sum(1), [(2, 4, 6)], {"S(0)", "S(1)", "P"}),
    "mean": (lambda x: x.mean(-1, keepdim=True), [(2, 4, 6)], {"S(0)", "S(1)"}),
    "heads": (lambda x: x.view(2, 3, -1, 4), [(2, 3, 8)], {"S(0)", "S(2)", "P"}),
    "merge": (lambda x: x.reshape(8, 6), [(2, 4, 6)], {"S(0)", "S(1)", "P"}),
    "merge inner": (lambda x: x.reshape(12, 6), [(3, 4, 6)], {"S(0|4,4,4)", "S(1)", "P"}),
    "fused": (lambda x: x.view(2, 3, 4, 2), [(2, 24)], {"S(0)", "S(2)", "P"}),
    "transpose": (lambda x: x.transpose(1, -1), [(2, 4, 6)], {"S(0)", "S(1)", "S(2)", "P"}),
    "permute": (lambda x: x.permute(2, 0, 1), [(2, 4, 6)], {"S(0)", "S(1)", "S(2)", "P"}),
    "T": (lambda x: x.T, [(4, 6)], {"S(0)", "S(1)", "P"}),
    "unsqueeze": (lambda x: x.unsqueeze(1), [(2, 4)], {"S(0)", "S(2)", "P"}),
    "squeeze": (lambda x: x.squeeze(1), [(2, 1, 4)], {"S(0)", "S(1)", "P"}),
    "expand": (lambda x: x.expand(2, 4, 6), [(2, 1, 6)], {"S(0)", "S(1)", "S(2)", "P"}),
    "repeat_interleave": (lambda x: x.repeat_interleave(3, 1), [(2, 4)], {"S(0)", "S(1)", "P"}),
    "slice": (lambda x: x[..., None, 1:], [(2, 4, 6)], {"S(0)", "S(1)", "P"}),
    "cat": (lambda a, b: torch.cat([a, b], 1), [(2, 4), (2, 6)], {"S(0)", "S(1|4,6)", "P"}),
    "stack": (lambda a, b: torch.stack([a, b], 1), [(2, 4), (2, 4)], {"S(0)", "S(2)", "P"}),
    "split": (lambda x: x.split(4, -1), [(2, 12)], {"S(0)", "S(1)", "P"}),
    "split uneven": (lambda x: x.split([4, 2, 2], -1), [(2, 8)], {"S(0)", "S(1)", "P"}),
    "chunk": (lambda x: x.chunk(3, -1), [(2, 12)], {"S(0)", "S(1)", "P"}),
    "unbind": (lambda x: x.unbind(1), [(2, 3, 4)], {"S(0)", "S(1)", "P"}),
    "unknown": (lambda x: torch.fft.fft(x).real, [(4, 6)], set()),
}  # fmt: skip
# function, shapes of what it takes, layouts of what it gives besides R and B


def on_ranks(tensor, layout):
    """What the ranks have of a tensor."""
    if layout.kind is LayoutKind.PARTIAL:
        return [tensor * share for share in SHARES]
    if layout.kind is not LayoutKind.SHARDED:
        return [tensor] * DEGREE
    sizes = layout.blocks or (tensor.shape[layout.dim],)
    blocks = tensor.split(list(sizes), layout.dim)
    return [
        torch.cat([block.chunk(DEGREE, layout.dim)[rank] for block in blocks], layout.dim) for rank in range(DEGREE)
    ]


def gradients_on_ranks(gradient, layout):
    """What the ranks have of a gradient: whole where values are summands, summands where they are broadcast."""
    if layout.kind is LayoutKind.PARTIAL:
        return [gradient] * DEGREE
    if layout.kind is LayoutKind.BROADCAST:
        return [gradient * share for share in SHARES]
    return on_ranks(gradient, layout)


def assert_makes_up(parts, whole, layout, sums):
    """Whether the ranks' parts are what the layout says; `sums`: the kind of layout whose parts are summands."""
    if layout.kind is sums:
        torch.testing.assert_close(sum(parts), whole)
        return
    for part, expected in zip(
        parts, on_ranks(whole, layout) if layout.kind is LayoutKind.SHARDED else [whole] * DEGREE, strict=True
    ):
        torch.testing.assert_close(part, expected)


def tensors(output):
    return list(output) if isinstance(output, (tuple, list)) else [output]


def assert_strategy_holds(facts, node, strategy, values):
    device = torch.device("cpu")
    whole = {name: value.detach().clone().requires_grad_() for name, value in values.items()}
    expected = tensors(evaluate(node, whole, device))
    gradients = [torch.randn_like(part) for part in expected]
    torch.autograd.backward(expected, gradients)
    given = {
        name: on_ranks(values[name].detach(), layout) for name, layout in zip(node.inputs, strategy.inputs, strict=True)
    }
    sent = [gradients_on_ranks(gradient, strategy.output) for gradient in gradients]
    found, returned = [], []
    for rank in range(DEGREE):
        own = {name: parts[rank].clone().requires_grad_() for name, parts in given.items()}
        outputs = tensors(evaluate(localised(facts, node, strategy), own, device))
        torch.autograd.backward(outputs, [parts[rank] for parts in sent])
        found.append(outputs)
        returned.append(own)
    for parts, value in zip(zip(*found, strict=True), expected, strict=True):
        assert_makes_up([part.detach() for part in parts], value.detach(), strategy.output, LayoutKind.PARTIAL)
    for name, layout in zip(node.inputs, strategy.inputs, strict=True):
        assert_makes_up([own[name].grad for own in returned], whole[name].grad, layout, LayoutKind.BROADCAST)


@pytest.mark.parametrize("name", OPERATIONS)
def test_strategies_give_values_and_gradients_of_the_whole(name):
    function, shapes, layouts = OPERATIONS[name]
    torch.manual_seed(0)
    trace = record(Operation(function, shapes))
    facts = Facts(trace, DEGREE)
    by_name = {node.name: node for node in trace.nodes}
    node = next(n for n in trace.nodes if n.kind is NodeKind.CALL_FUNCTION)
    values = {name: torch.randn(by_name[name].spec.shape) for name in node.inputs}
    found = strategies(facts, node)
    assert {str(strategy.output) for strategy in found} == layouts | {"R", "B"}
    for strategy in found:
        assert_strategy_holds(facts, node, strategy, values)


def test_what_is_written_in_place_stays_whole():
    trace = record(Operation(lambda x: (x * 1.0).mul_(2.0), [(4, 6)]))
    node = next(n for n in trace.nodes if n.mutates)
    assert [str(s.output) for s in strategies(Facts(trace, DEGREE), node)] == ["R"]


def test_sizes_that_do_not_divide_are_not_sliced():
    trace = record(Operation(F.linear, [(3, 5), (7, 5), (7,)]))
    node = trace.nodes[-1]
    assert {str(s.output) for s in strategies(Facts(trace, DEGREE), node)} == {"R", "B"}


@pytest.mark.parametrize(
    ("source", "target", "groups"),
    [
        ((2, 8, 32), (16, 4, 8), (((0, 1), (0,)), ((2,), (1, 2)))),
        ((2, 1, 6), (2, 6, 1), (((0,), (0,)), ((2,), (1,)))),
        ((4, 6), (6, 4), (((0, 1), (0, 1)),)),
        ((0, 4), (4, 0), ()),
    ],
)
def test_dimension_groups(source, target, groups):
    assert dimension_groups(source, target) == groups


def test_a_fused_projection_is_sliced_in_blocks():
    assert list(carried((96,), (3, 4, 8), 2)) == [Carried(0, 1, source_blocks=(32, 32, 32))]


class Selecting(nn.Module):
    """The loss of the tokens that a mask selects: how many they are depends on values."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 8)

    def forward(self, hidden, mask, labels):
        chosen = mask != 0
        return F.cross_entropy(self.head(hidden)[chosen].view(-1, 8), labels[chosen].view(-1))


def test_what_has_a_shape_that_depends_on_values_is_computed_whole():
    """The rule of cross entropy asked for the shape, and the search ended with an AssertionError (Granite Speech)."""
    batch = (torch.randn(2, 4, 6), torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1]]), torch.ones(2, 4, dtype=torch.int64))
    trace = record(Selecting(), batch)
    facts = Facts(trace, DEGREE)
    (loss,) = [node for node in trace.nodes if node.target.endswith("cross_entropy")]
    assert facts.spec(loss.inputs[0]) is None
    assert not any(strategy.divides_work for strategy in strategies(facts, loss))
    assert choose(trace, DEGREE).by_node
