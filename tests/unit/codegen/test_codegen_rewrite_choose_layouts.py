"""The choice of layouts: elimination, branches, an integer program and all choices there are, against each other."""

import itertools
import math

import pytest
import torch
from layout_program import solve_program
from torch import nn

from smpc.codegen.rewrite.tensor_parallel import elimination
from smpc.codegen.rewrite.tensor_parallel.choose_layouts import choose
from smpc.codegen.rewrite.tensor_parallel.elimination import solve
from smpc.codegen.rewrite.tensor_parallel.layout_problem import Weights, collect, representatives
from smpc.codegen.rewrite.tensor_parallel.layouts import REPLICATED, LayoutKind
from smpc.codegen.rewrite.tensor_parallel.rewrite import rewrite
from smpc.errors import CodegenError
from smpc.tracer.record import record


class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Many(nn.Module):
    """One value with many users."""

    def __init__(self, hidden, users):
        super().__init__()
        self.first = nn.Linear(hidden, hidden)
        self.others = nn.ModuleList([nn.Linear(hidden, hidden) for _ in range(users)])

    def forward(self, x):
        x = self.first(x)
        return sum(other(x) for other in self.others)


def problem_of(model, x, degree=2, weights=None, share_blocks=True):
    return collect(record(model, (x,)), degree, lambda node, strategy: True, weights or Weights(), share_blocks)


def total_cost(problem, picked):
    """From the definition."""
    total = sum(problem.option_cost(part, problem.options[part][k]) for part, k in picked.items())
    for producer, users in problem.users().items():
        needed = {problem.options[user][picked[user]].inputs[index] for user, index in users}
        needed |= {REPLICATED} if producer in problem.returned else set()
        source = problem.options[producer][picked[producer]].output
        costs = [problem.conversion_cost(producer, source, target) for target in needed]
        total += math.inf if None in costs else sum(costs)
    return total


def best_of_all(problem):
    parts = list(problem.options)
    choices = itertools.product(*(range(len(problem.options[part])) for part in parts))
    return min(total_cost(problem, dict(zip(parts, choice, strict=True))) for choice in choices)


WEIGHTS = [Weights(), Weights(state=0.0, latency_bytes=1.0), Weights(state=1.0, latency_bytes=64.0)]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_elimination_finds_the_best_of_all_choices(weights):
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    problem = problem_of(model, torch.randn(4, 8), weights=weights)
    best = pytest.approx(best_of_all(problem))
    picked, proven = solve(problem)
    assert proven
    assert total_cost(problem, picked) == best


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(
    "model", [nn.Sequential(Block(8), Block(8)), Many(8, 3), Many(8, 12)], ids=["blocks", "few", "many"]
)
def test_elimination_and_integer_program_agree(model, weights):
    problem = problem_of(model, torch.randn(2, 4, 8), weights=weights)
    best = pytest.approx(total_cost(problem, solve_program(problem)), rel=1e-6)
    picked, proven = solve(problem)
    assert proven
    assert total_cost(problem, picked) == best


class Recurrence(nn.Module):
    """States that are read several times: tables for them have an axis for each user."""

    def __init__(self, hidden, steps):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(hidden, hidden) for _ in range(steps)])

    def forward(self, x):
        first = x
        for layer in self.layers:
            gate, value, kept = layer(x).chunk(3, -1)
            x = torch.cat((gate.sigmoid() * value, kept.tanh(), (x * first).cumsum(-1)[..., :4]), -1)
        return x.exp().cumsum(1) + first


@pytest.mark.parametrize("largest", [1_000_000, 300_000, 1_000, 30, 4])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_branches_where_tables_would_be_too_large(weights, largest, monkeypatch):
    """Mamba's recurrences needed tables of 18 million entries, and those of blocks that run again and again of more than there can be."""
    problem = problem_of(Recurrence(12, 3), torch.randn(2, 4, 12), weights=weights, share_blocks=False)
    best = total_cost(problem, solve_program(problem))
    monkeypatch.setattr(elimination, "_STAGES", [stage for stage in (4, 30, 300, 1_000, 300_000) if stage <= largest])
    picked, proven = solve(problem)
    assert proven
    assert total_cost(problem, picked) == pytest.approx(best, rel=1e-6)


def test_a_choice_that_is_not_proven_says_so(monkeypatch):
    problem = problem_of(Recurrence(12, 3), torch.randn(2, 4, 12), share_blocks=False)
    monkeypatch.setattr(elimination, "_STAGES", (4,))
    monkeypatch.setattr(elimination, "_LARGEST_OF_BOUND", 4)
    monkeypatch.setattr(elimination, "_MOST_BRANCHES", 1)
    picked, proven = solve(problem)
    assert math.isfinite(total_cost(problem, picked))
    assert not proven


def test_equal_blocks_are_decided_once():
    """The first differs: no gradient goes back to the model's input."""
    model = nn.Sequential(*(Block(64) for _ in range(12)))
    trace = record(model, (torch.randn(2, 4, 64),))
    parts = representatives(trace)
    first, second = (next(call for call in trace.calls if call.fqn == name) for name in ("1", "2"))
    assert parts[second.first : second.last] == tuple(range(first.first, first.last))
    choice = choose(trace, 2)
    layouts = {name: layout for name, layout in choice.by_parameter if name.endswith("up.weight")}
    assert len(layouts) == 12
    assert len({layout for name, layout in layouts.items() if name != "0.up.weight"}) == 1
    assert layouts["3.up.weight"].kind is LayoutKind.SHARDED


def test_equal_layers_of_one_network_may_differ():
    """Two linear layers of one size: the first by columns, the second by rows."""
    choice = choose(record(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), (torch.randn(4, 64),)), 2)
    layouts = dict(choice.by_parameter)
    assert {layouts["0.weight"].dim, layouts["1.weight"].dim} == {0, 1}


def test_long_sequences_get_sequence_sharded_norms():
    """Where what is repeated costs more than one more message: reduce-scatter and all-gather in place of an all-reduce."""
    with torch.device("meta"):
        model = nn.Sequential(*(Block(1024) for _ in range(4)))
        x = torch.randn(1, 8192, 1024)
    trace = record(model, (x,))
    chosen = rewrite(trace, choose(trace, 4))
    functions = [item.function for item in chosen.collectives if item.module.startswith("1") and item.forward_bytes]
    assert functions == ["gather_in", "reduce_scatter"]
    hidden_state = 8192 * 1024 * 4
    sent = sum(item.forward_bytes for item in chosen.collectives if item.module.startswith("1"))
    assert sent == 2 * hidden_state * 3 // 4


def test_what_does_not_divide_stays_whole():
    choice = choose(record(nn.Linear(5, 7), (torch.randn(3, 5),)), 2)
    assert all(layout == REPLICATED for _, layout in choice.by_parameter)


def test_the_same_model_gives_the_same_choice():
    model = nn.Sequential(Block(8), Block(8))
    choices = [choose(record(model, (torch.ones(2, 4, 8),)), 2) for _ in range(2)]
    assert choices[0] == choices[1]


def test_nothing_allowed_is_an_error():
    trace = record(nn.Linear(8, 8), (torch.randn(4, 8),))
    with pytest.raises(CodegenError, match="relax the"):
        choose(trace, 2, lambda node, strategy: False)


class Pieces(nn.Module):
    """A value that a hundred operations use, none of which can be shared."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 7)

    def forward(self, x):
        x = self.first(x)
        return sum((x * 0.5 ** (i % 3)).cumsum(0) * (i + 1) for i in range(100)) / 100


def test_a_value_with_more_users_than_arrays_have_axes():
    problem = problem_of(Pieces(), torch.randn(3, 7), 2)
    picked, _ = solve(problem)
    assert total_cost(problem, picked) == pytest.approx(total_cost(problem, solve_program(problem)), rel=1e-6)
    allowed_whole = collect(problem.trace, 2, lambda node, strategy: strategy.output == REPLICATED, Weights(), False)
    assert set(solve(allowed_whole)[0].values()) == {0}


class Scan(nn.Module):
    """A recurrence over positions, unrolled; `scales` are numbers that differ between iterations or do not."""

    def __init__(self, scales):
        super().__init__()
        self.decay, self.update, self.out = (nn.Linear(8, 8) for _ in range(3))
        self.scales = scales

    def forward(self, x):
        decay, update = self.decay(x).sigmoid(), self.update(x)
        state, states = torch.zeros(x.shape[0], 8), []
        for i, scale in enumerate(self.scales):
            state = decay[:, i] * state + update[:, i] * scale
            states.append(state)
        return self.out(torch.stack(states, 1))


class Writing(Scan):
    """The same, whose states are written into one tensor: RWKV's attention (10 s of search for 12 positions)."""

    def forward(self, x):
        decay, update = self.decay(x).sigmoid(), self.update(x)
        state, states = torch.zeros(x.shape[0], 8), torch.zeros_like(x)
        for i, scale in enumerate(self.scales):
            state = decay[:, i] * state + update[:, i] * scale
            states[:, i] = state
        return self.out(states)


def cost_of_choice(choice, problem):
    """By the definition, of a problem in which nothing is shared."""
    strategies, layouts = dict(choice.by_node), dict(choice.by_parameter)
    picked = {}
    for part, options in problem.options.items():
        node = problem.trace.nodes[part]
        is_chosen = [
            option == strategies[node.name] if node.name in strategies else option.output == layouts[node.target]
            for option in options
        ]
        picked[part] = is_chosen.index(True)
    return total_cost(problem, picked)


@pytest.mark.parametrize("make", [Scan, Writing])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_equal_iterations_are_decided_once_and_as_well(make, weights):
    trace = record(make([0.5] * 5), (torch.randn(4, 5, 8),))
    shared, whole = (collect(trace, 2, lambda node, strategy: True, weights, share) for share in (True, False))
    assert len(shared.options) < len(whole.options)
    choice = choose(trace, 2, weights=weights)
    assert choice.proven
    assert cost_of_choice(choice, whole) == pytest.approx(total_cost(whole, solve(whole)[0]), rel=1e-6)


@pytest.mark.parametrize("make", [Scan, Writing])
def test_a_longer_loop_is_no_larger_problem(make):
    sizes = [len(problem_of(make([0.5] * n), torch.randn(4, n, 8)).options) for n in (5, 40)]
    assert sizes[0] == sizes[1]


def test_iterations_that_differ_are_decided_apart():
    problem = problem_of(Scan([0.5, 1.5, 2.5, 3.5, 4.5]), torch.randn(4, 5, 8))
    assert len(problem.options) > len(problem_of(Scan([0.5] * 5), torch.randn(4, 5, 8)).options)
