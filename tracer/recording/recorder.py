"""The recorder's notebook: every torch call and module call of one run over fake tensors becomes a node or a span.

`Recorder` is a TorchFunctionMode; `smpc.tracer.record` sets the stage for it. Tensors are identified by id
(`smpc.tracer.recording.node_tables`). In-place writes of a call are found by comparing tensors' version counters around it.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from smpc.errors import TraceError
from smpc.tracer import targets
from smpc.tracer.constants import Opaque, Ref, is_constant, normalise, references
from smpc.tracer.effects import torch_calls
from smpc.tracer.effects.differentiation import mark_of
from smpc.tracer.effects.randomness import ModuleGenerators
from smpc.tracer.effects.side_effects import EffectWatch
from smpc.tracer.effects.torch_calls import CallModes, dense, running_statistics, tensors_in, version_of
from smpc.tracer.environment.reads import Reads
from smpc.tracer.input_guards import Answers, Questions, is_fixed
from smpc.tracer.ir import STRIDED_VIEW, ModuleCall, Node, NodeKind, TensorSpec, Trace, strided_view_arguments
from smpc.tracer.left_inputs import left_in
from smpc.tracer.operations.left_behind import LeftBehind
from smpc.tracer.operations.meter import WAY_OUT, DtypeError, Meter, moved_bytes
from smpc.tracer.operations.value_queries import (
    REQUIRE,
    UNTRACEABLE,
    DataSized,
    Values,
    is_assertion,
    is_ctc,
    is_packed,
    run_ctc,
    run_packed,
)
from smpc.tracer.patches import is_higher_order, run_higher_order
from smpc.tracer.recording.leaf_calls import LeafCalls
from smpc.tracer.recording.node_tables import (
    AttributeWrites,
    Identities,
    NodeNames,
    OpenCall,
    is_within,
    parts_of,
    short_name,
)
from smpc.tracer.recording.references import References
from smpc.tracer.recording.untraceable import (
    BUILD_WHOLE,
    CALL_WHOLE,
    REGISTER_HOOK,
    UntraceableError,
    current_line,
    has_users_hook,
    is_users,
)
from smpc.tracer.regions import RegionLog, checkpoint_mark
from smpc.tracer.state.attribute_values import AttributeValues
from smpc.tracer.state.fakes import FakeState
from smpc.tracer.structure import Structure, flatten, input_path

_NO_DATA = "its data is not allocated yet"  # a kernel has read the memory of a fake tensor
_REGISTER = "what to do: register it as a buffer (register_buffer(..., persistent=False) where a state_dict is to have none of it)"


NodeArguments = tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]  # of a node: args, kwargs
TorchCall = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]  # (func, args, kwargs)


class Recorder(TorchFunctionMode):
    """Writes nodes while the model runs. One instance records one trace."""

    def __init__(
        self,
        model: nn.Module,
        state: FakeState,
        names: dict[int, str],
        leaf_modules: frozenset[str],
        device: torch.device,
        generators: ModuleGenerators,
        answers: Answers | None = None,
        shown: Collection[str] = (),
        sizes: DataSized | None = None,
        buffers: Mapping[str, torch.Tensor] | None = None,
        closely: bool = False,
    ) -> None:
        super().__init__()
        self.reads = Reads(names, state, self)
        self._shown_paths, self._shown = frozenset(shown), set[str]()
        self.state, self.modules, self.leaf_modules, self.device = state, names, leaf_modules, device
        self.meter = Meter(self._note_moved)
        self.questions = Questions(state, device, answers, buffers or {})
        self.sizes = sizes or DataSized()
        self._values = Values(self)
        self.nodes: list[Node] = []
        self.calls: list[ModuleCall | None] = []
        self.open: list[OpenCall] = []
        self.writes, self.regions = AttributeWrites(), RegionLog()
        self.registrars: dict[str, str] = {}  # modules on which forward registers hooks, and whose code does
        self.differentiating: list[str] = []
        self.muted = 0
        self.in_transforms = 0  # how many times it is muted by transforms, whose operations are recorded
        self._inside: TorchCall | None = None  # what torch calls inside a call that is recorded as one go through
        self._tensors = Identities()
        self._canonical = {name: spec.names[0] for spec in state.specs for name in spec.names}
        self.generators = generators
        self._model, self._names = model, NodeNames()
        self.saved: list[int] = []  # storages that autograd keeps for the call that is measured
        self.references = References(self, self._tensors, self._names)
        self._leaf_calls = LeafCalls(self, self._tensors, self._names)
        self.watch = EffectWatch(self, model, closely)
        self._inputs: tuple[Structure, tuple[Any, ...]] = (Structure(), ())
        self._given: Any = ((), {})  # to forward
        self._given_leaves: list[Any] = []
        self.modes_of_calls = CallModes(device)
        self._state_storage = [self._tensors.storage(fake) for fake in state.fakes]
        self._state_storages = frozenset(self._state_storage)
        self.attributes, self.left = AttributeValues(state), LeftBehind(device)

    # -- inputs and output ---------------------------------------------------------------------------------------------

    def bind_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, differentiates: bool = False
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Fakes for the tensors in the inputs, each bound to a placeholder. `differentiates`: they require grad where the inputs do."""
        leaves, structure = flatten((args, kwargs))
        fakes: list[Any] = []
        refs: list[Any] = []
        for leaf, path in zip(leaves, structure.paths(), strict=True):
            if isinstance(leaf, torch.Tensor):
                fake = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=self.device)
                if differentiates and leaf.requires_grad:
                    fake = fake.requires_grad_().clone()  # no leaf: forward may write into it
                target = input_path(path)
                name = self._names.unique(re.sub(r"\W+", "_", target).strip("_"))
                storage = self._tensors.storage(fake)
                self.nodes.append(Node(name, NodeKind.PLACEHOLDER, target, spec=TensorSpec.of(fake), storage=storage))
                self._tensors.bind(fake, name)
                if path in self._shown_paths:
                    self._shown.add(name)
                if leaf.device.type != "meta" and not isinstance(leaf, FakeTensor):
                    self.questions.samples[name] = leaf
                fakes.append(fake)
                refs.append(Ref(name))
            else:
                fakes.append(leaf)
                refs.append(normalise(leaf) if is_constant(normalise(leaf)) else Opaque(type(leaf).__name__))
        self._inputs = (structure, tuple(refs))
        self._given, self._given_leaves = structure.unflatten(fakes), fakes
        return self._given[0], self._given[1]

    def finish(self, output: Any) -> Trace:
        """The trace of the run that returned `output`."""
        leaves, structure = flatten(output)
        structure.check_classes()
        outputs = tuple(self.references.argument(leaf, "the model's output") for leaf in leaves)
        left = left_in(
            self._given,
            self._given_leaves,
            self._inputs[0],
            lambda leaf: self.references.argument(leaf, "what forward leaves in its inputs"),
        )
        specs = tuple(
            type(spec)(spec.names, spec.spec, spec.is_parameter, spec.is_persistent, storage)
            for spec, storage in zip(self.state.specs, self._state_storage, strict=True)
        )
        calls = tuple(call for call in self.calls if call is not None)
        assert len(calls) == len(self.calls), "a module call did not return"
        storages = {node.name: node.storage for node in self.nodes}
        written = {storages[name]: i for i, node in enumerate(self.nodes) for name in node.mutates}
        settled = (self._settled(node, written.get(node.storage, 0) > i) for i, node in enumerate(self.nodes))
        calls, nodes = self.writes.marked(calls), tuple(settled)
        self._values.check()
        return Trace(
            f"{type(self._model).__module__}.{type(self._model).__qualname__}",
            self._model.training,
            nodes,
            calls,
            *self._inputs,
            structure,
            outputs,
            specs,
            tuple(self._tensors.storage_bytes),
            tuple(self.questions.guards),
            self.regions.finished(calls),
            tuple(self.differentiating),
            self.watch.overwritten(specs, nodes, outputs),
            left=left[0],
            left_leaves=left[1],
        )

    def _settled(self, node: Node, is_written: bool) -> Node:
        """The node with the grad flag that its tensor has in the end: `mask[0] = hidden` makes `mask` require grad.

        `is_written`: whether a later node writes into its memory, so that no copy can take the place of a view.
        """
        if node.target == STRIDED_VIEW and is_written:
            node = dataclasses.replace(node, args=(*node.args[:-1], False))
        tensor = self._tensors.tensor_of(node.name)
        if tensor is None or node.spec is None or tensor.requires_grad == node.spec.requires_grad:
            return node
        return dataclasses.replace(node, spec=dataclasses.replace(node.spec, requires_grad=tensor.requires_grad))

    # -- torch calls ---------------------------------------------------------------------------------------------------

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.reads.calls.pause()
        try:
            return self._torch_call(func, types, args, kwargs or {})
        finally:
            self.reads.calls.resume()

    def _torch_call(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        if self.muted:
            if self._inside is None:
                return self.run(func, args, kwargs)
            if torch_calls.is_of_memory(func) and is_users(sys._getframe(2)):
                raise self.error(f"torch.Tensor.{func.__name__} says where a tensor is in memory")  # a fake is nowhere
            given = list(tensors_in((args, kwargs)))
            self.attributes.note(given)
            self.attributes.note_outside(given)
            return self._inside(func, args, kwargs)
        if torch_calls.in_kernel():
            return self._in_kernel(func, args, kwargs)
        if torch_calls.in_transform(args, kwargs):
            name = getattr(func, "__name__", func)
            raise self.error(f"torch.{name} is called under torch.vmap, torch.func.grad or the like")
        if torch_calls.is_of_memory(func) and is_users(sys._getframe(2)):
            raise self.error(f"torch.Tensor.{func.__name__} says where a tensor is in memory")
        if torch_calls.makes_text(func, args):
            return self.reads.text(sys._getframe(2), self.known(args[0]))
        if (other := torch_calls.override(tuple(types))) is not None:
            with self:
                return other.__torch_function__(func, types, args, kwargs)
        if is_higher_order(func):
            return run_higher_order(self, func, args, kwargs)
        before = [(tensor, version_of(tensor)) for tensor in tensors_in((args, kwargs))]
        self.attributes.note(tensor for tensor, _ in before)
        mark = mark_of(func)
        has_effect = bool(mark) and self.watch.has_effect(mark, args)
        self.begin_call()
        out = self.run(func, args, kwargs)
        results = list(tensors_in(out))
        written = self.written(before)
        self._check_attributes(self.attributes.written(written))
        written += self.statistics(func, args, kwargs)
        self.watch.note_overwritten([self._tensors.storage(tensor) for tensor in written])
        unchanged = not results or (isinstance(out, torch.Tensor) and any(out is tensor for tensor, _ in before))
        if has_effect or is_assertion(func):
            written = [args[0]]  # what comes later finds another tensor, or is not reached
        if unchanged and not written and (mark or getattr(func, "__name__", "") != "__set__"):
            return out  # nothing happened, or `x.to(dtype)` returned x itself
        real = torch_calls.from_array(args, kwargs, out)
        if real is not None:
            self.add_constant(real, out)
            return out
        try:
            target, args = targets.name_call(func, args)
        except KeyError as error:
            raise self.error(f"a function without a name was called: {error.args[0]}") from error
        args, kwargs = targets.plain_arguments(func, args, kwargs)
        if "as_strided" in target:
            if short_name(target, args) != "as_strided":
                raise self.error(f"{target} depends on where a tensor is in memory: use as_strided")
            target, args, kwargs = STRIDED_VIEW, strided_view_arguments(args, kwargs, out), {}
        moved = moved_bytes([tensor for tensor, _ in before], results, bool(written))
        self.add_call(target, self.arguments(target, args, kwargs), out, written, moved)
        return out

    def written(self, before: Sequence[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
        """Those tensors, each with its version from before, that the call which `begin_call` began has written into."""
        by_schema = {id(tensor) for tensor in self.meter.written}
        return [tensor for tensor, version in before if version_of(tensor) != version or id(tensor) in by_schema]

    def statistics(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], begun: int = 0
    ) -> list[torch.Tensor]:
        """Running statistics that a call has just written. `begun`: how much autograd kept for the node when the call began."""
        found = running_statistics(func, args, kwargs)
        self.watch.note_statistics([self._tensors.storage(tensor) for tensor in found], begun)
        return found

    def _check_attributes(self, written: str) -> None:
        if written:
            raise self.error(f"forward writes into {written}", way_out=_REGISTER)

    def _note_moved(self, tensor: torch.Tensor) -> None:
        name = self.state.names.get(id(tensor), "")
        if name:
            self.watch.check_state("set_", name)
        elif not self.muted and not torch_calls.in_kernel():
            raise self.error("torch.Tensor.set_ gives a tensor other memory")

    def add_check(self, valid: torch.Tensor, message: str) -> None:
        """The node that raises an error with this message unless all of `valid` is true."""
        self.begin_call()
        self.add_call(REQUIRE, self.arguments(REQUIRE, (valid, message), {}), None, [valid], 0)

    def _in_kernel(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs what C++ code calls by itself; only data that it takes into the run is recorded."""
        out, real = func(*args, **kwargs), torch_calls.lifted(func, args)
        if real is not None and not self.known(real):
            self.add_constant(real, out)
        return out

    def add_constant(self, real: torch.Tensor, out: torch.Tensor) -> str:
        """The node that makes a tensor which comes from elsewhere."""
        self.reads.constant(real)
        with torch._C.DisableTorchFunction():
            arguments = torch_calls.constant(real)
            if arguments is None:
                raise self.references.unknown(real, "a tensor")
            self.begin_call()
            self.add_call(torch_calls.CONSTANT, arguments, out, (), 0)
            return self._tensors.node_of(out)

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What a torch call returns, measured; an error where its result depends on values that a recording does not have."""
        if torch_calls.is_of_real(func, args):
            self.attributes.give(args[0])
            return torch_calls.values_of_real(func, args, kwargs, self.reads.constant)
        if torch_calls.works_on_elements(func):
            raise self.error(f"torch.Tensor.{func.__name__} calls Python with the values of a tensor")
        if is_packed(func, args):
            out, self.meter.flops = run_packed(args)
            return out
        func = run_ctc if is_ctc(func) else func
        try:
            keys = self.sizes.keys((args, kwargs))
            return self.sizes.run(keys, self.meter, func, args, kwargs) if keys else func(*args, **kwargs)
        except DtypeError as error:
            name = f"torch.{getattr(func, '__name__', func)}"
            raise TraceError(str(self.error(f"{name}: {error}", way_out=WAY_OUT))) from None
        except (RuntimeError, *UNTRACEABLE) as error:
            if self.muted or not (isinstance(error, UNTRACEABLE) or _NO_DATA in str(error)):
                raise
            return self._values.call(func, args, kwargs, error)

    def arguments(self, target: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NodeArguments:
        """The arguments of a node that calls `target`."""
        where = f"an argument of {target}"
        node_args = tuple(self.references.tree(arg, where) for arg in args)
        return node_args, tuple((key, self.references.tree(value, where)) for key, value in kwargs.items())

    def add_call(
        self, target: str, arguments: NodeArguments, out: Any, written: Sequence[torch.Tensor], bytes_moved: int
    ) -> None:
        """Adds the node of a call that has just returned `out` and has written into some of its arguments."""
        args, kwargs = arguments
        name = self._names.unique(short_name(target, args))
        mutates = tuple(dict.fromkeys(self.references.name(tensor, f"an argument of {target}") for tensor in written))
        if any(written_name in self.references.outside for written_name in mutates):
            raise self.error(f"{target} writes into a tensor that no module holds: register it as a buffer")
        mutates += tuple(name for name in references((args, dict(kwargs))) if name in self.references.drawn)
        node = Node(name, NodeKind.CALL_FUNCTION, target, args, kwargs, bytes_moved=bytes_moved, mutates=mutates)
        self.add_measured(node, out)

    def add_measured(self, node: Node, out: Any) -> None:
        """Adds the node of a call that has just returned `out`, with the measurements of the meter and of autograd's hooks."""
        spec, storage = self._described(out)
        grad_enabled, autocast = self.modes_of_calls.now()
        self.nodes.append(
            dataclasses.replace(
                node,
                spec=spec,
                storage=storage,
                call=self.call_index,
                flops=self.meter.flops,
                saved=tuple(dict.fromkeys(self.saved)),
                random=self.meter.random,
                grad_enabled=grad_enabled,
                autocast=autocast,
                source=current_line(),
            )
        )
        self._bind_result(out, node.name)
        self.watch.node_added(node.name, self.meter.random)

    def begin_call(self) -> None:
        """Measurements from now on belong to the call that `add_call` adds."""
        self.meter.reset()
        self.saved = []

    @contextmanager
    def inside_call(self, run: TorchCall | None = None) -> Iterator[None]:
        """Operations in this context are part of one call, and not recorded; torch calls in it go through `run`."""
        self.muted += 1
        self._inside, around = run, self._inside
        try:
            yield
        finally:
            self.muted -= 1
            self._inside = around

    def known(self, tensor: torch.Tensor) -> str:
        """The name of a tensor that a node has returned, or of a parameter or buffer; "" for others."""
        return self._tensors.node_of(tensor) or self.state.names.get(id(tensor), "")

    def fakes(self) -> list[torch.Tensor]:
        """The fake tensors of the recording."""
        return self._tensors.fakes()

    def is_shown(self, tensor: torch.Tensor) -> bool:
        """Whether libraries may look at the values of a recorded tensor."""
        name = self._tensors.node_of(tensor)
        return bool(name) and is_fixed(self.nodes, (name,), self._shown)

    def note_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Called for every tensor that autograd saves."""
        storage = self._tensors.storage(tensor)
        if storage in self._state_storages:
            self.watch.note_kept(storage)
        else:
            self.saved.append(storage)
            found = self.attributes.extent(tensor)
            if found is not None:
                self.watch.attributes.keep(*found)
        return tensor

    def amend_saved(self, position: int, tensors: Sequence[torch.Tensor]) -> None:
        """Adds to the tensors that autograd saves for the node at that position."""
        node, self.saved = self.nodes[position], []
        for tensor in tensors:
            self.note_saved(tensor)
        self.nodes[position] = dataclasses.replace(node, saved=tuple(dict.fromkeys((*node.saved, *self.saved))))

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
        if mark is not None and (mark.is_member or not mark.strategy):
            sequence = self.regions.of_list(parent.index if parent else -1, fqn) if mark.is_member else -1
            with self.region(mark.preserve_rng_state, sequence, mark.strategy):
                return self._call(fqn, module, run, args, kwargs)
        return self._call(fqn, module, run, args, kwargs)

    @property
    def is_unseen(self) -> bool:
        """Whether what happens is part of one call that runs again as it is."""
        return self.muted > self.in_transforms

    def context(self) -> str:
        """The FQN of the module whose code runs."""
        return self.open[-1].fqn if self.open else ""

    def note_write(self, module: nn.Module, name: str, value: Any) -> None:
        """Called for every attribute that is set on a module; buffers are looked at when its call ends."""
        owner = self.modules.get(id(module))
        if isinstance(value, nn.Module) and owner is not None and not self.muted and self._is_new(value):
            fqn = f"{owner}.{name}" if owner else name
            raise self.error(f"forward puts a new {type(value).__name__} into the model, as {fqn}", way_out=BUILD_WHOLE)
        self.reads.write(module, name)
        if owner is not None and self.open and not self.muted and name not in (*module._buffers, *module._parameters):
            self.writes.note(owner, self.open[-1].fqn)

    def note_hook(self, module: nn.Module, hook: Any, *, is_forward: bool) -> None:
        """Called for every hook that is registered on a module. What a script's does is recorded: no stage calls its module without
        the code that has registered it."""
        owner = self.modules.get(id(module))
        if owner is None or not self.open or self.muted or not has_users_hook((hook,)):
            return
        is_in_leaf = any(is_within(owner, leaf) for leaf in self.leaf_modules)
        if is_in_leaf or not is_forward:
            kind, why = "hook" if is_forward else "backward hook", ", which is called whole" if is_in_leaf else ""
            raise self.error(f"forward registers a {kind} on module {owner!r}{why}", way_out=REGISTER_HOOK)
        self.registrars[owner] = self.open[-1].fqn
        self.writes.note(owner, self.open[-1].fqn)

    def _is_new(self, module: nn.Module) -> bool:
        """Whether a module that holds others, parameters or buffers is none of the model's."""
        is_empty = not (module._modules or module._parameters or module._buffers)
        return id(module) not in self.modules and not is_empty

    def _call(
        self, fqn: str, module: nn.Module, run: Callable[[], Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        if fqn in self.leaf_modules:
            return self._leaf_calls.call(fqn, module, run, args, dict(kwargs))
        self._check_attributes(self.attributes.written_by_python())
        opened = OpenCall(len(self.calls), fqn, module, self.open[-1].index if self.open else -1, len(self.nodes))
        self.generators.check(self.error)
        overrides = next(cls for cls in type(module).__mro__ if "__call__" in vars(cls)) is not nn.Module
        opened.bare = overrides and self.regions.is_innermost(opened.parent)
        mark = checkpoint_mark(module)
        if mark is not None and mark.strategy and not mark.is_member:
            opened.sequence = self.regions.new_sequence()
        with torch._C.DisableTorchFunction():
            leaves, opened.arguments = flatten((args, dict(kwargs)))
            opened.leaves = tuple(self.references.argument(leaf, None) for leaf in leaves)
            opened.given = frozenset(id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
            opened.grad_enabled, opened.autocast = self.modes_of_calls.now()
        self.calls.append(None)
        self.open.append(opened)
        self.watch.enter(opened)
        out = run()
        with torch._C.DisableTorchFunction():
            self.watch.leave(opened)
            self._check_attributes(self.attributes.written_by_python())
            self._note_rebound_buffers(opened)
            self.generators.check(self.error)
            self._close(opened, out)
        return out

    def _close(self, opened: OpenCall, out: Any) -> None:
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
            tuple(self.references.argument(leaf, None) for leaf in leaves),
            opened.grad_enabled,
            opened.autocast,
            opened.bare,
            opened.whole,
        )

    # -- checkpointed regions ------------------------------------------------------------------------------------------

    @contextmanager
    def region(
        self, preserve_rng_state: bool = True, sequence: int = -1, strategy: str = "", *, own: bool = False
    ) -> Iterator[None]:
        """Operations recorded in this context are to be computed again for the backward pass, if there is one."""
        if self.muted or not torch.is_grad_enabled():
            yield
            return
        call = self.call_index
        with self.regions.region(call, lambda: len(self.nodes), preserve_rng_state, sequence, strategy, own=own):
            yield

    def _note_rebound_buffers(self, opened: OpenCall) -> None:
        """`self.count = self.count + 1` on a buffer is an effect: the module holds another tensor afterwards.

        Noted at the end of the module's call, or, when another module has done it, at the end of the model's.
        """
        for fqn, value in self.watch.ownership.rebound(opened):
            known = self._canonical.get(fqn, fqn)
            ref, name = (
                Ref(self.references.name(value, f"buffer {fqn}")),
                self._names.unique(f"set_{fqn.rpartition('.')[2]}"),
            )
            self.nodes.append(Node(name, NodeKind.SET_ATTR, known, (ref,), call=opened.index, source=current_line()))

    # -- results -------------------------------------------------------------------------------------------------------

    def _described(self, value: Any) -> tuple[TensorSpec | None, int]:
        """The spec and the storage of a node's result; None and -1 if it is not a tensor."""
        tensor = dense(value)
        if tensor is None:
            return None, -1
        spec = None if self.sizes.keys(tensor) else TensorSpec.of(tensor)
        return spec, self._tensors.storage(tensor)

    def _bind_result(self, out: Any, name: str) -> None:
        """Binds what a call returned: a tensor to the node itself, the parts of a tuple to getitem nodes."""
        if isinstance(out, torch.Tensor):
            if id(out) not in self.state.names or self._tensors.node_of(out):
                self._tensors.bind(out, name)
            return
        for key, item in parts_of(out):
            if not any(True for _ in tensors_in(item)):
                continue
            part = self._names.unique(f"{name}_{key}")
            spec, storage = self._described(item)
            grad_enabled, autocast = self.modes_of_calls.now()
            node = Node(
                part, NodeKind.CALL_FUNCTION, targets.GETITEM, (Ref(name), key), (), spec, storage, self.call_index
            )
            self.nodes.append(dataclasses.replace(node, grad_enabled=grad_enabled, autocast=autocast))
            self._bind_result(item, part)

    # -- surroundings --------------------------------------------------------------------------------------------------

    @property
    def call_index(self) -> int:
        """The number of the innermost open module call."""
        return self.open[-1].index if self.open else 0

    def error_in(self, fqn: str, what: str, way_out: str = CALL_WHOLE) -> UntraceableError:
        """An error that says in which module it happened."""
        return UntraceableError.inside(self._model.get_submodule(fqn), fqn, "", what, way_out)

    def error(self, what: str, line: str | None = None, way_out: str = CALL_WHOLE) -> UntraceableError:
        """An error that says where in the model it happened."""
        inner = next((call for call in reversed(self.open) if call.fqn), None)
        line = current_line() if line is None else line
        return UntraceableError.inside(inner.module if inner else None, inner.fqn if inner else "", line, what, way_out)


def current_recorder() -> Recorder | None:
    """The recorder of the trace that is being made, if one is."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return next((mode for mode in modes if isinstance(mode, Recorder)), None)
