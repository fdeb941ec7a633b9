"""Runs a trace node by node on a real model, and proves that it does what the model does.

`replay` evaluates the nodes in order; it is the slow and obvious meaning of a trace, which the code generator must reproduce.
`verify` compares it with the model, bitwise: outputs, gradients of every parameter, and buffers afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from smpc.errors import TraceError
from smpc.tracer import targets
from smpc.tracer.constants import Opaque, Ref, TraceDevice, map_references, normalise
from smpc.tracer.ir import Autocast, Node, NodeKind, TensorSpec, Trace
from smpc.tracer.structure import flatten, item_of, split_item


def input_values(trace: Trace, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors in the inputs, by placeholder name. Raises TraceError if the inputs are not of the traced signature."""
    leaves, structure = flatten((tuple(args), dict(kwargs)))
    if structure != trace.inputs:
        raise TraceError(
            f"the trace belongs to inputs of the form {trace.inputs.paths()}, found {structure.paths()}; trace again"
        )
    wrong = []
    for position, (leaf, traced) in enumerate(zip(leaves, trace.input_leaves, strict=True)):
        expected = trace.node(traced.name).spec if isinstance(traced, Ref) else traced
        if not is_as_traced(leaf, expected):
            found = TensorSpec.of(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf)
            wrong.append(f"{structure.paths()[position]}: expected {expected}, found {found}")
    if wrong:
        raise TraceError(
            f"these inputs, as (args, kwargs), are not those of the trace; trace again: {'; '.join(wrong)}"
        )
    return {
        traced.name: leaf for leaf, traced in zip(leaves, trace.input_leaves, strict=True) if isinstance(traced, Ref)
    }


def is_as_traced(leaf: Any, expected: Any) -> bool:
    """Whether an input has the shape and dtype, or is the constant, that the trace was made for."""
    if isinstance(expected, TensorSpec):
        return isinstance(leaf, torch.Tensor) and (tuple(leaf.shape), leaf.dtype) == (
            expected.shape,
            expected.torch_dtype,
        )
    if isinstance(leaf, torch.Tensor) or isinstance(expected, (Opaque, TraceDevice)):
        return not isinstance(leaf, torch.Tensor)
    return bool(normalise(leaf) == expected or expected != expected)  # the latter is nan


Watch = Callable[[int, dict[str, Any], bool], None]  # position of a node, values by name, whether it has been evaluated


def replay(
    trace: Trace,
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    watch: Watch = lambda position, values, is_done: None,
) -> Any:
    """The result of `model(*args, **kwargs)`, computed from the trace and the model's parameters and buffers.

    `watch` is called before and after every node.
    """
    inputs = input_values(trace, args, kwargs or {})
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    # A read is recorded at its first use, which may come after the model has rebound the buffer.
    values: dict[str, Any] = {
        node.name: read_attribute(model, node.target) for node in trace.nodes if node.kind is NodeKind.GET_ATTR
    }
    with _AutocastScope() as scope:
        for position, node in enumerate(trace.nodes):
            watch(position, values, False)
            if node.kind is not NodeKind.GET_ATTR:
                scope.enter(node.autocast)
                values[node.name] = _evaluate_node(node, values, inputs, model, device)
            watch(position, values, True)
    return trace.output.unflatten(resolved(leaf, values, device) for leaf in trace.output_leaves)


def verify(trace: Trace, model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> None:
    """Raises TraceError unless the replay equals the model bitwise: outputs, parameter gradients and buffers.

    Both run on copies of the model and of the inputs from the same random state, so nothing of either changes.
    """
    results = []
    for replayed in (False, True):
        copied = copy.deepcopy(model)
        copied.zero_grad(set_to_none=True)
        own_args, own_kwargs = _cloned_inputs(args, kwargs or {})
        with torch.random.fork_rng():
            output = replay(trace, copied, own_args, own_kwargs) if replayed else copied(*own_args, **own_kwargs)
        outputs = [leaf for leaf in flatten(output)[0] if isinstance(leaf, torch.Tensor)]
        roots = [tensor for tensor in outputs if tensor.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(tensor) for tensor in roots])
        found = {f"output {i}": tensor.detach() for i, tensor in enumerate(outputs)}
        found |= {f"gradient of {name}": p.grad for name, p in copied.named_parameters() if p.grad is not None}
        found |= {f"buffer {name}": buffer for name, buffer in copied.named_buffers()}
        results.append(found)
    expected, got = results
    wrong = [name for name in expected if name not in got or not _same_bits(expected[name], got[name])]
    wrong += [name for name in got if name not in expected]
    if wrong:
        raise TraceError(
            f"replay of {trace.model_class} differs from the model in {len(wrong)} of {len(expected)} tensors: "
            f"{', '.join(wrong[:5])}; this is a defect of the tracer, please report the model"
        )


def _cloned_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs with copies of their tensors; one tensor in two places stays one."""
    leaves, structure = flatten((tuple(args), dict(kwargs)))
    copies = {id(leaf): leaf.detach().clone() for leaf in leaves if isinstance(leaf, torch.Tensor)}
    cloned_args, cloned_kwargs = structure.unflatten([copies.get(id(leaf), leaf) for leaf in leaves])
    return cloned_args, cloned_kwargs


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def _evaluate_node(
    node: Node,
    values: Mapping[str, Any],
    inputs: Mapping[str, torch.Tensor],
    model: nn.Module,
    device: torch.device,
) -> Any:
    """The value of a node of the trace."""
    if node.kind is NodeKind.PLACEHOLDER:
        return inputs[node.name]
    args = [resolved(arg, values, device) for arg in node.args]
    if node.kind is NodeKind.SET_ATTR:
        owner, _, name = node.target.rpartition(".")
        module = model.get_submodule(owner)
        if name in module._buffers:
            setattr(module, name, args[0])
        else:
            module.register_buffer(name, args[0])
        return None
    if node.kind is NodeKind.CALL_MODULE:
        kwargs = {key: resolved(value, values, device) for key, value in node.kwargs}
        module = model.get_submodule(node.target)
        with context(node.grad_enabled, node.autocast):
            for caller in targets.CALLERS:
                if caller in kwargs:
                    names, group = kwargs.pop(caller)
                    return targets.function(caller)(module, names, group, *args, **kwargs)
            return module(*args, **kwargs)
    return evaluate(node, values, device)


def evaluate(node: Node, values: Mapping[str, Any], device: torch.device) -> Any:
    """The result of a call_function node, given the values of the nodes before it."""
    args = [resolved(arg, values, device) for arg in node.args]
    kwargs = {key: resolved(value, values, device) for key, value in node.kwargs}
    with context(node.grad_enabled, node.autocast):
        return targets.function(node.target)(*args, **kwargs)


def read_attribute(model: nn.Module, path: str) -> Any:
    """A parameter, buffer or tensor attribute by its path: "transformer.h.0.weight", "tables..'cos'", "scales..1"."""
    dotted, key = split_item(path)
    owner, _, name = dotted.rpartition(".")
    value = getattr(model.get_submodule(owner), name)
    return item_of(value, key) if key else value


class _AutocastScope:
    """Keeps torch's casts of parameters from the first node of a scope of autocast to the first of another."""

    def __init__(self) -> None:
        self._number, self._stack = 0, ExitStack()

    def __enter__(self) -> _AutocastScope:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def enter(self, autocast: Autocast | None) -> None:
        """The next node is evaluated under this autocast."""
        if autocast is not None and autocast.scope not in (0, self._number):
            self._stack.close()
            self._number = autocast.scope
            self._stack.enter_context(torch.autocast("cpu", enabled=torch.is_autocast_enabled("cpu")))


@contextmanager
def context(grad_enabled: bool, autocast: Autocast | None) -> Iterator[None]:
    """The grad mode and autocast state under which a node was recorded."""
    with torch.set_grad_enabled(grad_enabled and torch.is_grad_enabled()):
        if autocast is None:
            yield
            return
        with entered(autocast):
            yield


def entered(autocast: Autocast) -> torch.autocast:
    """torch's context of this state."""
    dtype, caches = getattr(torch, autocast.dtype), None if autocast.caches else False
    return torch.autocast(autocast.device_type, dtype, autocast.enabled, cache_enabled=caches)


def resolved(tree: Any, values: Mapping[str, Any], device: torch.device) -> Any:
    """An argument with values in place of names."""
    tree = map_references(tree, lambda name: values[name])
    return _on_device(tree, device)


def _on_device(tree: Any, device: torch.device) -> Any:
    """Arguments of a node with the device in its places."""
    if isinstance(tree, TraceDevice):
        return device
    if type(tree) in (tuple, list):
        return type(tree)(_on_device(item, device) for item in tree)
    return tree
