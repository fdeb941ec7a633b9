"""`model(...)` and `model.backward(...)` in a step; their effect depends on the rank.

    Capture     pipeline rank 0: the call leaves the step function, taking the model's inputs along
    Tail        the last stage's rank: the call returns the pipeline's output; backward notes the roots, the schedule runs it
    Whole       no pipeline: the module's own forward, and backward at once

In half precision the model's inputs (`cast_inputs`) and outputs (`cast_outputs`) are cast.

A step function calls the model once in every microbatch, and backward once or not at all.

Averaging: a root's gradient is divided by the number of microbatches, so the step's gradients equal, bit by bit, `(loss /
num_microbatches).backward()` summed over the microbatches. A loss scale divides further, by 1 / scale.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from smpc.codegen.recompute import Checkpointing
from smpc.errors import StepError
from smpc.sample_inputs import Inputs
from smpc.tracer.ir import Autocast
from smpc.tracer.left_inputs import LeftInputs
from smpc.v1.session.precision import HALVES
from smpc.v1.steps.arguments import Arguments, map_leaves, shared_containers
from smpc.v1.steps.given_inputs import GivenInputs
from smpc.v1.steps.tensors_within import tensors_within

Tensors = Tensor | Sequence[Tensor]
Gradients = Tensor | Sequence[Tensor | None] | None
Roots = list[tuple[Tensor, Tensor | None]]


def autocast_of_step_function() -> Autocast | None:
    """The autocast that is on here, if one is."""
    for kind in ("cuda", "cpu"):
        if torch.is_autocast_enabled(kind):
            dtype = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
            return Autocast(kind, dtype, True, torch.is_autocast_cache_enabled())
    return None


class Outputs:
    """The outputs of `model(...)` in a step function, and whether gradients may come back to them."""

    def __init__(self, step_name: str) -> None:
        self._step_name = step_name
        self._hooks: list[RemovableHandle] = []

    def watch(self, output: Any) -> None:
        """From now on, a gradient that reaches it is an error."""
        for tensor in tensors_within(output):
            if tensor.grad_fn is not None:
                self._hooks.append(tensor.grad_fn.register_prehook(self._refuse))

    def release(self) -> None:
        """From now on gradients may come."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _refuse(self, gradients: Any) -> None:
        """Raises for a script that differentiates by itself: earlier stages would get no gradients, and nothing would be averaged."""
        raise StepError(
            f"step function {self._step_name} differentiates through the model by itself, by loss.backward() or torch.autograd; call "
            "model.backward(loss) in its place"
        )


class KeptOutputs:
    """Whether a step function keeps the outputs of `model(...)` beside its loss in the backward pass; the prediction of memory asks.

    `out = model(ids, labels=ids); model.backward(out.loss)` keeps the logits, `loss = model(ids, labels=ids).loss` does not.
    """

    def __init__(self) -> None:
        self._given: list[weakref.ref[Tensor]] = []
        self.are_kept = False

    def give(self, output: Any) -> None:
        """The script gets these."""
        self._given = [weakref.ref(tensor) for tensor in tensors_within(output) if tensor.numel() > 1]

    def look(self) -> None:
        """The backward begins."""
        self.are_kept = any(tensor() is not None for tensor in self._given)


class ModelCalls(Protocol):
    """The current behaviour of the model's two methods."""

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """`model(*args, **kwargs)`."""

    def backward(self, tensors: Tensors, gradients: Gradients) -> None:
        """`model.backward(tensors, gradients)`."""


class Captured(BaseException):
    """Leaves the step function at the call of the model. No Exception: the function must not catch it by accident."""


@dataclass(slots=True)
class Capture:
    """Learns the model's inputs in one microbatch."""

    step_name: str
    inputs: Inputs | None = None
    grad_enabled: bool = True
    autocast: Autocast | None = None  # the autocast around the step function's call of the model

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Leave."""
        self.inputs = args, dict(kwargs)
        self.autocast = autocast_of_step_function()
        self.grad_enabled = torch.is_grad_enabled()
        raise Captured

    def backward(self, tensors: Tensors, gradients: Gradients) -> None:
        """Does nothing: there is no output to differentiate yet."""
        raise _too_early(self.step_name)


class Tail:
    """One microbatch on the rank of the last stage. `scale`: the divisor of gradients. `model`: the script's. `before`: what the model
    was given when the function ran up to it, if that is to be compared. `shared`: why a loss must not use a parameter by itself.
    `left`: what forward has left in the model's inputs, if it changes them; `given`: the arguments of the step function."""

    def __init__(
        self,
        step_name: str,
        output: Any,
        scale: float,
        model: nn.Module,
        before: GivenInputs | None = None,
        shared: Callable[[nn.Parameter], str] = lambda _: "",
        left: LeftInputs | None = None,
        given: Arguments | None = None,
    ) -> None:
        self._step_name = step_name
        self._output = output
        self._left, self._given = left, given
        self.written: list[Tensor] = []  # inputs of the call
        self._model = model
        self._before = before
        self._shared = shared
        self._first_node = 0  # of autograd, that the step function makes from the outputs on
        self._scale = scale
        self.called = False
        self.roots: Roots | None = None
        self.losses: list[Tensor] = []
        self._outputs = Outputs(step_name)

    def close(self) -> None:
        """The step function has returned: from now on the schedule may differentiate."""
        self._outputs.release()

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The pipeline's output."""
        if self.called:
            raise _called_twice(self._step_name)
        self.called = True
        if self._before is not None:
            self._before.check((args, dict(kwargs)), self._step_name)
        left, self._left = self._left, None
        if left is not None:
            self._outputs.watch((left.leaves, left.written))
            held = [(each, _items(each)) for each in shared_containers(tuple((self._given or {}).values()))]
            self.written = left.put_into((args, dict(kwargs)))
            if any(_items(each) != before for each, before in held):
                raise StepError(
                    f"step function {self._step_name}: expected it to make the containers that the model's forward changes, found one that "
                    "is its argument: other ranks' scripts would have it as it was; make it in the step function, and return what it holds"
                )
        output, self._output = self._output, None
        self._outputs.watch(output)
        self._first_node = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        return output

    def backward(self, tensors: Tensors, gradients: Gradients) -> None:
        """Note the roots. Raises StepError where the loss uses parameters outside of the model, which other ranks would not train alike, or
        parameters of the model that ranks share."""
        if not self.called:
            raise _too_early(self._step_name)
        if self.roots is not None:
            raise _backward_twice(self._step_name)
        roots = make_roots(tensors, gradients, self._scale, self._step_name)
        used = [leaf for leaf in _leaves_used(roots, self._first_node) if isinstance(leaf, nn.Parameter)]
        own = {id(parameter) for parameter in self._model.parameters()} if used else ()
        foreign = [tuple(parameter.shape) for parameter in used if id(parameter) not in own]
        if foreign:
            raise StepError(
                f"step function {self._step_name}: expected a loss whose parameters belong to the model, found others, of shape "
                f"{', '.join(map(str, foreign))}; only the rank that computes the loss would train them, or each with a part of their "
                "gradient: make their module (a criterion, a head) a part of the model, or freeze it with requires_grad_(False)"
            )
        _check_uses(used, self._shared, self._step_name)
        self.roots = roots
        self.losses = losses_of(tensors, gradients)


def _items(container: Any) -> list[Any]:
    """What a container holds, by identity."""
    if isinstance(container, Mapping):
        return [(key, id(value)) for key, value in container.items()]
    return list(map(id, container))


class LocalCall:
    """One microbatch without a pipeline. `more_roots` adds to the roots of the last backward. `shared`: see `Tail`; None: no reason."""

    def __init__(
        self,
        step_name: str,
        module: Callable[..., Any],
        scale: float,
        more_roots: Callable[[list[Tensor]], tuple[Tensor, Tensor] | None] | None,
        shared: Callable[[nn.Parameter], str] | None = None,
    ) -> None:
        self._step_name = step_name
        self._module = module
        self._shared = shared
        self._first_node = 0  # of autograd, that the step function makes from the outputs on
        self._scale = scale
        self._more_roots = more_roots
        self.inputs: Inputs | None = None  # of the call, until the step function returns
        self.called = False
        self.did_backward = False
        self.losses: list[Tensor] = []
        self.autocast: Autocast | None = None
        self._outputs = Outputs(step_name)

    def close(self) -> None:
        """The step function has returned."""
        self._outputs.release()
        self.inputs = None

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The module's own forward."""
        if self.called:
            raise _called_twice(self._step_name)
        self.called = True
        self.inputs, self.autocast = (args, dict(kwargs)), autocast_of_step_function()
        with Checkpointing():  # DistributedDataParallel takes no gradients of backwards within backwards
            output = self._module(*args, **kwargs)
        self._outputs.watch(output)
        if self._shared is not None:
            self._first_node = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        return output

    def backward(self, tensors: Tensors, gradients: Gradients) -> None:
        """Run the backward pass."""
        if not self.called:
            raise _too_early(self._step_name)
        if self.did_backward:
            raise _backward_twice(self._step_name)
        self.did_backward = True
        roots: Roots = make_roots(tensors, gradients, self._scale, self._step_name)
        if self._shared is not None:
            check_loss(roots, self._first_node, self._shared, self._step_name)
        self.losses = losses_of(tensors, gradients)
        if self._more_roots is not None:
            more = self._more_roots([tensor for tensor, _ in roots])
            if more is not None:
                roots.append(more)
        self._outputs.release()
        torch.autograd.backward([tensor for tensor, _ in roots], [gradient for _, gradient in roots])


def check_loss(roots: Roots, first_node: int, shared: Callable[[nn.Parameter], str], step_name: str) -> None:
    """StepError where operations from `first_node` of autograd to the roots use parameters that ranks share. `shared`: see `Tail`."""
    used = [leaf for leaf in _leaves_used(roots, first_node) if isinstance(leaf, nn.Parameter)]
    _check_uses(used, shared, step_name)


def _check_uses(used: Iterable[nn.Parameter], shared: Callable[[nn.Parameter], str], step_name: str) -> None:
    for why in filter(None, map(shared, used)):
        raise StepError(
            f"step function {step_name}: expected a loss of the model's outputs, found one that uses the model's parameters by itself (a "
            f"penalty on weights), where {why}; compute it inside the model and return it, or use the optimizer's weight_decay"
        )


def _leaves_used(roots: Roots, first_node: int) -> Iterator[Tensor]:
    """The leaves that operations use, from `first_node` of autograd to the roots."""
    seen: set[Any] = set()
    nodes: list[Any] = [root.grad_fn for root, _ in roots]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            yield node.variable
        elif node._sequence_nr() >= first_node:
            nodes += [following for following, _ in node.next_functions]


def make_roots(tensors: Tensors, gradients: Gradients, scale: float, step_name: str) -> Roots:
    """The roots of a backward pass, with their gradients divided by `scale`.

    Raises StepError if torch.autograd.backward would fail: no history, no gradient for more than one element, other shapes.
    """
    roots = list(tensors) if isinstance(tensors, Iterable) and not isinstance(tensors, Tensor) else [tensors]
    given: list[Tensor | None]
    if gradients is None or isinstance(gradients, Tensor):
        given = [gradients] if gradients is not None else [None] * len(roots)
    else:
        given = list(gradients)
    where = f"model.backward in step function {step_name}"
    for i, root in enumerate(roots):
        if not isinstance(root, Tensor):
            raise StepError(f"{where}: expected tensors, found {type(root).__name__} {root!r:.80} as tensor {i}")
    if len(given) != len(roots):
        raise StepError(f"{where}: expected a gradient for each of {len(roots)} tensors, found {len(given)}")
    found: Roots = []
    for i, (root, gradient) in enumerate(zip(roots, given, strict=True)):
        if not root.requires_grad:
            raise StepError(
                f"{where}: tensor {i} does not depend on a parameter that requires grad; backward needs the loss itself, not "
                "a detached one, computed with autograd on"
            )
        if gradient is None and root.numel() != 1:
            raise StepError(
                f"{where}: tensor {i} has {root.numel()} elements (shape {list(root.shape)}); reduce it to one, or pass "
                "its gradient: model.backward(outputs, gradients)"
            )
        if gradient is not None and gradient.shape != root.shape:
            raise StepError(
                f"{where}: gradient {i} has shape {list(gradient.shape)}, its tensor {list(root.shape)}; they must be equal"
            )
        seed = torch.ones_like(root) if gradient is None else gradient
        found.append((root, seed / scale if scale != 1 else seed))
    return found


def losses_of(tensors: Tensors, gradients: Gradients) -> list[Tensor]:
    """The roots of backward that the user gives without a gradient, such as losses."""
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    given = [gradients] * len(roots) if gradients is None or isinstance(gradients, Tensor) else list(gradients)
    return [root for root, gradient in zip(roots, given, strict=True) if gradient is None]


def cast_inputs(values: Any, dtype: torch.dtype | None) -> Any:
    """The model's inputs, with fp32 tensors cast to `dtype`."""
    if dtype is None:
        return values
    return _cast(values, lambda tensor: tensor.to(dtype) if tensor.dtype is torch.float32 else tensor)


def cast_outputs(values: Any, dtype: torch.dtype | None) -> Any:
    """The model's outputs, with half-precision tensors cast to fp32."""
    if dtype is None:
        return values
    return _cast(values, lambda tensor: tensor.float() if tensor.dtype in HALVES else tensor)


def _cast(values: Any, function: Callable[[Tensor], Tensor], around: tuple[Any, ...] = ()) -> Any:
    """The values with `function(tensor)` in place of every tensor in their containers and dataclasses.

    `around`: the dataclasses that hold the values; one that holds itself is not entered again.
    """

    def leaf(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            return function(value)
        if not is_dataclass(value) or isinstance(value, (type, nn.Module)) or any(value is each for each in around):
            return value
        old = {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
        new = _cast(old, function, (*around, value))
        if new is old:
            return value
        changed = copy.copy(value)
        for name, item in new.items():
            object.__setattr__(changed, name, item)  # frozen ones, too
        return changed

    return map_leaves(values, leaf, "")


def _too_early(step_name: str) -> StepError:
    return StepError(f"step function {step_name} calls model.backward before model(...); call the model first")


def _called_twice(step_name: str) -> StepError:
    return StepError(
        f"step function {step_name} calls the model twice in one microbatch; a pipeline runs one call of the model for each "
        "microbatch: use two step functions, or make the two calls inside the model"
    )


def _backward_twice(step_name: str) -> StepError:
    return StepError(
        f"step function {step_name} calls model.backward twice in one microbatch; add the losses up, or pass all tensors in "
        "one call: model.backward([a, b])"
    )
