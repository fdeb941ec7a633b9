"""Which kernel an operation is for the time model: a matrix product of some shape, a fused attention, or one that moves bytes.

    product_of(node)     (batch, rows, columns, depth) of a product; for a convolution, of the product that it amounts to
    name_of(node)        what kind of operation it is, for times that were measured
    broader_name(name)   the name of the broader kind that a kind belongs to, for kinds that were not measured
    measured_flops(node) FLOPs by which products that were measured are compared
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
    "chunk": ("chunk", "split", "unsafe_chunk", "unsafe_split"),
    "pool": ("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool2d", "max_pool2d_with_indices", "boolean_dispatch"),
}
_NAMES = {alias: name for name, aliases in _ALIASES.items() for alias in aliases}
_BROADCAST, _GROUPED, _POINTWISE, _PAIR = "_broadcast", "_grouped", "_pointwise", 2
_ARITHMETIC = ("add", "sub", "mul", "truediv", "div", "pow", "matmul")

Product = tuple[int, int, int, int]
_BATCHED = ("bmm", "baddbmm")
_MAYBE_BATCHED = ("matmul", "__matmul__", "__rmatmul__", "einsum")
ATTENTION_BACKWARD = 2.5  # times the FLOPs of its forward
_DROPOUT, _IS_CAUSAL = 4, 5  # their places among the arguments of scaled_dot_product_attention
_GROUPS = 6  # its place among the arguments of convolutions
_LANES = 16  # float32 elements that a processor computes at once
_OVERLAP = 1.5  # as often a convolution of windows that overlap reads an element for each of its output channels


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

    What draws random numbers of its own on each rank (`smpc.executor.shared_draws.draw_apart`) is what it was before. Products of matrices
    are "linear", products of batches of matrices "bmm". Fused attentions are "attention", "attention_causal" or "attention_dropout", for
    which some devices have other kernels. So it is with convolutions: "conv"; "conv_pointwise" where windows do not overlap, as windows of
    one element or of patches; "conv_grouped". Arithmetic of two tensors, one of which is stretched to the other's shape, is "mul_broadcast"
    and so on: its backward adds up what was stretched.
    """
    name = _called_function(node)[0].strip("_")
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
    name = _NAMES.get(name, name)
    if name == "conv":
        return name + _kind_of_convolution(node)
    return f"{name}{_BROADCAST}" if name in _ARITHMETIC and _is_broadcast(node) else name


def measured_flops(node: Node) -> float:
    """FLOPs of one product, as they count beside measured ones of other sizes.

    A convolution computes as many output channels at once as fill a vector register: 8 of them take as long as 16.
    """
    product = product_of(node)
    if product is None or name_of(node) not in ("conv", "conv_pointwise"):
        return float(node.flops)
    channels = product[2]
    return node.flops * (-(-channels // _LANES) * _LANES / channels)


def broader_name(name: str) -> str:
    """ "mul" of "mul_broadcast", "conv" of "conv_grouped"; other names as they are."""
    return name.removesuffix(_BROADCAST).removesuffix(_GROUPED).removesuffix(_POINTWISE)


def _kind_of_convolution(node: Node) -> str:
    """What its name ends with. What it reads beside its weight is its input, from which windows are taken."""
    if _argument(node, _GROUPS, "groups") not in (None, 1):
        return _GROUPED
    product = product_of(node)
    if product is None or node.spec is None:
        return ""
    _, rows, columns, depth = product
    given = node.bytes_moved / node.spec.torch_dtype.itemsize - (rows + depth) * columns
    return _POINTWISE if rows * depth < _OVERLAP * given else ""


def _is_broadcast(node: Node) -> bool:
    """Whether one of two tensors is smaller than the result."""
    written = 0 if node.spec is None else node.spec.num_bytes
    return len(set(node.inputs)) == _PAIR and 2 * written < node.bytes_moved < 3 * written


def _called_function(node: Node) -> tuple[str, int]:
    """The last part of the name of the function that does the work, and which of the node's arguments is its first one."""
    name = node.target.rpartition(".")[2]
    if name == "draw_apart" and node.args and isinstance(node.args[0], str):  # (name, group, *arguments)
        return node.args[0].rpartition(".")[2], 2
    return name, 0


def _argument(node: Node, place: int, name: str) -> object:
    place += _called_function(node)[1]
    return node.args[place] if len(node.args) > place else dict(node.kwargs).get(name)


def is_attention(node: Node) -> bool:
    """Whether it is a fused attention."""
    return "attention" in _called_function(node)[0] and node.flops > 0


def attention_flops(node: Node) -> float:
    """FLOPs that a fused attention has to do: half of them where every query sees the keys before it alone."""
    return node.flops / 2 if _is_causal(node) else float(node.flops)


def _is_causal(node: Node) -> bool:
    """torch's attention takes `is_causal`, smpc's own `causal`, by name alone."""
    return _argument(node, _IS_CAUSAL, "is_causal") is True or dict(node.kwargs).get("causal") is True
