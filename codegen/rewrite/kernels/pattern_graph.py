"""What patterns of kernels read and what they find: `NodeUsers`, a trace to be read, `Replacement` and `Refusal`.

A `NodeUsers` has operations by kind, operands in order, and users, with casts skipped.

Many spellings are one operation: `x * y`, `torch.mul(x, y)` and `y.__rmul__(x)` are "mul". Names follow torch: add, sub, mul, div,
neg, pow, mean, rsqrt, sqrt, tanh, silu, gelu, sigmoid, cat, getitem, linear, ... ; "cast" changes the floating point type alone
(`.float()`, `.to(torch.bfloat16)`, `.type_as(y)`); what none of this names keeps its qualified name.

    graph.op("mul_3")                       "mul"
    graph.scalar_and_tensor("add_3")        (1e-06, "mean"): `mean + 1e-6` in either order
    graph.uncast("to_1")                    "x": to_1 = x.to(torch.float32)

The findings of a `Rewrite` are nodes that an op of `smpc.kernels` can replace, or why it cannot:

    Replacement    `replaced`, of which the last is the result, are to become `calls`
    Refusal        a place that looks like the op, and what about it the op cannot do

Nothing is replaced because a rewrite says so: `smpc.codegen.rewrite.kernels.prove_replacement` runs both sides first.

A call's arguments have the form of a node's: trees with `Ref`s to nodes, or to earlier calls of the replacement by the names
"#0", "#1", ... The value of the last call replaces the result. Calls that give several values are followed by
`_operator.getitem` of each that is needed; `also` says which other replaced nodes are read on, and the calls that give them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from smpc.tracer.constants import Ref, references
from smpc.tracer.ir import Node, NodeKind, TensorSpec, Trace

_OWNERS = ("torch", "torch.Tensor", "torch.nn.functional", "torch.special", "torch._C._nn", "_operator", "torch._VF")
_SAME = {
    "__radd__": "add", "__rmul__": "mul", "multiply": "mul", "divide": "div", "true_divide": "div", "__truediv__": "div",
    "__rdiv__": "rdiv", "__rtruediv__": "rdiv", "subtract": "sub", "__rsub__": "rsub", "__neg__": "neg", "negative": "neg",
    "__pow__": "pow", "concat": "cat", "concatenate": "cat", "__and__": "and", "bitwise_and": "and", "logical_and": "and",
}  # fmt: skip
_CASTS = ("to", "type", "type_as", "float", "double", "half", "bfloat16")
OUTPUT = "<output>"  # a user of the model's outputs
GUARD = "<guard>"  # a user of tensors whose value its Python reads


class NodeUsers:
    """The nodes of a trace with their users."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        found: dict[str, dict[str, None]] = {}
        for node in trace.nodes:
            for name in node.inputs:
                found.setdefault(name, {})[node.name] = None
        for guard in trace.guards:
            for name in references((guard.args, dict(guard.kwargs))):
                found.setdefault(name, {})[GUARD] = None
        for name in trace.output_names:
            found.setdefault(name, {})[OUTPUT] = None
        self._users = {name: tuple(users) for name, users in found.items()}
        self._ops = {node.name: _kind_of_operation(node) for node in trace.nodes}

    def node(self, name: str) -> Node:
        """The node of that name."""
        return self.trace.node(name)

    def spec(self, name: str) -> TensorSpec:
        """The spec of a node that is one tensor."""
        spec = self.trace.node(name).spec
        assert spec is not None, name
        return spec

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a node; () for anything but a single tensor."""
        spec = self.trace.node(name).spec
        return () if spec is None else spec.shape

    def op(self, name: str) -> str:
        """The kind of a node: see the module docstring; "" for OUTPUT and GUARD."""
        return self._ops.get(name, "")

    def users(self, name: str) -> tuple[str, ...]:
        """The readers of a node: names of nodes, OUTPUT, GUARD."""
        return self._users.get(name, ())

    def sole_user(self, name: str) -> str | None:
        """The one node that reads a node, if it is one."""
        users = self.users(name)
        return users[0] if len(users) == 1 and users[0] not in (OUTPUT, GUARD) else None

    def argument(self, name: str, position: int, keyword: str, default: Any = None) -> Any:
        """An argument of a call, given by position or by keyword."""
        node = self.trace.node(name)
        return node.args[position] if len(node.args) > position else dict(node.kwargs).get(keyword, default)

    def tensor(self, name: str, position: int, keyword: str) -> str | None:
        """The node that is an argument, if it is one."""
        value = self.argument(name, position, keyword)
        return value.name if isinstance(value, Ref) else None

    def operands(self, name: str) -> tuple[Any, Any]:
        """Both arguments of a binary operation (without `alpha` and the like), each a Ref or a number; else (None, None)."""
        node = self.trace.node(name)
        if len(node.args) == 2 and not node.kwargs:
            return node.args[0], node.args[1]
        return None, None

    def tensors(self, name: str) -> tuple[str, str] | None:
        """The operands of a binary operation of two nodes."""
        left, right = self.operands(name)
        return (left.name, right.name) if isinstance(left, Ref) and isinstance(right, Ref) else None

    def other(self, name: str, operand: str) -> str | None:
        """The operand of a binary operation beside `operand`."""
        pair = self.tensors(name)
        if pair is None or operand not in pair:
            return None
        return pair[1] if pair[0] == operand else pair[0]

    def scalar_and_tensor(self, name: str) -> tuple[float, str] | None:
        """The number and the node of `number + x`, `x + number` and the like; for sums and products."""
        left, right = self.operands(name)
        if isinstance(left, Ref) and _is_number(right):
            return float(right), left.name
        if isinstance(right, Ref) and _is_number(left):
            return float(left), right.name
        return None

    def power(self, name: str, exponent: float) -> str | None:
        """x, if the node is x ** exponent."""
        if self.op(name) == "square" and exponent == 2:
            return self.tensor(name, 0, "input")
        if self.op(name) == "mul" and exponent == 2:
            pair = self.tensors(name)
            return pair[0] if pair is not None and pair[0] == pair[1] else None
        if self.op(name) != "pow":
            return None
        base, found = self.operands(name)
        return base.name if isinstance(base, Ref) and _is_number(found) and found == exponent else None

    def is_cast(self, name: str) -> bool:
        """Whether a node changes the floating point type and nothing else."""
        return self.op(name) == "cast"

    def uncast(self, name: str) -> str:
        """The start of a chain of casts."""
        while self.is_cast(name):
            name = self.trace.node(name).inputs[0]
        return name

    def reader(self, name: str) -> str | None:
        """The sole user of a value, casts of it looked through."""
        user = self.sole_user(name)
        while user is not None and self.is_cast(user):
            user = self.sole_user(user)
        return user

    def cast_back(self, name: str, dtype: str) -> str:
        """The value after the casts that alone read it, as far as they lead to this type."""
        user = self.sole_user(name)
        while self.spec(name).dtype != dtype and user is not None and self.is_cast(user):
            name, user = user, self.sole_user(user)
        return name

    def between(self, result: str, inputs: tuple[str, ...]) -> tuple[str, ...]:
        """The nodes that compute `result` from `inputs`, in execution order; attribute reads and model inputs are never among them."""
        found: dict[str, None] = {}
        waiting = [result]
        while waiting:
            name = waiting.pop()
            computes = self.trace.node(name).kind in (NodeKind.CALL_FUNCTION, NodeKind.CALL_MODULE)
            if name in found or name in inputs or not computes:
                continue
            found[name] = None
            waiting.extend(self.trace.node(name).inputs)
        return tuple(sorted(found, key=self.trace.position))

    def find(self, *operations: str) -> tuple[str, ...]:
        """The nodes that do one of these operations, in execution order."""
        return tuple(node.name for node in self.trace.nodes if self._ops[node.name] in operations)

    def chain(self, name: str, accepts: Callable[[str], bool]) -> tuple[str, ...]:
        """`name`, its first argument, and so on while `accepts`: from the last to the first, which is not accepted."""
        found = [name]
        while accepts(found[-1]):
            found.append(self.trace.node(found[-1]).inputs[0])
        return tuple(found)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _kind_of_operation(node: Node) -> str:
    """A node's operation under the one name of its many spellings."""
    if node.kind is not NodeKind.CALL_FUNCTION or node.mutates:
        return node.kind if not node.mutates else f"in place {node.target}"
    owner, _, last = node.target.rpartition(".")
    if owner not in _OWNERS:
        return node.target
    if last in _CASTS:
        return "cast" if _is_cast(node) else node.target
    return _SAME.get(last, last)


def _is_cast(node: Node) -> bool:
    """Whether the call turns floating point numbers into others; `inputs[0]` is what it casts."""
    if node.spec is None or not node.spec.torch_dtype.is_floating_point:
        return False
    given = [*node.args[1:], *(value for key, value in node.kwargs if key not in ("device", "non_blocking"))]
    return all(
        isinstance(value, (torch.dtype, Ref, str)) for value in given if value is not None and value is not False
    )


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One call that replaces nodes."""

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Replacement:
    """Nodes to be replaced by calls; see the module's docstring.

    `given` are nodes that stay, but whose computation the check must know, since the calls rest on it: that both halves of a table
    are equal, say. `labels` are integer inputs with the number of classes that they count.
    """

    op: str
    replaced: tuple[str, ...]
    calls: tuple[KernelCall, ...]
    given: tuple[str, ...] = ()
    labels: tuple[tuple[str, int], ...] = ()
    also: tuple[tuple[str, str], ...] = ()

    @property
    def results(self) -> tuple[tuple[str, str], ...]:
        """The nodes whose values are read on, with the calls that give them; the result is the last."""
        return (*self.also, (self.result, f"#{len(self.calls) - 1}"))

    @property
    def result(self) -> str:
        """The node whose value the last call gives."""
        return self.replaced[-1]


@dataclass(frozen=True, slots=True)
class Refusal:
    """`node` stays as it is, and why."""

    op: str
    node: str
    reason: str


Find = Callable[[NodeUsers], Iterator[Replacement | Refusal]]


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rewrite: the name of the op that it calls, and how it finds what it replaces."""

    op: str
    find: Find
