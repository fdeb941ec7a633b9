"""Sharding rules on random calls and random graphs in fp64, on 2 and 4 ranks, against the whole computation.

Every strategy that a rule offers is run alone, on values cut as it says: summands are random, as rounding or a clamp would not be seen on
a value and zeros. Then graphs of all rules, with strategies chosen at random, are run through the rewrite and its collectives.
"""

import copy
import os
import random
import zlib

import pytest
import torch
from graph_cases import OTHERS
from sharding_cases import RULED, Draw
from tensor_ranks import run_ranks, tensor_groups

from smpc.codegen.rewrite.opened_attention import open_attention
from smpc.codegen.rewrite.tensor_parallel.choose_layouts import choose
from smpc.codegen.rewrite.tensor_parallel.layout_problem import Weights
from smpc.codegen.rewrite.tensor_parallel.layouts import REPLICATED, LayoutKind
from smpc.codegen.rewrite.tensor_parallel.rewrite import GROUP, on_parts, rewrite
from smpc.codegen.rewrite.tensor_parallel.rules import RULES, strategies
from smpc.codegen.rewrite.tensor_parallel.strategy import Facts, short_name
from smpc.executor.parameter_slices import whole_of
from smpc.tensor_parallel import place
from smpc.tracer.constants import Ref
from smpc.tracer.ir import NodeKind, TensorSpec
from smpc.tracer.record import record
from smpc.tracer.replay import evaluate, replay
from smpc.tracer.targets import TENSOR_OPS

DEVICE = torch.device("cpu")
TRIES = 40  # draws until a rule has offered something


TOLERANCES = {"float64": 1e-10, "float32": 1e-5}
COARSE = 0.05  # of the other floating-point types


def tolerance(specs):
    """By the coarsest type that takes part."""
    return max(
        TOLERANCES.get(spec.dtype, COARSE) for spec in specs if spec is not None and spec.torch_dtype.is_floating_point
    )


def assert_close(found, expected, where, off=1e-10):
    assert found.shape == expected.shape, (where, found.shape, expected.shape)
    assert found.dtype == expected.dtype, (where, found.dtype, expected.dtype)
    if not expected.is_floating_point():
        assert torch.equal(found, expected), where
        return
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(found, expected, rtol=0, atol=off * scale, msg=lambda m: f"{where}: {m}")


# -- one operation -------------------------------------------------------------------------------------------------------


def parts_of(value, layout, degree):
    """What the ranks have of a value."""
    if isinstance(value, (tuple, list)):
        return list(zip(*(parts_of(item, layout, degree) for item in value), strict=True))
    if layout.kind is LayoutKind.PARTIAL:
        return summands_of(value, degree)
    if layout.kind is not LayoutKind.SHARDED:
        return [value] * degree
    blocks = value.split(list(layout.blocks or (value.shape[layout.dim],)), layout.dim)
    return [
        torch.cat([block.chunk(degree, layout.dim)[rank] for block in blocks], layout.dim) for rank in range(degree)
    ]


def summands_of(value, degree):
    assert value.dtype is not torch.bool, "truth values have no sums"
    if value.is_floating_point():
        summands = [torch.randn_like(value) for _ in range(degree - 1)]
    else:
        summands = [torch.randint_like(value, -3, 3) for _ in range(degree - 1)]
    return [*summands, value - sum(summands)]


def gradients_of(gradient, layout, degree):
    """What the ranks have of a gradient: whole where values are summands, summands where they are broadcast."""
    if layout.kind is LayoutKind.PARTIAL:
        return [gradient] * degree
    return summands_of(gradient, degree) if layout.kind is LayoutKind.BROADCAST else parts_of(gradient, layout, degree)


def leaves_of(value):
    return list(value) if isinstance(value, (tuple, list)) else [value]


def as_leaf(value, requires_grad):
    if isinstance(value, (tuple, list)):
        return tuple(as_leaf(item, requires_grad and item.is_floating_point()) for item in value)
    return value.detach().clone().requires_grad_(requires_grad and value.is_floating_point())


def run(node, values, gradients):
    """The outputs of a node, and the gradients of its inputs; `gradients(outputs)` are those of its outputs."""
    used = {
        name: value * 1 if isinstance(value, torch.Tensor) and node.mutates else value for name, value in values.items()
    }
    outputs = leaves_of(evaluate(node, used, DEVICE))
    flowing = [(out, grad) for out, grad in zip(outputs, gradients(outputs), strict=True) if out.requires_grad]
    if flowing:
        torch.autograd.backward(*zip(*flowing, strict=True))
    found = {
        name: [
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for leaf in leaves_of(value)
            if isinstance(leaf, torch.Tensor)
        ]
        for name, value in values.items()
    }
    return [out.detach() for out in outputs], found


def made_up(parts, layout, degree, sums, off):
    """The whole value of which ranks have these parts; they agree where they are to."""
    if layout.kind is sums:
        return sum(parts)
    if layout.kind is LayoutKind.SHARDED:
        sizes = [size // degree for size in layout.blocks] or [parts[0].shape[layout.dim]]
        pieces = [part.split(sizes, layout.dim) for part in parts]
        return torch.cat([piece for block in zip(*pieces, strict=True) for piece in block], layout.dim)
    for part in parts[1:]:
        assert_close(part, parts[0], "ranks that are to agree", off)
    return parts[0]


def assert_holds(facts, node, strategy, values, where):
    """One strategy against the whole operation."""
    degree = facts.degree
    takes = {name: facts.requires_grad(name) for name in node.inputs}
    specs = [facts.spec(name) for name in (*node.inputs, node.name)]
    off = tolerance([TensorSpec((), "float64", ()), *specs])
    sent = []

    def gradient_of_outputs(outputs):
        sent.extend(torch.randn_like(out) if out.is_floating_point() else out for out in outputs)
        return sent

    expected, gradients = run(node, {n: as_leaf(values[n], takes[n]) for n in node.inputs}, gradient_of_outputs)
    given = {
        name: parts_of(values[name], layout, degree) for name, layout in zip(node.inputs, strategy.inputs, strict=True)
    }
    back = [
        gradients_of(grad, strategy.output, degree) if grad.is_floating_point() else [None] * degree for grad in sent
    ]
    local, groups = on_parts(facts, node, strategy, Ref(GROUP)), tensor_groups(degree)

    def work(rank):
        own = {name: as_leaf(parts[rank], takes[name]) for name, parts in given.items()}
        own[GROUP] = groups[rank]
        return run(local, own, lambda outputs: [parts[rank] for parts in back])

    talks = local.target.startswith(TENSOR_OPS)
    results = run_ranks(degree, work) if talks else [work(rank) for rank in range(degree)]
    for i, whole in enumerate(expected):
        assert_close(
            made_up([outputs[i] for outputs, _ in results], strategy.output, degree, LayoutKind.PARTIAL, off),
            whole,
            where,
            off,
        )
    for name, layout in zip(node.inputs, strategy.inputs, strict=True):
        for i, whole in enumerate(gradients[name] if takes[name] else ()):
            parts = [found[name][i] for _, found in results]
            found = made_up(parts, layout, degree, LayoutKind.BROADCAST, off)
            assert_close(found, whole, f"{where}, gradient of {name}", off)


def check_rule(key, seed, degree):
    """How many strategies of one drawn call have been checked beside the plain ones."""
    draw = Draw(random.Random(f"{key} {seed}"))
    if not draw.add(RULED[key]):
        return 0
    trace, values = record(draw.model(), ()), {}
    replay(trace, draw.model(), watch=lambda position, known, is_done: values.update(known))
    facts, count = Facts(trace, degree), 0
    for node in trace.nodes:
        if node.kind is not NodeKind.CALL_FUNCTION or key not in (short_name(node.target), node.target):
            continue
        for strategy in strategies(facts, node):
            where = f"{key}, seed {seed}, {degree} ranks: {[str(x) for x in strategy.inputs]} -> {strategy.output}"
            assert_holds(facts, node, strategy, values, where)
            count += strategy.divides_work or strategy.output.kind is LayoutKind.PARTIAL
    return count


def test_every_rule_has_a_case():
    assert sorted(RULED) == sorted(RULES)


@pytest.mark.matrix(40)
@pytest.mark.parametrize("key", RULED)
def test_strategies_of_a_rule(key):
    torch.manual_seed(0)
    found = 0
    for seed in range(TRIES):
        found += check_rule(key, seed, 2 if seed % 3 else 4)
        if found > 3 and seed >= 2:
            return
    assert found, f"no strategy of {key} has been drawn"


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("key", RULED)
def test_strategies_of_a_rule_for_long(key, degree):
    first = int(os.environ.get("SMPC_TEST_SEED", "1000"))
    print(f"seeds from {first}")
    for seed in range(first, first + 60):
        check_rule(key, seed, degree)


# -- graphs --------------------------------------------------------------------------------------------------------------


def drawn_graph(seed, length):
    draw = Draw(random.Random(f"graph {seed}"), reuse=0.75)
    cases = [*RULED.values(), *OTHERS, *OTHERS]
    while len(draw.calls) < length:
        draw.add(draw.pick(cases))
    return draw.model()


def at_random(seed, keep):
    """Whether a strategy may be used: some of them, by lot."""

    def allowed(node, strategy):
        if strategy.output.kind is LayoutKind.REPLICATED and all(
            layout.kind is LayoutKind.REPLICATED for layout in strategy.inputs
        ):
            return True
        return zlib.crc32(f"{seed} {node.name} {strategy}".encode()) % 100 < keep

    return allowed


def chosen_at_random(trace, seed, degree):
    """A choice that likes to divide work, of strategies that were left by lot."""
    rng = random.Random(seed)
    weights = Weights(
        state=rng.choice((0.0, 1.0, 1000.0)), vector_state=rng.choice((0.0, 100.0)), latency_bytes=rng.choice((1e-3, 1e3)),
        per_byte_moved=rng.choice((0.1, 1e3)),
    )  # fmt: skip
    return choose(trace, degree, at_random(seed, rng.choice((15, 30, 60, 100))), weights, share_blocks=False)


def whole_results(model):
    loss = model()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_graph(seed, length, degree, used):
    torch.manual_seed(0)
    model = drawn_graph(seed, length)
    trace = open_attention(record(model, ()))
    choice = chosen_at_random(trace, seed, degree)
    used.update(short_name(trace.node(name).target) for name, strategy in choice.by_node if strategy.divides_work)
    rewritten = rewrite(trace, choice)
    layouts = dict(rewritten.layouts)
    loss, gradients = whole_results(copy.deepcopy(model))
    models = [copy.deepcopy(model) for _ in range(degree)]
    groups = tensor_groups(degree)
    for own, group in zip(models, groups, strict=True):
        place(own, rewritten, group)

    def work(rank):
        own_loss = replay(rewritten.trace, models[rank])
        if own_loss.requires_grad:
            own_loss.backward()
        grads = {name: p.grad for name, p in models[rank].named_parameters() if p.grad is not None}
        return own_loss.detach(), {n: whole_of(g, layouts.get(n, REPLICATED), groups[rank]) for n, g in grads.items()}

    for found, own in run_ranks(degree, work):
        where = f"graph {seed} of {length} calls on {degree} ranks"
        assert_close(found, loss, f"{where}: the loss")
        for name, gradient in gradients.items():
            assert_close(own.get(name, torch.zeros_like(gradient)), gradient, f"{where}: the gradient of {name}")


@pytest.mark.long
@pytest.mark.parametrize("degree", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_graphs(degree):
    used = set()
    for seed in range(6):
        check_graph(seed, 25, degree, used)
    assert len(used) > 15, sorted(used)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("part", range(4))
def test_graphs_for_long(part, degree):
    first = int(os.environ.get("SMPC_TEST_SEED", "1000")) + 1000 * part
    print(f"seeds from {first}")
    for seed in range(first, first + 50):
        check_graph(seed, 40, degree, set())
