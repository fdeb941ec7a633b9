"""What a rank runs in place of an operation: the same with the sizes of its parts, or one that talks to the other ranks.

view(x, [2, 8, 32])     on S(2), of two ranks       view(x, [2, 8, 16])
embedding(ids, table)   on a table split by rows    tensor_ops.embedding(ids, table, padding, group): zeros for rows that others have
cross_entropy(x, y)     on split classes            tensor_ops.cross_entropy(x, y, group)
conv2d(x, w, groups=8)  on split channels, 2 ranks  conv2d(x, w, groups=4)
experts(x, i, weights)  on slices of the sequence   experts(x, i, weights, num_sequence_slices=2): a module called whole is told
                        on slices of the experts    tensor_ops.on_summands(experts, ("bias",), group, x, i, weights): a bias added once
                        with some of the experts    by_expert(experts, ("num_experts",), group, x, i, weights): these alone serve tokens
block(x)                with some of the experts    in_segments(block, (("up", ("num_experts",)),), group, x): of modules inside
"""

from __future__ import annotations

import dataclasses

from smpc.codegen.rewrite.tensor_parallel.layouts import PARTIAL, Kind, Layout
from smpc.codegen.rewrite.tensor_parallel.rules import localised
from smpc.codegen.rewrite.tensor_parallel.strategy import Facts, Strategy, argument, short_name
from smpc.tracer.constants import Ref
from smpc.tracer.ir import Node, NodeKind
from smpc.tracer.targets import BY_EXPERT, IN_SEGMENTS, ON_SUMMANDS, TENSOR_OPS


def on_parts(facts: Facts, node: Node, strategy: Strategy, group: Ref) -> Node:
    """The node as a rank runs it by a strategy, with the names of its inputs as they are; `group` has the rank's TensorGroup."""
    if strategy.way and node.kind is NodeKind.CALL_MODULE:
        return dataclasses.replace(node, kwargs=(*node.kwargs, (strategy.way, facts.degree)))
    if strategy.experts:
        has_summands = strategy.output == PARTIAL
        caller, names = (BY_EXPERT, strategy.experts[0][1]) if has_summands else (IN_SEGMENTS, strategy.experts)
        return dataclasses.replace(node, kwargs=((caller, (names, group)), *node.kwargs))
    summands = tuple(name.removeprefix(f"{node.target}.") for name, layout in strategy.state if layout == PARTIAL)
    if summands:
        return dataclasses.replace(node, kwargs=((ON_SUMMANDS, (summands, group)), *node.kwargs))
    if strategy.way:
        cut = next(layout for layout in strategy.inputs if layout.kind is Kind.SHARDED)
        args = (group, (cut.dim, cut.blocks, cut.mirrored), *node.args)
        return dataclasses.replace(node, target=f"{TENSOR_OPS}.{strategy.way}", args=args)
    if short_name(node.target) == "cross_entropy" and strategy.sent:
        return _loss_on_parts(node, group)
    if short_name(node.target) == "embedding" and strategy.inputs[1:] == (Layout.sharded(0),):
        args = (*node.args[:2], argument(node, 2, "padding_idx"), group)
        return dataclasses.replace(node, target=f"{TENSOR_OPS}.embedding", args=args, kwargs=())
    return localised(facts, node, strategy)


def _loss_on_parts(node: Node, group: Ref) -> Node:
    options = ((4, "ignore_index", -100), (6, "reduction", "mean"), (7, "label_smoothing", 0.0))
    given = [(name, argument(node, place, name, default), default) for place, name, default in options]
    kwargs = tuple((name, value) for name, value, default in given if value != default)
    args = (argument(node, 0, "input"), argument(node, 1, "target"), group)
    return dataclasses.replace(node, target=f"{TENSOR_OPS}.cross_entropy", args=args, kwargs=kwargs)
