"""The two parts of a stage's backward: for its inputs (I), and for its parameters (W), which a schedule may defer.

What can be deferred are the calls of `DEFERRABLE` that take a parameter and lie in no activation checkpoint (see
`smpc.executor.deferral`). Of such a call's backward, W has one matrix product for each parameter of two or more dimensions,
I one for each other input that needs a gradient; a bias counts for nothing beside them. Of a module that is called whole,
with parameters, W has half. All else is part of I.

Example: linear(x, weight, bias) in the middle of a model has W = I; the first one of a model, whose input needs no
gradient, is all W, and so is an embedding. matmul(query, key) is all I. A block of F = 1 with 0.6 in linear layers and
0.4 in products of activations has a backward of I = 1.4 and W = 0.6.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from smpc.partitioner.problem import FloatArray
from smpc.tracer.ir import Node, NodeKind, Region, Trace

_FUNCTIONAL = (
    "linear",
    "embedding",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
)
_PRODUCTS = ("addmm", "mm", "bmm", "matmul")
DEFERRABLE = frozenset(
    (
        *(f"torch.nn.functional.{name}" for name in _FUNCTIONAL),
        *(
            f"torch.{name}" for name in (*_PRODUCTS, "dsmm")
        ),  # torch.dsmm is torch.mm, and comes first where traces look
        *(f"torch.Tensor.{name}" for name in (*_PRODUCTS, "__matmul__", "__rmatmul__")),
    )
)


def weight_time(trace: Trace, positions: Sequence[int], backward: FloatArray, regions: Sequence[Region]) -> float:
    """Seconds of W of a stage's nodes, which may lie in its checkpointed `regions`; `backward` is by node."""
    free = [i for i in positions if not any(region.first <= i < region.last for region in regions)]
    return float(np.sum([_share(trace, trace.nodes[i]) * backward[i] for i in free]))


def _share(trace: Trace, node: Node) -> float:
    """The part of a node's backward that W has."""
    if node.kind is NodeKind.CALL_MODULE:
        return 0.5 if node.saved else 0.0
    if node.kind is not NodeKind.CALL_FUNCTION or node.target not in DEFERRABLE:
        return 0.0
    weights = others = 0
    for name in node.inputs:
        value = trace.nodes[trace.position(name)]
        if value.spec is None or not value.spec.requires_grad:
            continue
        if value.kind is not NodeKind.GET_ATTR:
            others += 1
        elif len(value.spec.shape) > 1:
            weights += 1
    return weights / (weights + others) if weights else 0.0
