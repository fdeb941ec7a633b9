"""How compiled programs differ from the model: the results of two runs side by side, and the first module that gives something else.

The first in forward order is looked for.

Only after a difference has been found. Three runs, each of which notes what modules give:

    eager       hooks on every module
    replay      the recording, node by node (`smpc.tracer.replay`): a difference is the recording's
    programs    the outputs of the stages, and of the modules that they call whole: a difference comes from the cut or the code

Where all values of the forward pass are the same, the names of what differs have to do: `owner_first`.

`differences` compares outputs, gradients, buffers, parameters, attributes and random states, in this order.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from smpc.compile.result import Compilation
from smpc.sample_inputs import Inputs
from smpc.tracer.constants import Ref
from smpc.tracer.ir import NodeKind, Trace
from smpc.tracer.replay import context, replay
from smpc.tracer.structure import flatten
from smpc.verification.attributes import Place, attribute_differences
from smpc.verification.bounds import Bounds, difference
from smpc.verification.paired_runs import (
    Conditions,
    RunResults,
    by_stage,
    copy_of,
    installed,
    own_inputs,
    run_programs,
    surroundings,
)
from smpc.verification.random_state import RandomState


@dataclass(frozen=True)
class FirstDifference:
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


def differences(
    expected: RunResults, found: RunResults, bounds: Bounds, settled: frozenset[Place] | None
) -> Iterator[FirstDifference]:
    """The differences between two runs, by kind. `settled`: attributes that may differ; None: no attributes are compared."""
    allowed = bounds.of_others
    for name in dict.fromkeys((*expected.outputs, *found.outputs)):
        text = _leaf_difference(expected.outputs.get(name), found.outputs.get(name), bounds)
        if text:
            yield FirstDifference("output", name, "", text)
    for name, gradient in expected.gradients.items():
        text = difference(gradient, found.gradients[name], bounds.of_gradient(name))
        if text:
            yield FirstDifference("gradient", name, _owner(name), text)
    for name in dict.fromkeys((*expected.buffers, *found.buffers)):
        text = difference(expected.buffers.get(name), found.buffers.get(name), allowed)
        if text:
            yield FirstDifference("buffer", name, _owner(name), text)
    for name, value in expected.written.items():
        text = difference(value, found.written[name], allowed)
        if text:
            yield FirstDifference("parameter", name, _owner(name), text)
    for name in sorted({*expected.overwritten, *found.overwritten}):
        yield FirstDifference(
            "parameter", name, _owner(name), "it is written into, and the recording does not know of it"
        )
    for name, requires_grad in expected.frozen.items():
        if found.frozen[name] != requires_grad:
            yield FirstDifference(
                "parameter", name, _owner(name), f"expected requires_grad {requires_grad}, found the contrary"
            )
    pairs = () if settled is None else attribute_differences(expected.model, found.model, settled)
    for fqn, name, text in pairs:
        yield FirstDifference("attribute", f"{fqn}.{name}" if fqn else name, fqn, text)
    for name, state in expected.random.items():
        if state != found.random[name]:
            yield FirstDifference("random state", name, "", "other numbers have been drawn, or another count of them")


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


_Key = tuple[str, int]  # FQN of a module, which of its calls


@dataclass
class _ModuleCall:
    """The inputs and outputs of a module call, and the random states before and after it."""

    inputs: list[Any]
    before: dict[str, str]
    outputs: list[Any] = field(default_factory=list)
    after: dict[str, str] = field(default_factory=dict)


def locate(
    model: nn.Module,
    compilation: Compilation,
    inputs: Inputs,
    conditions: Conditions,
    start: RandomState,
    bounds: Bounds,
) -> str:
    """The first module that differs and how, for people; "" if no value of the forward pass does."""
    with surroundings(conditions):
        try:
            start.restore()
            calls = _eager_calls(model, compilation.trace, inputs, conditions)
            start.restore()
            replayed = _Replayed(compilation, calls, bounds)
            replayed.run(model, inputs, conditions)
            if replayed.place:
                return f"{replayed.place} (in the recording)"
            in_order = by_stage(compilation)
            if in_order is not compilation.trace:  # what is drawn differs, and with it what modules give
                calls, replayed = {}, _Replayed(compilation, {}, bounds)
                start.restore()
                replayed.run(model, inputs, conditions, in_order)
            start.restore()
            return _in_programs(model, compilation, inputs, conditions, calls, replayed.values, bounds)
        except Exception as error:  # what is broken may break anywhere; the difference itself is reported all the same
            return f"unknown, as looking for it raised {type(error).__name__}: {error}"


def owner_first(trace: Trace, wrong: Sequence[FirstDifference]) -> str:
    """The module of the first difference; for gradients, whose differences spread backwards, the last one in forward order."""
    first = {node.target: i for i, node in reversed(list(enumerate(trace.nodes))) if node.kind is NodeKind.CALL_MODULE}
    first |= {call.fqn: call.first for call in reversed(trace.calls)}
    by_kind = [item for item in wrong if item.kind not in ("gradient", "random state")]
    gradients = [item for item in wrong if item.kind == "gradient"]
    if by_kind:
        item = min(by_kind, key=lambda item: first.get(item.owner, len(trace.nodes)))
        return f"{_module_str(trace, item.owner)}, whose forward gives the same: {item}"
    if gradients:
        item = max(gradients, key=lambda item: first.get(item.owner, -1))
        return f"{_module_str(trace, item.owner)}, the first that the backward pass comes to; every module's forward gives the same: {item}"
    return f"none, all modules give and leave the same: {wrong[0]}"


def _module_str(trace: Trace, fqn: str) -> str:
    """A module as messages name it, with its class."""
    classes = {call.fqn: call.class_name for call in reversed(trace.calls)}
    if not fqn:
        return f"the model ({trace.model_class})"
    return f"module {fqn} ({classes.get(fqn, 'called whole')})"


# -- eager -------------------------------------------------------------------------------------------------------------


def _eager_calls(model: nn.Module, trace: Trace, inputs: Inputs, conditions: Conditions) -> dict[_Key, _ModuleCall]:
    """The outputs of all module calls, in the order of their ends."""
    copied = copy_of(model, trace, conditions.device)
    finished: dict[_Key, _ModuleCall] = {}
    with _noting(dict(copied.named_modules()), finished, conditions):
        args, kwargs = own_inputs(inputs, conditions.device)
        with context(conditions.grad_enabled, conditions.autocast):
            copied(*args, **kwargs)
    return finished


@contextlib.contextmanager
def _noting(modules: dict[str, nn.Module], finished: dict[_Key, _ModuleCall], conditions: Conditions) -> Iterator[None]:
    """Notes the calls of these modules."""
    handles: list[Any] = []
    numbers: Counter[str] = Counter()
    under_way: list[_ModuleCall] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        under_way.append(_ModuleCall(_kept((args, kwargs)), RandomState.now(conditions.device).parts()))

    def after(fqn: str, output: Any) -> None:
        call = under_way.pop()
        call.outputs, call.after = _kept(output), RandomState.now(conditions.device).parts()
        finished[fqn, numbers[fqn]] = call
        numbers[fqn] += 1

    for fqn, module in modules.items():
        if not isinstance(module, torch.jit.ScriptModule):
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(lambda _m, _a, output, fqn=fqn: after(fqn, output)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _kept(value: Any) -> list[Any]:
    """The leaves of a value, with copies of tensors."""
    return [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in flatten(value)[0]]


# -- the recording -----------------------------------------------------------------------------------------------------


class _Replayed:
    """A replay that compares every call of a module as soon as it has ended. `values`: those that stages hand on, by name."""

    def __init__(self, compilation: Compilation, calls: dict[_Key, _ModuleCall], bounds: Bounds) -> None:
        self._trace, self._calls, self._bounds = compilation.trace, calls, bounds
        self._wanted = {name for p in compilation.programs for code in p.stages for name in code.outputs}
        trace = compilation.trace
        by_end = sorted(range(len(trace.calls)), key=lambda index: (trace.calls[index].last, -index))
        numbers: Counter[str] = Counter()
        self._keys: dict[int, _Key] = {}
        self._begins: dict[int, list[int]] = {}
        self._ends: dict[int, list[int]] = {}
        for index in by_end:
            call = trace.calls[index]
            self._keys[index] = call.fqn, numbers[call.fqn]
            numbers[call.fqn] += 1
            self._begins.setdefault(call.first, []).append(index)
            self._ends.setdefault(call.last - 1, []).append(index)
        self._whole: Counter[str] = Counter()  # calls of modules called whole
        self._given: set[int] = set()  # calls that begin with other inputs, or another random state
        self.place = ""
        self.values: dict[str, Tensor] = {}

    def run(self, model: nn.Module, inputs: Inputs, conditions: Conditions, trace: Trace | None = None) -> None:
        """Replay the recording, or its nodes in another order, on a copy of the model."""
        self._nodes = (trace or self._trace).nodes
        self._device = conditions.device
        copied = copy_of(model, self._trace, conditions.device)
        args, kwargs = own_inputs(inputs, conditions.device)
        with torch.set_grad_enabled(conditions.grad_enabled):
            replay(trace or self._trace, copied, args, kwargs, watch=self._watch)

    def _watch(self, position: int, values: dict[str, Any], is_done: bool) -> None:
        """Called before and after every node."""
        if not is_done:
            for index in self._begins.get(position, ()):
                self._look_at_inputs(index, values)
            return
        node, name = self._nodes[position], self._nodes[position].name
        if node.kind is NodeKind.CALL_MODULE and not self.place:
            self._compare_whole(node.target, values[name])
        if name in self._wanted and isinstance(values[name], Tensor):
            self.values[name] = values[name].detach().clone()
        for index in self._ends.get(position, ()) if not self.place else ():
            self._compare(index, values)

    def _look_at_inputs(self, index: int, values: dict[str, Any]) -> None:
        call, eager = self._trace.calls[index], self._calls.get(self._keys[index])
        if eager is None:
            return
        if self._differs(call.argument_leaves, eager.inputs, values) or self._moved(eager.before):
            self._given.add(index)

    def _compare(self, index: int, values: dict[str, Any]) -> None:
        call, eager = self._trace.calls[index], self._calls.get(self._keys[index])
        if eager is None or self.place:
            return
        how = self._differs(call.output_leaves, eager.outputs, values)
        moved = self._moved(eager.after)
        if not how and not moved:
            return
        if call.first == call.last:  # it does nothing, and ends before the node at which it begins
            self._look_at_inputs(index, values)
        what = f"its output differs {how}" if how else f"it leaves {moved} in another state"
        inside = call
        while index in self._given and call.parent >= 0:
            inside, index, call = call, call.parent, self._trace.calls[call.parent]
        self.place = f"{_module_str(self._trace, call.fqn)}"
        self.place += f": {what}" if call is inside else f", in its own code before it calls {inside.fqn}"

    def _compare_whole(self, fqn: str, output: Any) -> None:
        """Compare a module of which nothing is recorded inside."""
        eager = self._calls.get((fqn, self._whole[fqn]))
        self._whole[fqn] += 1
        how = _first_difference(eager.outputs, flatten(output)[0], self._bounds) if eager is not None else ""
        moved = self._moved(eager.after) if eager is not None else ""
        if how or moved:
            what = f"its output differs {how}" if how else f"it leaves {moved} in another state"
            self.place = f"{_module_str(self._trace, fqn)}: {what}"

    def _moved(self, states: dict[str, str]) -> str:
        """A generator that is not in the state that it has in eager; "" if all are."""
        now = RandomState.now(self._device).parts()
        return next((name for name, state in states.items() if state != now[name]), "")

    def _differs(self, leaves: Sequence[Any], eager: Sequence[Any], values: dict[str, Any]) -> str:
        if len(leaves) != len(eager):
            return ""
        for leaf, expected in zip(leaves, eager, strict=True):
            if isinstance(leaf, Ref) and isinstance(expected, Tensor) and isinstance(values.get(leaf.name), Tensor):
                how = difference(expected, values[leaf.name], self._bounds.of_others)
                if how:
                    return how
        return ""


# -- the programs ------------------------------------------------------------------------------------------------------


def _in_programs(
    model: nn.Module,
    compilation: Compilation,
    inputs: Inputs,
    conditions: Conditions,
    calls: dict[_Key, _ModuleCall],
    values: dict[str, Tensor],
    bounds: Bounds,
) -> str:
    """The first module of which the programs compute something else than the recording says."""
    trace, device = compilation.trace, conditions.device
    copied = copy_of(model, trace, device)
    runtime, program = installed(copied, compilation, device)
    codes = {code.index: code for p in compilation.programs for code in p.stages}
    made: dict[str, Tensor] = {}
    whole: dict[str, nn.Module] = {}
    for index, stage in runtime.stages(program).items():
        names = codes[index].outputs
        stage.register_forward_hook(
            lambda _m, _a, output, names=names: made.update(
                (name, value.detach().clone())
                for name, value in zip(names, output, strict=True)
                if isinstance(value, Tensor)
            )
        )
        whole |= {path: stage.get_submodule(path) for path in codes[index].modules}
    finished: dict[_Key, _ModuleCall] = {}
    with _noting(whole, finished, conditions):
        run_programs(runtime, program, conditions, own_inputs(inputs, device))
    found: list[tuple[int, str, str]] = []
    for name, value in made.items():
        how = difference(values[name], value, bounds.of_others) if name in values else ""
        if how:
            found.append((trace.position(name), trace.calls[trace.node(name).call].fqn, how))
    ends = {call.fqn: call.last for call in reversed(trace.calls)}
    for key, call in finished.items():
        how = _first_difference(calls[key].outputs, call.outputs, bounds) if key in calls else ""
        if how:
            found.append((ends.get(key[0], len(trace.nodes)), key[0], how))
    if not found:
        return ""
    _, fqn, how = min(found)
    return f"{_module_str(trace, fqn)}: its output differs {how} (in the programs; the recording is right)"


def _first_difference(expected: Sequence[Any], found: Sequence[Any], bounds: Bounds) -> str:
    pairs = zip(expected, found, strict=False)
    both = ((a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor))
    return next((how for a, b in both if (how := difference(a, b, bounds.of_others))), "")
