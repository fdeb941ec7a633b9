"""Chooses a strategy for every operation: the cheapest of all that fit together.

Equal blocks get the same strategies, so a model of a hundred layers is as large a problem as one of one. It is solved exactly, by
elimination, with branches where its tables would be too large (`smpc.codegen.rewrite.tensor_parallel.elimination`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from smpc.codegen.rewrite.tensor_parallel.elimination import solve
from smpc.codegen.rewrite.tensor_parallel.layout_problem import LayoutProblem, Restriction, Weights, collect
from smpc.codegen.rewrite.tensor_parallel.layouts import Layout
from smpc.codegen.rewrite.tensor_parallel.strategy import Facts, Strategy
from smpc.errors import CodegenError
from smpc.tracer.ir import NodeKind, Trace


@dataclass(frozen=True, slots=True)
class ShardingChoice:
    """A strategy for each node that computes, and a layout for each parameter; `proven`: no better one exists."""

    degree: int
    by_node: tuple[tuple[str, Strategy], ...]
    by_parameter: tuple[tuple[str, Layout], ...]
    proven: bool = True


def choose(
    trace: Trace,
    degree: int,
    allowed: Restriction = lambda node, strategy: True,
    weights: Weights | None = None,
    share_blocks: bool = True,
    facts: Facts | None = None,
) -> ShardingChoice:
    """The best strategies for `degree` ranks among those that are `allowed`; equal blocks get the same, with `share_blocks`.

    `facts`: what rules know of the trace, if that is more than for tensor parallelism.
    Raises CodegenError if nothing that is allowed fits together.
    """
    problem = collect(trace, degree, allowed, weights or Weights(), share_blocks, facts)
    picked, proven = solve(problem)
    if not picked and problem.options:
        raise CodegenError(
            f"expected layouts that fit together for {degree} ranks, found none; relax the explicit plan"
        )
    return _decode_searched(problem, picked, degree, proven)


def _decode_searched(problem: LayoutProblem, picked: Mapping[int, int], degree: int, proven: bool) -> ShardingChoice:
    by_node, by_parameter = [], []
    for position, node in enumerate(problem.trace.nodes):
        part = problem.part[position]
        if part not in picked or node.name in problem.facts.constants:
            continue
        strategy = problem.options[part][picked[part]]
        if node.kind is NodeKind.GET_ATTR:
            by_parameter.append((node.target, strategy.output))
        else:
            by_node.append((node.name, _searched_strategy_renamed(problem, position, strategy)))
            by_parameter += by_node[-1][1].state
    return ShardingChoice(degree, tuple(by_node), tuple(by_parameter), proven)


def _searched_strategy_renamed(problem: LayoutProblem, position: int, strategy: Strategy) -> Strategy:
    """The representative's strategy for another node: with that one's parameters."""
    node, first = problem.trace.nodes[position], problem.trace.nodes[problem.part[position]]
    state = tuple((node.target + name.removeprefix(first.target), layout) for name, layout in strategy.state)
    return dataclasses.replace(strategy, state=state)
