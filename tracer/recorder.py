"""The recorder's notebook: every torch call and module call of one run over fake tensors becomes a node or a span.

`Recorder` is a TorchFunctionMode; `smpc.tracer.record` sets the stage for it. Tensors are known by identity and kept alive until the end,
so that identities stay unique. What a call writes in place is found by comparing tensors' version counters around it.
"""

from __future__ import annotations

import dataclasses
import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from smpc.errors import TraceError
from smpc.tracer import targets
from smpc.tracer.effects import running_statistics, same_memory, tensors_in, version_of
from smpc.tracer.fakes import FakeState
from smpc.tracer.guards import NoAnswerError, answer, shapes
from smpc.tracer.ir import Autocast, Guard, ModuleCall, Node, NodeKind, TensorSpec, Trace
from smpc.tracer.literals import Opaque, Ref, TraceDevice, is_constant, normalise
from smpc.tracer.measure import Meter, touched_bytes
from smpc.tracer.opaque import Same, probe, shape_rule
from smpc.tracer.places import current_line, innermost_line
from smpc.tracer.region_log import RegionLog
from smpc.tracer.regions import checkpoint_mark
from smpc.tracer.structure import Structure, flatten

_UNTRACEABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
# They return their argument, and what they change about it is no version.
_MARKING = ("requires_grad_", "detach_")
_WAY_OUT = (
    "what to do: compute the value outside the model and pass it in, "
    "or have the module called whole (leaf_modules=[...], smpc.mark_leaf)"
)
_SHAPE_RULE = "what to do: give the shapes of what it returns with smpc.register_shape_rule"


Answers = Sequence[tuple[Any, tuple[str, ...]]]  # of each guard: what was expected, dtypes


class UntraceableError(TraceError):
    """A TraceError inside `module`, the innermost one that was being called; None if that was the model itself."""

    def __init__(self, text: str, module: nn.Module | None) -> None:
        super().__init__(text)
        self.module = module


class _OpenCall:
    """A module call that has not returned."""

    __slots__ = (
        "arguments",
        "autocast",
        "bare",
        "first",
        "fqn",
        "grad_enabled",
        "index",
        "leaves",
        "module",
        "parent",
        "sequence",
    )

    def __init__(self, index: int, fqn: str, module: nn.Module, parent: int, first: int) -> None:
        self.index, self.fqn, self.module, self.parent, self.first = index, fqn, module, parent, first
        self.leaves: tuple[Any, ...] = ()
        self.arguments = Structure()
        self.grad_enabled = True
        self.autocast: Autocast | None = None
        self.bare = False
        self.sequence = -1  # number of the sequence that its children are the layers of


class Recorder(TorchFunctionMode):
    """Writes nodes while the model runs. One instance records one trace."""

    def __init__(
        self,
        state: FakeState,
        names: dict[int, str],
        leaf_modules: frozenset[str],
        device: torch.device,
        answers: Answers | None = None,
    ) -> None:
        super().__init__()
        self.state, self.modules, self.leaf_modules, self.device = state, names, leaf_modules, device
        self.meter = Meter()
        self.answers = answers
        self.nodes: list[Node] = []
        self.guards: list[Guard] = []
        self._samples: dict[str, torch.Tensor] = {}  # real inputs, by placeholder
        self.calls: list[ModuleCall | None] = []
        self.open: list[_OpenCall] = []
        self.regions = RegionLog()
        self.muted = 0
        self._node_of: dict[int, str] = {}  # id(tensor) -> node
        self._tensor_of: dict[str, torch.Tensor] = {}  # the inverse
        self._canonical = {name: spec.names[0] for spec in state.specs for name in spec.names}
        self._buffers = {
            spec.names[0]: fake for spec, fake in zip(state.specs, state.fakes, strict=True)
        }  # as last seen
        self._alive: list[Any] = []  # ids are unique only among living objects
        self._storages: dict[int, int] = {}
        self._storage_bytes: list[int] = []
        self._attributes: dict[str, str] = {}  # FQN -> node that reads it
        self._used_names: dict[str, int] = {}
        self._saved: list[int] = []
        self._inputs: tuple[Structure, tuple[Any, ...]] = (Structure(), ())
        self._ambient = {kind: self._autocast_state(kind) for kind in dict.fromkeys(("cpu", device.type))}
        self._state_storage = [self._storage(fake) for fake in state.fakes]
        self._state_storages = frozenset(self._state_storage)

    # -- inputs and output ---------------------------------------------------------------------------------------------

    def bind_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Fakes for the tensors in the inputs, each bound to a placeholder."""
        leaves, structure = flatten((args, kwargs))
        fakes: list[Any] = []
        refs: list[Any] = []
        for leaf, path in zip(leaves, structure.paths(), strict=True):
            if isinstance(leaf, torch.Tensor):
                fake = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=self.device)
                target = input_path(path)
                name = self._unique(re.sub(r"\W+", "_", target).strip("_"))
                self._add(
                    Node(
                        name,
                        NodeKind.PLACEHOLDER,
                        target,
                        spec=TensorSpec.of(fake),
                        storage=self._storage(fake),
                    )
                )
                self._bind(fake, name)
                if leaf.device.type != "meta" and not isinstance(leaf, FakeTensor):
                    self._samples[name] = leaf
                fakes.append(fake)
                refs.append(Ref(name))
            else:
                fakes.append(leaf)
                refs.append(normalise(leaf) if is_constant(normalise(leaf)) else Opaque(type(leaf).__name__))
        self._inputs = (structure, tuple(refs))
        built = structure.unflatten(fakes)
        return built[0], built[1]

    def finish(self, model: nn.Module, output: Any) -> Trace:
        """The trace of the run that returned `output`."""
        leaves, structure = flatten(output)
        outputs = tuple(self._argument(leaf, "the model's output") for leaf in leaves)
        specs = tuple(
            type(spec)(spec.names, spec.spec, spec.is_parameter, spec.is_persistent, storage)
            for spec, storage in zip(self.state.specs, self._state_storage, strict=True)
        )
        calls = tuple(call for call in self.calls if call is not None)
        assert len(calls) == len(self.calls), "a module call did not return"
        return Trace(
            f"{type(model).__module__}.{type(model).__qualname__}",
            model.training,
            tuple(self._settled(node) for node in self.nodes),
            calls,
            *self._inputs,
            structure,
            outputs,
            specs,
            tuple(self._storage_bytes),
            tuple(self.guards),
            self.regions.finished(calls),
        )

    def _settled(self, node: Node) -> Node:
        """The node with the grad flag that its tensor has in the end: `mask[0] = hidden` makes `mask` require grad."""
        tensor = self._tensor_of.get(node.name)
        if tensor is None or node.spec is None or tensor.requires_grad == node.spec.requires_grad:
            return node
        spec = dataclasses.replace(node.spec, requires_grad=tensor.requires_grad)
        return dataclasses.replace(node, spec=spec)

    # -- torch calls ---------------------------------------------------------------------------------------------------

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.muted:
            return self._run(func, args, kwargs)
        before = [(tensor, version_of(tensor)) for tensor in tensors_in((args, kwargs))]
        self.meter.reset()
        self._saved = []
        out = self._run(func, args, kwargs)
        results = list(tensors_in(out))
        kind = getattr(func, "__name__", "")
        written = [tensor for tensor, version in before if version_of(tensor) != version]
        written += running_statistics(func, args, kwargs)
        unchanged = not results or (isinstance(out, torch.Tensor) and any(out is tensor for tensor, _ in before))
        if unchanged and not written and kind not in _MARKING and kind != "__set__":
            return out  # nothing happened, or `x.to(dtype)` returned x itself
        self._record_call(func, args, kwargs, out, before, written)
        return out

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)
        except _UNTRACEABLE as error:
            what = f"torch.{getattr(func, '__name__', func)} needs the values of a tensor, or has no shape rule"
            if self.muted:
                raise
            try:
                with torch._C.DisableTorchFunction():
                    return self._ask(func, args, kwargs)
            except NoAnswerError as reason:
                raise self.error(f"{what} ({type(error).__name__}: {error}), and {reason}") from error

    def _ask(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What a call gives, known from the sample inputs or from `answers`; a guard says on what it rests."""
        target, args = targets.name_call(func, args)
        where = f"an argument of {target}"
        node_args = tuple(self._tree(arg, where) for arg in args)
        node_kwargs = tuple((key, self._tree(value, where)) for key, value in kwargs.items())
        if self.answers is not None:
            if len(self.guards) == len(self.answers):
                raise NoAnswerError("it was not asked when the answers were given")
            expected, dtypes = self.answers[len(self.guards)]
        else:
            with unset_fake_temporarily():
                found = answer(self.nodes, target, node_args, dict(node_kwargs), self._samples, self._read_buffer)
            tensors = list(tensors_in(found))
            expected = shapes(found) if tensors else found
            dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
        self.guards.append(Guard(target, node_args, node_kwargs, expected, dtypes, current_line()))
        if not dtypes:
            return expected
        fakes = [
            torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            for shape, dtype in zip(expected, dtypes, strict=True)
        ]
        wanting = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))
        fakes = [fake.requires_grad_().clone() if wanting and fake.is_floating_point() else fake for fake in fakes]
        return fakes[0] if len(fakes) == 1 else tuple(fakes)

    def _read_buffer(self, fqn: str) -> torch.Tensor:
        """The real buffer or tensor attribute of that name."""
        tensor = self.state.real_buffers.get(fqn)
        if tensor is None:
            raise NoAnswerError(f"it depends on parameter {fqn}")
        if tensor.device.type == "meta":
            raise NoAnswerError(f"buffer {fqn} has no values here, only a shape")
        return tensor

    def _record_call(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        out: Any,
        before: list[tuple[torch.Tensor, int]],
        written: list[torch.Tensor],
    ) -> None:
        try:
            target, args = targets.name_call(func, args)
        except KeyError as error:
            raise self.error(f"a function without a name was called: {error.args[0]}") from error
        where = f"an argument of {target}"
        node_args = tuple(self._tree(arg, where) for arg in args)
        node_kwargs = tuple((key, self._tree(value, where)) for key, value in kwargs.items())
        mutates = tuple(dict.fromkeys(self._name(tensor, where) for tensor in written))
        inputs = [tensor for tensor, _ in before]
        is_view = not written and all(any(same_memory(t, tensor) for tensor in inputs) for t in tensors_in(out))
        moved = 0 if is_view else sum(touched_bytes(tensor) for tensor in (*inputs, *tensors_in(out)))
        node = Node(
            self._unique(_short(target, node_args)),
            NodeKind.CALL_FUNCTION,
            target,
            node_args,
            node_kwargs,
            bytes_moved=moved,
            mutates=mutates,
        )
        self._add_measured(node, out)

    def _add_measured(self, node: Node, out: Any) -> None:
        """Adds the node of a call that has just returned `out`, with what the meter and autograd's hooks say of it."""
        single = out if isinstance(out, torch.Tensor) else None
        grad_enabled, autocast = self._context()
        self._add(
            dataclasses.replace(
                node,
                spec=TensorSpec.of(single) if single is not None else None,
                storage=self._storage(single) if single is not None else -1,
                call=self.open[-1].index if self.open else 0,
                flops=self.meter.flops,
                saved=tuple(dict.fromkeys(self._saved)),
                random=self.meter.random,
                grad_enabled=grad_enabled,
                autocast=autocast,
                source=current_line(),
            )
        )
        self._bind_result(out, node.name)

    def note_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Called for every tensor that autograd saves."""
        storage = self._storage(tensor)
        if storage not in self._state_storages:
            self._saved.append(storage)
        return tensor

    # -- module calls --------------------------------------------------------------------------------------------------

    def module_call(
        self, module: nn.Module, run: Callable[[], Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs one module call and writes down its span."""
        fqn = self.modules.get(id(module))
        if fqn is None or self.muted:
            return run()
        mark, parent = checkpoint_mark(module), self.open[-1] if self.open else None
        if parent is not None and parent.sequence >= 0:
            asked = checkpoint_mark(parent.module)
            assert asked is not None, parent.fqn
            with self.region(asked.preserve_rng_state, parent.sequence, asked.strategy):
                return self._call(fqn, module, run, args, kwargs)
        if mark is not None and not mark.strategy:
            with self.region(mark.preserve_rng_state):
                return self._call(fqn, module, run, args, kwargs)
        return self._call(fqn, module, run, args, kwargs)

    def _call(
        self, fqn: str, module: nn.Module, run: Callable[[], Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        if fqn in self.leaf_modules:
            return self._leaf_call(fqn, module, run, args, dict(kwargs))
        opened = _OpenCall(len(self.calls), fqn, module, self.open[-1].index if self.open else -1, len(self.nodes))
        overrides = next(cls for cls in type(module).__mro__ if "__call__" in vars(cls)) is not nn.Module
        opened.bare = overrides and self.regions.is_innermost(opened.parent)
        mark = checkpoint_mark(module)
        if mark is not None and mark.strategy:
            opened.sequence = self.regions.new_sequence()
        with torch._C.DisableTorchFunction():
            leaves, opened.arguments = flatten((args, dict(kwargs)))
            opened.leaves = tuple(self._argument(leaf, None) for leaf in leaves)
            opened.grad_enabled, opened.autocast = self._context()
        self.calls.append(None)
        self.open.append(opened)
        out = run()
        with torch._C.DisableTorchFunction():
            self._note_rebound_buffers(opened)
            self._close(opened, out)
        return out

    def _close(self, opened: _OpenCall, out: Any) -> None:
        assert self.open.pop() is opened
        leaves, structure = flatten(out)
        self.calls[opened.index] = ModuleCall(
            opened.fqn,
            type(opened.module).__name__,
            opened.parent,
            opened.first,
            len(self.nodes),
            opened.arguments,
            opened.leaves,
            structure,
            tuple(self._argument(leaf, None) for leaf in leaves),
            opened.grad_enabled,
            opened.autocast,
            opened.bare,
        )

    # -- checkpointed regions ------------------------------------------------------------------------------------------

    @contextmanager
    def region(
        self, preserve_rng_state: bool = True, sequence: int = -1, strategy: str = "", *, own: bool = False
    ) -> Iterator[None]:
        """What is recorded in this context is to be computed again for the backward pass, if there is one."""
        if self.muted or not torch.is_grad_enabled():
            yield
            return
        call = self.open[-1].index if self.open else 0
        with self.regions.region(call, lambda: len(self.nodes), preserve_rng_state, sequence, strategy, own=own):
            yield

    def _leaf_call(
        self, fqn: str, module: nn.Module, run: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        where = f"an argument of leaf module {fqn}"
        node_args = tuple(self._tree(arg, where) for arg in args)
        node_kwargs = tuple((key, self._tree(value, where)) for key, value in kwargs.items())
        self.meter.reset()
        self._saved = []
        watched = (*tensors_in((args, kwargs)), *module.parameters(), *module.buffers())
        before = [(tensor, version_of(tensor)) for tensor in watched]
        self.muted += 1
        try:
            out, written = self._run_whole(module, run, args, kwargs)
        finally:
            self.muted -= 1
        with torch._C.DisableTorchFunction():
            written += [tensor for tensor, version in before if version_of(tensor) != version]
            mutates = tuple(dict.fromkeys(self._name(tensor, where) for tensor in written))
            moved = sum(touched_bytes(tensor) for tensor in (*tensors_in((args, kwargs)), *tensors_in(out)))
            name = self._unique(re.sub(r"\W", "_", fqn))
            node = Node(name, NodeKind.CALL_MODULE, fqn, node_args, node_kwargs, bytes_moved=moved, mutates=mutates)
            self._add_measured(node, out)
        return out

    def _run_whole(
        self, module: nn.Module, run: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[torch.Tensor]]:
        """What a leaf returns, as fakes, and what it writes that version counters do not show."""
        rule = shape_rule(module)
        if rule is not None:
            return rule(module, *args, **kwargs), []
        try:
            return run(), []
        except Exception:  # fakes will not do: run it for real
            self._saved = []
        try:
            found = probe(module, args, kwargs, self.state, self.meter)
        except Exception as error:
            what = f"{type(module).__name__} cannot be called whole either: {type(error).__name__}: {error}"
            raise self.error(what, line=innermost_line(error), way_out=_SHAPE_RULE) from error
        inputs = flatten((args, kwargs))[0]
        tensors = [*tensors_in(inputs), *module.parameters(), *module.buffers()]
        self.meter.flops, self.meter.random = found.flops, found.random
        for position, num_bytes in found.saved:
            self._saved.append(self._storage(inputs[position]) if position >= 0 else self._new_storage(num_bytes))
        leaves = [self._fake(leaf, inputs) for leaf in found.leaves]
        return found.structure.unflatten(leaves), [tensors[i] for i in found.written]

    def _fake(self, described: Any, inputs: list[Any]) -> Any:
        """A fake tensor for what a real run returned."""
        if isinstance(described, Same):
            return inputs[described.position]
        if not isinstance(described, TensorSpec):
            return described
        fake = torch.empty_strided(described.shape, described.stride, dtype=described.torch_dtype, device=self.device)
        # A clone is no leaf of autograd, so that what follows may write into it.
        return fake.requires_grad_().clone() if described.requires_grad else fake

    def _note_rebound_buffers(self, opened: _OpenCall) -> None:
        """`self.count = self.count + 1` on a buffer is an effect: the module holds another tensor afterwards.

        Noted at the end of the module's call, or, when another module has done it, at the end of the model's.
        """
        is_model = opened.index == 0
        for prefix, module in opened.module.named_modules() if is_model else [(opened.fqn, opened.module)]:
            for key, value in module._buffers.items():
                fqn = f"{prefix}.{key}" if prefix else key
                known = self._canonical.get(fqn, fqn)
                if value is None or value is self._buffers.get(known):
                    continue
                self._buffers[known] = value
                ref, name = Ref(self._name(value, f"buffer {fqn}")), self._unique(f"set_{key}")
                self._add(Node(name, NodeKind.SET_ATTR, known, (ref,), call=opened.index, source=current_line()))

    # -- tensors to names ----------------------------------------------------------------------------------------------

    def _tree(self, value: Any, where: str) -> Any:
        """An argument with its tensors replaced by `Ref`s."""
        if type(value) in (tuple, list):
            return type(value)(self._tree(item, where) for item in value)
        if isinstance(value, torch.Size):
            return tuple(value)
        if isinstance(value, tuple):
            return tuple(self._tree(item, where) for item in value)
        if isinstance(value, dict):
            return {key: self._tree(item, where) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*(self._tree(item, where) for item in (value.start, value.stop, value.step)))
        return self._argument(value, where)

    def _argument(self, leaf: Any, where: str | None) -> Any:
        """A Ref or a constant. What is neither is an error, or `Opaque` when there is no `where` to blame."""
        if isinstance(leaf, torch.Tensor):
            if where is None and id(leaf) not in self._node_of and id(leaf) not in self.state.names:
                return Opaque("tensor")
            return Ref(self._name(leaf, where or ""))
        leaf = normalise(leaf)
        if isinstance(leaf, torch.device) and leaf.type == self.device.type:
            return TraceDevice()
        if is_constant(leaf):
            return leaf
        if where is None:
            return Opaque(type(leaf).__name__)
        raise self.error(f"{where} is a {type(leaf).__module__}.{type(leaf).__qualname__}, which a trace cannot hold")

    def _name(self, tensor: torch.Tensor, where: str) -> str:
        """The node whose value a tensor is."""
        found = self._node_of.get(id(tensor))
        if found is not None:
            return found
        fqn = self.state.names.get(id(tensor))
        if fqn is None:
            raise self.error(
                f"{where} is a tensor {tuple(tensor.shape)} that no recorded call returned and no module holds "
                "(from a custom autograd Function, numpy, or a global?)"
            )
        if fqn not in self._attributes:
            self._attributes[fqn] = name = self._unique(re.sub(r"\W+", "_", fqn).strip("_"))
            spec, storage = TensorSpec.of(tensor), self._storage(tensor)
            call = self.open[-1].index if self.open else 0
            self._add(Node(name, NodeKind.GET_ATTR, fqn, spec=spec, storage=storage, call=call))
        return self._attributes[fqn]

    def _bind(self, tensor: torch.Tensor, name: str) -> None:
        self._tensor_of.pop(self._node_of.get(id(tensor), ""), None)
        self._node_of[id(tensor)] = name
        self._tensor_of[name] = tensor
        self._alive.append(tensor)

    def _bind_result(self, out: Any, name: str) -> None:
        """Binds what a call returned: a tensor to the node itself, the parts of a tuple to getitem nodes."""
        if isinstance(out, torch.Tensor):
            if id(out) not in self.state.names or id(out) in self._node_of:
                self._bind(out, name)
            return
        parts: Iterator[tuple[Any, Any]] = iter(())
        if isinstance(out, (tuple, list)):
            parts = iter(enumerate(out))
        elif isinstance(out, dict):
            parts = iter(out.items())
        for key, item in parts:
            if not any(True for _ in tensors_in(item)):
                continue
            part = self._unique(f"{name}_{key}")
            single = item if isinstance(item, torch.Tensor) else None
            grad_enabled, autocast = self._context()
            self._add(
                Node(
                    part,
                    NodeKind.CALL_FUNCTION,
                    targets.GETITEM,
                    (Ref(name), key),
                    (),
                    TensorSpec.of(single) if single is not None else None,
                    self._storage(single) if single is not None else -1,
                    self.open[-1].index if self.open else 0,
                    grad_enabled=grad_enabled,
                    autocast=autocast,
                )
            )
            self._bind_result(item, part)

    def _add(self, node: Node) -> None:
        self.nodes.append(node)

    def _unique(self, base: str) -> str:
        if not base.isidentifier() or keyword.iskeyword(base):
            base = f"_{base}"
        count = self._used_names.get(base)
        if count is None:
            self._used_names[base] = 0
            return base
        while True:
            count += 1
            self._used_names[base] = count
            if f"{base}_{count}" not in self._used_names:
                self._used_names[f"{base}_{count}"] = 0
                return f"{base}_{count}"

    def _storage(self, tensor: torch.Tensor) -> int:
        if tensor.layout is not torch.strided:
            return -1
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = self._new_storage(storage.nbytes())
            self._alive.append(storage)
        return self._storages[storage._cdata]

    def _new_storage(self, num_bytes: int) -> int:
        self._storage_bytes.append(num_bytes)
        return len(self._storage_bytes) - 1

    # -- surroundings --------------------------------------------------------------------------------------------------

    def _context(self) -> tuple[bool, Autocast | None]:
        for kind, ambient in self._ambient.items():
            now = self._autocast_state(kind)
            if now != ambient:
                return torch.is_grad_enabled(), now
        return torch.is_grad_enabled(), None

    @staticmethod
    def _autocast_state(kind: str) -> Autocast:
        dtype = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        return Autocast(kind, dtype, torch.is_autocast_enabled(kind))

    def error(self, what: str, line: str | None = None, way_out: str = _WAY_OUT) -> UntraceableError:
        """An error that says where in the model it happened."""
        inner = next((call for call in reversed(self.open) if call.fqn), None)
        module = f"module {inner.fqn!r} ({type(inner.module).__name__})" if inner else "the model itself"
        line = current_line() if line is None else line
        text = f"cannot trace {module}{', ' if line else ''}{line}: {what}; {way_out}"
        return UntraceableError(text, inner.module if inner else None)


def current_recorder() -> Recorder | None:
    """The recorder of the trace that is being made, if one is."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return next((mode for mode in modes if isinstance(mode, Recorder)), None)


def input_path(path: str) -> str:
    """ "[1]['input_ids']" of (args, kwargs) as "input_ids"; "[0][2]" as "args[2]"."""
    if path.startswith("[0]"):
        return "args" + path[3:]
    match = re.match(r"\[1\]\['(\w+)'\](.*)", path, re.DOTALL)
    assert match, path
    return match[1] + match[2]


def _short(target: str, args: tuple[Any, ...]) -> str:
    """A node name from a target: "torch.Tensor.__rsub__" gives rsub, reading an attribute gives the attribute."""
    if target == targets.GETATTR:
        return str(args[1]).strip("_") or "attribute"
    return re.sub(r"\W", "_", target.rpartition(".")[2]).strip("_") or "call"
