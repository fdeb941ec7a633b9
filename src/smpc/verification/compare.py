"""The results of two runs side by side: outputs, gradients, buffers, parameters, attributes and random states, in this order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from smpc.verification.attributes import Place, attribute_differences
from smpc.verification.bounds import Bounds, difference
from smpc.verification.runs import Results


@dataclass(frozen=True)
class Found:
    """A result that is not eager's. `kind`: "output", "gradient" and so on; `owner`: FQN of the module that it belongs to."""

    kind: str
    name: str
    owner: str
    text: str

    @property
    def what(self) -> str:
        """The name of the result."""
        return f"{self.kind} of {self.name}" if self.kind == "gradient" else f"{self.kind} {self.name}"

    def __str__(self) -> str:
        return f"{self.what}: {self.text}"


def differences(expected: Results, found: Results, bounds: Bounds, settled: frozenset[Place] | None) -> Iterator[Found]:
    """The differences between two runs, by kind. `settled`: attributes that may differ; None: no attributes are compared."""
    allowed = bounds.of_others
    for name in dict.fromkeys((*expected.outputs, *found.outputs)):
        text = _leaf_difference(expected.outputs.get(name), found.outputs.get(name), bounds)
        if text:
            yield Found("output", name, "", text)
    for name, gradient in expected.gradients.items():
        text = difference(gradient, found.gradients[name], bounds.of_gradient(name))
        if text:
            yield Found("gradient", name, _owner(name), text)
    for name in dict.fromkeys((*expected.buffers, *found.buffers)):
        text = difference(expected.buffers.get(name), found.buffers.get(name), allowed)
        if text:
            yield Found("buffer", name, _owner(name), text)
    for name, value in expected.written.items():
        text = difference(value, found.written[name], allowed)
        if text:
            yield Found("parameter", name, _owner(name), text)
    for name in sorted({*expected.overwritten, *found.overwritten}):
        yield Found("parameter", name, _owner(name), "it is written into, and the recording does not know of it")
    for name, requires_grad in expected.frozen.items():
        if found.frozen[name] != requires_grad:
            yield Found("parameter", name, _owner(name), f"expected requires_grad {requires_grad}, found the contrary")
    pairs = () if settled is None else attribute_differences(expected.model, found.model, settled)
    for fqn, name, text in pairs:
        yield Found("attribute", f"{fqn}.{name}" if fqn else name, fqn, text)
    for name, state in expected.random.items():
        if state != found.random[name]:
            yield Found("random state", name, "", "other numbers have been drawn, or another count of them")


def _leaf_difference(expected: object, found: object, bounds: Bounds) -> str:
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        if expected.requires_grad != found.requires_grad:
            return f"expected requires_grad {expected.requires_grad}, found {found.requires_grad}"
        return difference(expected, found, bounds.of_others)
    if isinstance(expected, Tensor) or isinstance(found, Tensor) or type(expected) is not type(found):
        return f"expected {type(expected).__name__}, found {type(found).__name__}"
    is_plain = isinstance(expected, (bool, int, float, complex, str, bytes))
    return f"expected {expected!r}, found {found!r}" if is_plain and repr(expected) != repr(found) else ""


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
