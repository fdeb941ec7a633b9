"""Proves a replacement: runs the replaced nodes and the replacement on random numbers, forward and backward.

    1. in fp64, with every cast made one to fp64: both compute the same formula, to 8 digits. Rows have sizes from 0.01 to 10,
       so that an eps in another place or a missing offset shows
    2. in the traced types: they round alike, within a few units in the last place of the largest value

Shapes are the traced ones, but for sizes over 64: these become others from 32 to 63, equal ones equal. Where the calls do not take
that, sizes over 256 become others from 128 to 255; and where that does not go, they run as traced, if that is not too much. Each
pattern is checked once: layers that are alike share it.
Dropout drops nothing in both, since the masks differ by design.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from smpc.codegen.rewrite.kernels.pattern_graph import NodeUsers, Replacement
from smpc.tracer.constants import Ref, map_references
from smpc.tracer.ir import Node, NodeKind, TensorSpec
from smpc.tracer.replay import evaluate

_SMALL = (64, 256)  # sizes up to these stay
_LARGEST = 2**24  # elements of inputs that run as traced
_SEED = 20250
_CPU = torch.device("cpu")
_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_WIDE_TARGETS = {f"torch.Tensor.{name}": "torch.Tensor.double" for name in ("float", "half", "bfloat16")}
# Largest error, as a part of the largest value.
_TOLERANCES = {
    torch.float64: 1e-8,
    torch.float32: 256 * 2.0**-23,  # BERT's attention on one processor: 1.1e-5
    torch.float16: 8 * 2.0**-10,
    torch.bfloat16: 8 * 2.0**-7,
}
_SMALLEST_ROW = 1e-3  # rows smaller than this part of the largest may be rounding errors alone: saturated softmax
Values = dict[str, Any]


class Checker:
    """Checks replacements of one trace, each pattern once, however often the trace is rewritten."""

    def __init__(self, graph: NodeUsers) -> None:
        self._graph = graph
        self._known: dict[str, str] = graph.trace.remembered(Checker, dict)

    def objection(self, replacement: Replacement) -> str:
        """Why the replacement is not equal to the replaced nodes; "" if it is."""
        nodes = [self._graph.node(name) for name in (*replacement.given, *replacement.replaced)]
        inputs = _inputs_to_check(nodes)
        key = _pattern_to_check(self._graph, replacement, nodes, inputs)
        if key not in self._known:
            self._known[key] = self._check(replacement, nodes, inputs)
        return self._known[key]

    def _check(self, replacement: Replacement, nodes: Sequence[Node], inputs: Sequence[str]) -> str:
        with _CPU, torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad(), _no_autocast():
            for wide in (True, False):
                reason = _compare_checked_sides(_Sides(self._graph, replacement, nodes, inputs, wide))
                if reason:
                    return reason
        return ""


def _inputs_to_check(nodes: Sequence[Node]) -> tuple[str, ...]:
    """The inputs of the nodes, in order of reading."""
    made = {node.name for node in nodes}
    return tuple(dict.fromkeys(name for node in nodes for name in node.inputs if name not in made))


def _pattern_to_check(graph: NodeUsers, replacement: Replacement, nodes: Sequence[Node], inputs: Sequence[str]) -> str:
    """The same text for replacements that differ in names alone."""
    names = {name: f"%{i}" for i, name in enumerate((*inputs, *(node.name for node in nodes)))}

    def renamed(tree: Any) -> Any:
        return map_references(tree, lambda name: Ref(names.get(name, name)))

    parts: list[Any] = [replacement.op, len(replacement.given)]
    parts += [(graph.node(name).spec, dict(replacement_labels(replacement)).get(name)) for name in inputs]
    parts += [(node.target, renamed(node.args), renamed(node.kwargs), node.spec) for node in nodes]
    parts += [(call.target, renamed(call.args), renamed(call.kwargs)) for call in replacement.calls]
    parts += [(names[name], call) for name, call in replacement.also]
    return repr(parts)


def replacement_labels(replacement: Replacement) -> tuple[tuple[str, tuple[int, int]], ...]:
    """By integer input: how many classes, and the label that is ignored."""
    ignored = [value for call in replacement.calls for key, value in call.kwargs if key == "ignore_index"]
    return tuple((name, (classes, ignored[0] if ignored else -100)) for name, classes in replacement.labels)


@dataclasses.dataclass(frozen=True, slots=True)
class _Sides:
    """Both computations, over inputs in fp64 (`wide`) or in the traced types."""

    graph: NodeUsers
    replacement: Replacement
    nodes: Sequence[Node]
    inputs: Sequence[str]
    wide: bool

    @property
    def tolerance(self) -> float:
        """The largest error: the error of the coarsest dtype on the way."""
        if self.wide:
            return _TOLERANCES[torch.float64]
        specs = [self.graph.node(name).spec for name in (*self.inputs, *(node.name for node in self.nodes))]
        return max(_TOLERANCES.get(spec.torch_dtype, 0.0) for spec in specs if spec is not None)

    def values(self, size: Callable[[int], int]) -> Values:
        """Random inputs."""
        numbers = torch.Generator().manual_seed(_SEED)
        labels = dict(replacement_labels(self.replacement))
        found: Values = {}
        for name in self.inputs:
            spec = self.graph.spec(name)
            if name in labels:
                found[name] = _drawn_labels(spec, *labels[name], size, numbers)
            else:
                found[name] = _random_input_of_check(spec, self.wide, size, numbers)
        return found

    def original(self, values: Values, size: Callable[[int], int]) -> list[torch.Tensor]:
        """The replaced part: every result that other nodes read."""
        values = dict(values)
        for node in self.nodes:
            values[node.name] = evaluate(self._adapted(node, size), values, _CPU)
        return [_tensor_of_check(values[name]) for name, _ in self.replacement.results]

    def new(self, values: Values, size: Callable[[int], int]) -> list[torch.Tensor]:
        """The replacement."""
        values = dict(values)
        for node in self.nodes[: len(self.replacement.given)]:
            values[node.name] = evaluate(self._adapted(node, size), values, _CPU)
        for index, call in enumerate(self.replacement.calls):
            grad_enabled = self.nodes[-1].grad_enabled
            node = Node(
                f"#{index}", NodeKind.CALL_FUNCTION, call.target, call.args, call.kwargs, grad_enabled=grad_enabled
            )
            values[node.name] = evaluate(self._adapted(node, size), values, _CPU)
        return [_tensor_of_check(values[call]) for _, call in self.replacement.results]

    def _adapted(self, node: Node, size: Callable[[int], int]) -> Node:
        """The node for these sizes and types, dropping nothing."""
        target = _WIDE_TARGETS.get(node.target, node.target) if self.wide else node.target
        args, kwargs = _checked_without_dropout(target, node.args, dict(node.kwargs))
        change = functools.partial(_mapped_argument, wide=self.wide, size=size)
        return dataclasses.replace(
            node, target=target, args=change(args), kwargs=tuple((key, change(value)) for key, value in kwargs.items())
        )


def _checked_without_dropout(
    target: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with a probability to drop of 0."""
    position = {
        "torch.nn.functional.dropout": 1,
        "torch.dropout": 1,
        "smpc.kernels.bias_dropout_add.bias_dropout_add": 3,
    }.get(target)
    if position is None:
        return args, kwargs
    if len(args) > position:
        return (*args[:position], 0.0, *args[position + 1 :]), kwargs
    return args, {**kwargs, "p": 0.0}


def _mapped_argument(tree: Any, wide: bool, size: Callable[[int], int]) -> Any:
    """An argument with its sizes and types changed; booleans and references stay."""
    if type(tree) is int:
        return size(tree)
    if isinstance(tree, torch.dtype):
        return torch.float64 if wide and tree in _NARROW else tree
    if type(tree) in (tuple, list):
        return type(tree)(_mapped_argument(item, wide, size) for item in tree)
    if isinstance(tree, slice):
        return slice(*(_mapped_argument(item, wide, size) for item in (tree.start, tree.stop, tree.step)))
    return tree


def _shrunk_for_check(small: int, size: int) -> int:
    return size if size <= small else small // 2 + size % (small // 2)


def _same_size_in_check(size: int) -> int:
    return size


def _sizes_to_check(sides: _Sides) -> list[Callable[[int], int]]:
    """What sizes become, in the order in which it is tried."""
    specs = [sides.graph.spec(name) for name in sides.inputs]
    largest = max((size for spec in specs for size in spec.shape), default=0)
    found: list[Callable[[int], int]] = [
        functools.partial(_shrunk_for_check, small) for small in _SMALL if largest > small
    ]
    affordable = sum(spec.num_elements for spec in specs) <= _LARGEST
    return [*found, _same_size_in_check] if affordable or not found else found


def _compare_checked_sides(sides: _Sides) -> str:
    """Why the two sides differ; "" if they do not."""
    sizes, reason = _sizes_to_check(sides), ""
    for size in sizes:
        values = sides.values(size)
        try:
            expected = _kernel_results_with_gradients(sides.original, values, size)
        except Exception as error:  # whatever torch raises for shapes or types that these calls cannot have
            reason = f"it cannot be checked: {type(error).__name__}: {str(error).splitlines()[0]}"
            if (
                not sides.wide
                and isinstance(error, NotImplementedError | RuntimeError)
                and "not implemented" in str(error)
            ):
                return ""  # the CPU lacks this type; the formula was compared in fp64
            continue
        try:
            found = _kernel_results_with_gradients(sides.new, values, size)
        except Exception as error:
            reason = f"the op does not take it: {type(error).__name__}: {str(error).splitlines()[0]}"
            if size is not sizes[0]:
                return reason
            continue
        return _kernel_difference(expected, found, sides)
    return reason or "it is too large to be checked"


def _kernel_results_with_gradients(
    run: Callable[[Values, Callable[[int], int]], list[torch.Tensor]], values: Values, size: Callable[[int], int]
) -> list[torch.Tensor | None]:
    """The results, and the gradients of the inputs that want one."""
    wanted = [value for value in values.values() if value.requires_grad]
    outs = run(values, size)
    numbers = torch.Generator().manual_seed(_SEED + 1)
    incoming = [torch.randn(out.shape, generator=numbers, dtype=torch.float64).to(out.dtype) for out in outs]
    roots = [(out, grad) for out, grad in zip(outs, incoming, strict=True) if out.requires_grad]
    found: list[torch.Tensor | None] = [out.detach() for out in outs]
    if not roots:
        return [*found, *(None for _ in wanted)]
    return [*found, *torch.autograd.grad([out for out, _ in roots], wanted, [g for _, g in roots], allow_unused=True)]


def _kernel_difference(expected: list[torch.Tensor | None], found: list[torch.Tensor | None], sides: _Sides) -> str:
    """What the kernel computes otherwise than the replaced operations; empty if nothing."""
    results = [*(f"its {sides.graph.op(name)}" for name, _ in sides.replacement.also), "its result"]
    names = [*results, *(f"the gradient of {n}" for n in sides.inputs if sides.graph.spec(n).requires_grad)]
    for what, a, b in zip(names, expected, found, strict=True):
        if a is None and b is None:
            continue
        like = a if a is not None else b
        assert like is not None, what
        one, two = (torch.zeros_like(like) if item is None else item for item in (a, b))
        if one.shape != two.shape or one.dtype != two.dtype:
            return f"{what} is {one.dtype} {list(one.shape)}, the op's {two.dtype} {list(two.shape)}"
        error = _largest_error(one, two)
        if not error <= sides.tolerance:
            kind = "in fp64" if sides.wide else f"in {str(one.dtype).removeprefix('torch.')}"
            return f"{what} differs from the op's by {error:.1e} of its size {kind}"
    return ""


def _largest_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, row by row, as a part of the row's largest value; NaN where one is infinite or NaN and the other not."""
    if a.numel() == 0:
        return 0.0
    one, two = a.double(), b.double()
    apart = (one - two).abs()
    if not math.isfinite(float(apart.sum())):
        apart = torch.where((one == two) | (one.isnan() & two.isnan()), 0.0, apart)
    rows = apart.dim() > 1 and a.dtype == torch.float64
    overall = one.abs().amax()
    largest = one.abs().amax(-1, keepdim=True) if rows else overall
    return float((apart / largest.clamp(min=overall * _SMALLEST_ROW + 1e-300)).max())


def _random_input_of_check(
    spec: TensorSpec, wide: bool, size: Callable[[int], int], numbers: torch.Generator
) -> torch.Tensor:
    """Numbers in the memory order of the spec, every row of another size; the first of bools is true."""
    shape = [size(length) for length in spec.shape]
    dtype = spec.torch_dtype
    if dtype == torch.bool:
        mask = torch.rand(shape, generator=numbers) < 0.7
        if mask.dim():
            mask[..., :1] = True
        return mask
    if not dtype.is_floating_point:
        return torch.randint(0, 8, shape, generator=numbers).to(dtype)
    order = sorted(range(len(shape)), key=lambda dim: -spec.stride[dim])
    laid = torch.randn([shape[dim] for dim in order], generator=numbers, dtype=torch.float64)
    values = laid.permute([order.index(dim) for dim in range(len(shape))])
    scales = torch.rand([*shape[:-1], 1] if shape else [], generator=numbers, dtype=torch.float64)
    values = values.mul_(10.0 ** (3 * scales - 2)) if len(shape) > 1 else values
    return values.to(torch.float64 if wide else dtype).requires_grad_(spec.requires_grad)


def _drawn_labels(
    spec: TensorSpec, classes: int, ignored: int, size: Callable[[int], int], numbers: torch.Generator
) -> torch.Tensor:
    """Labels at random to check a kernel with; the first one is ignored."""
    found = torch.randint(0, size(classes), [size(length) for length in spec.shape], generator=numbers)
    if found.numel() > 1:
        found.view(-1)[0] = ignored
    return found.to(spec.torch_dtype)


def _tensor_of_check(value: Any) -> torch.Tensor:
    assert isinstance(value, torch.Tensor), value
    return value


def _no_autocast() -> torch.autocast:
    return torch.autocast("cpu", enabled=False)
