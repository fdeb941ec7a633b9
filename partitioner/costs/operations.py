"""Which kernel an operation is for the time model: a matrix product of some shape, a fused attention, or one that moves bytes.

    product_of(node)     (batch, rows, columns, depth) of a product; of a convolution, that of the product which it is at heart
    name_of(node)        what kind of operation it is, for times that were measured
    is_attention(node)   scaled_dot_product_attention and its relatives, one kernel from queries to outputs

Shapes are read off the output and the FLOPs, 2 * batch * rows * columns * depth: `linear` on [8, 512, 64] with 256 outputs is
(1, 4096, 256, 64). Products of activations, with a batch in front, are `bmm`, `baddbmm`, and `matmul` of four dimensions or more.
"""

from __future__ import annotations

import math

from smpc.tracer.ir import Node

_ALIASES = {
    "linear": ("linear", "addmm", "mm"),
    "bmm": ("bmm", "baddbmm", "matmul", "einsum"),
    "conv": ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    "div": ("div", "truediv", "true_divide"),
    "sub": ("sub", "subtract"),
    "mul": ("mul", "multiply"),
    "pool": ("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool2d", "max_pool2d_with_indices", "boolean_dispatch"),
}
_NAMES = {alias: name for name, aliases in _ALIASES.items() for alias in aliases}
_ARITHMETIC = ("add", "sub", "mul", "truediv", "div", "pow", "matmul")

Product = tuple[int, int, int, int]
_BATCHED = ("bmm", "baddbmm")
_MAYBE_BATCHED = ("matmul", "__matmul__", "__rmatmul__", "einsum")
_DROPOUT, _IS_CAUSAL = 4, 5  # their places among the arguments of scaled_dot_product_attention


def product_of(node: Node) -> Product | None:
    """The shape of the product; None for an operation without FLOPs, or with several outputs."""
    spec = node.spec
    if spec is None or not node.flops or not spec.num_elements or not spec.shape:
        return None
    name, shape = node.target.rpartition(".")[2], spec.shape
    depth = max(1, round(node.flops / (2 * spec.num_elements)))
    if name.startswith("conv") and len(shape) > 2:
        columns = shape[1]
        return 1, spec.num_elements // columns, columns, depth
    batched = len(shape) > 2 and (name in _BATCHED or (name in _MAYBE_BATCHED and len(shape) > 3))
    batch = math.prod(shape[:-2]) if batched else 1
    return batch, max(1, spec.num_elements // batch // shape[-1]), shape[-1], depth


def name_of(node: Node) -> str:
    """What kind of operation it is, whichever way it was called: `torch.nn.functional.relu_` and `torch.Tensor.relu` are "relu".

    Products of matrices are "linear", those of batches of them "bmm", convolutions "conv", fused attentions "attention",
    "attention_causal" or "attention_dropout", for which some devices have other kernels.
    """
    name = node.target.rpartition(".")[2].strip("_")
    if name[:1] in ("r", "i") and name[1:] in _ARITHMETIC:
        name = name[1:]
    if name == "matmul" and node.flops:
        product = product_of(node)
        return "linear" if product is not None and product[0] == 1 else "bmm"
    if is_attention(node):
        dropout = _argument(node, _DROPOUT, "dropout_p")
        if isinstance(dropout, (int, float)) and dropout:
            return "attention_dropout"
        return "attention_causal" if _is_causal(node) else "attention"
    return _NAMES.get(name, name)


def _argument(node: Node, place: int, name: str) -> object:
    return node.args[place] if len(node.args) > place else dict(node.kwargs).get(name)


def is_attention(node: Node) -> bool:
    """Whether it is a fused attention."""
    return "attention" in node.target.rpartition(".")[2] and node.flops > 0


def attention_flops(node: Node) -> float:
    """FLOPs that a fused attention has to do: half of them where every query sees the keys before it alone."""
    return node.flops / 2 if _is_causal(node) else float(node.flops)


def _is_causal(node: Node) -> bool:
    """torch's attention takes `is_causal`, smpc's own `causal`, by name alone."""
    return _argument(node, _IS_CAUSAL, "is_causal") is True or dict(node.kwargs).get("causal") is True
