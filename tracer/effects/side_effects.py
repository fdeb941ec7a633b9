"""Side effects of forward beside torch calls, noticed while it is recorded; this module combines the others here.

    smpc.tracer.effects.differentiation     autograd's graph, hooks, gradients
    smpc.tracer.effects.randomness          generators
    smpc.tracer.effects.torch_calls         settings of the process, and what threads do that forward hands work to
    smpc.tracer.operations.opaque           modules that are called whole

An effect that a trace cannot hold is an error of the module whose code has it (`Recorder.error`): the module is called whole if that is
right, otherwise the recording is refused. An error that the model's own code catches is raised again when its module ends.

`Ownership`: whose tensors a module reads while it runs, its own, under their own names, or others'. Calling a module again gives what it
gave only if it reads then what it has read while it was recorded. These are told by identity:

    torch.func.functional_call(self.block, weights, x)      other tensors are in the block's tables when it is called
    self.block.weight = other; self.block(x)                the same
    F.linear(x, self.list[0].weight)                        in `forward` of a module that the weight does not belong to

A call for which this holds is not made again by a stage; its nodes are, with the tensors that they have read.

`watching_conversions`: conversions of a module's tensors in forward, `self.router = self.router.to(torch.float32)`, `.half()`, `.cuda()`.

parameters, buffers that are so already    they stay as they are, and nothing is recorded; their types are guarded
others                                     refused, wherever: plain PyTorch would give a parameter other memory, and the optimizer another
                                           type; a buffer would have another type in the next step, on the rank of its stage alone
buffers that forward has computed          converted as by torch, which is recorded
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from smpc.errors import TraceError
from smpc.tracer.constants import references
from smpc.tracer.effects import differentiation, randomness, torch_calls
from smpc.tracer.ir import Node, StateSpec
from smpc.tracer.operations.whole_call import Run, WholeCall
from smpc.tracer.recording.node_tables import OpenCall
from smpc.tracer.recording.untraceable import current_line
from smpc.tracer.state.attribute_memory import Extent, Keeping
from smpc.tracer.state.fakes import FakeState

if TYPE_CHECKING:
    from smpc.tracer.recording.recorder import Recorder


from collections.abc import Callable
from typing import TYPE_CHECKING

from smpc.tracer.effects.differentiation import CONVERT
from smpc.tracer.effects.torch_calls import version_of

if TYPE_CHECKING:
    from smpc.tracer.recording.recorder import Recorder


_Table = dict[str, Tensor | None]


class Ownership:
    """The tensors that every module of a model holds when a recording starts, with fakes in place."""

    def __init__(self, model: nn.Module, state: FakeState) -> None:
        self._state = state
        modules = tables_in(model)
        self._parameters: dict[int, _Table] = {id(module): dict(module._parameters) for module in modules}
        self.buffers: dict[int, _Table] = {id(module): dict(module._buffers) for module in modules}  # as last seen
        self._owned: dict[int, frozenset[int]] = {}
        self._names = {id(module): name for name, module in model.named_modules()}

    def owned(self, module: nn.Module) -> frozenset[int]:
        """Ids of the parameters, buffers and tensor attributes of a module and of those in it."""
        found = self._owned.get(id(module))
        if found is None:
            found = frozenset(id(tensor) for inner in module.modules() for tensor in self._tensors(inner))
            self._owned[id(module)] = found
        return found

    def swapped(self, module: nn.Module) -> str:
        """The first parameter or buffer in a module that was replaced by another tensor; "" if there is none."""
        return next(filter(None, map(self._swapped, module.modules())), "")

    def _swapped(self, module: nn.Module) -> str:
        if id(module) not in self._parameters:
            return ""
        for table, known in (
            (module._parameters, self._parameters[id(module)]),
            (module._buffers, self.buffers[id(module)]),
        ):
            for key in dict.fromkeys((*known, *table)):
                if table.get(key) is not known.get(key):
                    name = self._names.get(id(module), "")
                    return f"{name}.{key}" if name else key
        return ""

    def rebound(self, opened: OpenCall) -> Iterator[tuple[str, Tensor]]:
        """Buffers that an ending call has rebound, by name: its module's own or, when the model's call ends, the remaining ones.

        Where other tensors are in their places for the time of the call, whoever has put them there takes them away.
        """
        is_model = opened.index == 0
        for module in tables_in(opened.module) if is_model else () if opened.is_swapped else (opened.module,):
            if id(module) not in self.buffers:
                continue  # made by a module that is called whole
            before = self.buffers[id(module)] if is_model else opened.buffers
            for key, value in module._buffers.items():
                if value is not None and value is not before.get(key):
                    self.buffers[id(module)][key] = value
                    name = self._names[id(module)]
                    yield (f"{name}.{key}" if name else key), value

    def replaced_parameter(self, outer: nn.Module) -> str:
        """The first parameter in a module that is another one now, or is new or gone."""
        for module in tables_in(outer):
            known: Mapping[str, Any] = self._parameters.get(id(module), {})
            for key in dict.fromkeys((*known, *module._parameters)):
                if known.get(key) is not module._parameters.get(key):
                    name = self._names.get(id(module), type(module).__name__)
                    return f"{name}.{key}" if name else key
        return ""

    def _tensors(self, module: nn.Module) -> Iterator[Tensor]:
        if isinstance(module, torch.jit.ScriptModule):
            yield from (*module.parameters(), *module.buffers())  # no fakes: it runs over its own tensors
        tables = (self._parameters.get(id(module), {}), self.buffers.get(id(module), {}))
        yield from (tensor for table in tables for tensor in table.values() if tensor is not None)
        for value in vars(module).values():
            items = (
                value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else (value,)
            )
            yield from (item for item in items if isinstance(item, Tensor) and id(item) in self._state.names)


def tables_in(model: nn.Module) -> list[nn.Module]:
    """The modules in a model whose tables of parameters and buffers are Python's; TorchScript's are not."""
    return [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]


_OWN_RANDOM = (
    "what to do: draw with torch's functions, from torch's generator; or have a module of its own do it, which is then called whole, and "
    "leave generators as they were (torch.random.fork_rng)"
)
_RESTORE = "what to do: put it back before forward returns, or set it outside the model"
_REGISTER = "what to do: register parameters in __init__, and write new values into them outside forward"
_COMPUTE = "what to do: make it an nn.Parameter, or compute it in forward"


class EffectWatch:
    """Watches one recording. `closely`: which module uses Python's or numpy's generators is found out, at a price."""

    def __init__(self, recorder: Recorder, model: nn.Module, closely: bool) -> None:
        self._recorder, self._closely = recorder, closely
        self.ownership = Ownership(model, recorder.state)
        self._generators = randomness.UsableGenerators(model)
        self._states = self._generators.states()
        self._has_used_others = False
        self._settings: torch_calls.Settings = ()
        self._whole: list[WholeCall] = []
        self._users: dict[str, str] = {}  # generator -> the module called whole that uses it
        self._failure: TraceError | None = None
        self._thread = threading.get_ident()
        self._keeping: list[int] = []  # storages of state that autograd keeps for the call that is being recorded
        self._kept: dict[int, dict[str, str]] = {}  # storage -> nodes, each with where it is
        self._overwritten: dict[int, str] = {}
        self.attributes = Keeping()
        self.converted: dict[int, None] = {}  # ids of modules, see `smpc.tracer.effects.side_effects`

    @contextmanager
    def active(self, mode: FakeTensorMode) -> Iterator[None]:
        """While the model runs, over fakes of that mode."""
        with ExitStack() as stack:
            stack.enter_context(torch_calls.watching_others(mode, self._note_others))
            stack.enter_context(differentiation.watching_backward(self._note_backward))
            stack.enter_context(torch_calls.kept_settings())
            stack.enter_context(randomness.watching(self._note_random))
            self._generators.stir()
            self._states = self._generators.states()
            self._settings = torch_calls.settings()
            yield

    @property
    def must_look_closely(self) -> bool:
        """Whether a generator beside torch's has been used, by unknown code."""
        return not self._closely and (self._has_used_others or bool(self._generators.used(self._states)))

    def refuse(self, what: str, way_out: str) -> NoReturn:
        """Raises the error of the module that is running."""
        self._failure = self._recorder.error(what, way_out=way_out)
        raise self._failure

    # -- what the recorder tells ---------------------------------------------------------------------------------------

    def has_effect(self, mark: str, args: Sequence[Any]) -> bool:
        """Whether a call with that mark (see `smpc.tracer.effects.differentiation`) has an effect on its first argument."""
        tensor: Tensor = args[0]
        fqn = self._recorder.state.names.get(id(tensor), "")
        if not fqn:
            if mark in differentiation.OF_GRAPH:
                self.refuse(f"forward uses the autograd graph of a value ({mark})", differentiation.WHOLE)
            return differentiation.changes_flag(mark, args) if mark in differentiation.OF_FLAG else mark != "grad"
        self.check_state(mark, fqn)
        if differentiation.changes_flag(mark, args):
            self.refuse(f"forward changes whether {fqn} requires grad ({mark})", differentiation.OUTSIDE)
        return False

    def check_state(self, mark: str, fqn: str) -> None:
        """Raises TraceError for operations on a parameter or buffer that even a module called whole must not do."""
        found = differentiation.FORBIDDEN.get(mark)
        if found is not None:
            why, way_out = found
            self.refuse_everywhere(f"forward {why.format(fqn=fqn)} ({mark})", way_out)

    def refuse_everywhere(self, what: str, way_out: str) -> NoReturn:
        """Raises an error for which no module is called whole."""
        self._failure = TraceError(str(self._recorder.error(what, way_out=way_out)))
        raise self._failure

    def node_added(self, name: str, is_random: bool) -> None:
        """A call has been recorded, as the node of that name."""
        here = self._here()
        for storage in self._keeping:
            self._kept.setdefault(storage, {}).setdefault(name, here)
        self._keeping.clear()
        self.attributes.node_added(name, here)
        is_inside = torch_calls.in_kernel() or self._recorder.muted  # transforms have settings of their own
        changed = "" if is_inside else torch_calls.changed_setting(self._settings, torch_calls.settings())
        if changed:
            self.refuse(f"forward changes {changed}", _RESTORE)
        if is_random:
            self._check_torch_generator()
            self._generators.draw()
        self._check_other_generators()

    def note_kept(self, storage: int) -> None:
        """Autograd keeps a parameter or buffer for the backward."""
        self._keeping.append(storage)

    @property
    def num_keeping(self) -> int:
        """How many of them autograd has kept so far for the node that is being recorded."""
        return len(self._keeping)

    def note_statistics(self, storages: Iterable[int], begun: int) -> None:
        """A call writes running statistics: what autograd keeps of them since it `begun` is not needed, its backward needs the batch's."""
        written = set(storages)
        self._keeping[begun:] = [storage for storage in self._keeping[begun:] if storage not in written]

    def note_overwritten(self, storages: Iterable[int]) -> None:
        """A call writes in place, autograd knowing of it or not."""
        for storage in storages:
            self._overwritten.setdefault(storage, self._here())

    def note_attributes(self, kept: Iterable[tuple[Extent, str]], written: Iterable[Extent]) -> None:
        """A module that is called whole has autograd keep memory of attributes, and writes into memory of others."""
        for extent, name in kept:
            self.attributes.keep(extent, name)
        self.attributes.write(written, self._here())

    def overwritten(
        self, specs: Sequence[StateSpec], nodes: Sequence[Node], outputs: Sequence[Any]
    ) -> tuple[tuple[str, str, str], ...]:
        """State and attributes that the backward needs and that forward overwrites: name, where it is read, where it is written."""
        both = [spec for spec in specs if spec.storage in self._kept and spec.storage in self._overwritten]
        is_any = both or self.attributes
        reached = differentiated(nodes, references(outputs)) if is_any else frozenset()
        found = []
        for spec in both:
            needed = [where for name, where in self._kept[spec.storage].items() if name in reached]
            found += [(spec.name, where, self._overwritten[spec.storage]) for where in needed[:1]]
        return (*found, *self.attributes.overwritten(reached))

    def enter(self, opened: OpenCall) -> None:
        """A module's code starts."""
        opened.modes, opened.buffers = torch_calls.modes(), dict(opened.module._buffers)
        opened.is_swapped = bool(self.ownership.swapped(opened.module))
        opened.whole = not opened.is_swapped
        self._check_other_generators()

    def leave(self, opened: OpenCall) -> None:
        """It ends."""
        self._check_other_generators()
        self._check_left(opened.modes, self._settings)
        self._check_torch_generator()
        if not opened.is_swapped:
            replaced = self.ownership.replaced_parameter(opened.module)
            if replaced:
                self.refuse(f"forward puts another tensor in the place of parameter {replaced}", _REGISTER)
        if self._failure is not None:
            raise self._failure

    def read(self, tensor: Tensor, open_calls: Sequence[OpenCall]) -> None:
        """A parameter, buffer or attribute is used: a module that it does not belong to is not called again by a stage."""
        self.check_untrained(tensor)
        for opened in open_calls:
            if id(tensor) not in self.ownership.owned(opened.module) and id(tensor) not in opened.given:
                opened.whole = False

    def check_untrained(self, tensor: Tensor) -> None:
        """Raises TraceError for a tensor attribute that changes with parameters."""
        state = self._recorder.state
        name, parameter = state.names.get(id(tensor), ""), state.trained.get(id(tensor))
        is_trained = bool(name) and tensor.requires_grad and id(tensor) not in state.originals
        if parameter is not None or is_trained:
            why = "requires grad" if parameter is None else f"shares the memory of {parameter}"
            self.refuse_everywhere(f"forward uses {name}, no parameter, which {why}", _COMPUTE)

    @contextmanager
    def whole(self, fqn: str, module: nn.Module, arguments: Any, run: Run) -> Iterator[WholeCall]:
        """Around the run of a module that is called whole."""
        with torch._C.DisableTorchFunction():
            call = WholeCall(self, self._recorder, fqn, module, arguments, run)
            self._check_swapped(call, module)
            self._check_torch_generator()
            self._check_other_generators()
            self._has_used_others |= bool(self._generators.used(self._states))
            self._generators.stir()
            states, of_torch = self._generators.states(), randomness.torch_state()
            tables = [(inner, dict(inner._buffers)) for inner in tables_in(module)]
        modes, settings = torch_calls.modes(), torch_calls.settings()
        self._whole.append(call)
        try:
            yield call
        finally:
            self._whole.pop()
            for inner, buffers in tables:
                inner._buffers.update(buffers)  # what it rebinds, it rebinds again
        self._check_left(modes, settings)
        with torch._C.DisableTorchFunction():
            self._check_swapped(call, module)
            self._check_generators_after(call, states, of_torch)
            call.finish()
        if self._failure is not None:
            raise self._failure

    # -- what is noticed -----------------------------------------------------------------------------------------------

    def _here(self) -> str:
        name = next((call.fqn for call in reversed(self._recorder.open) if call.fqn), "")
        line = current_line()
        return f"{line}{' in ' if line else ''}{f'module {name}' if name else 'the model'}"

    def _note_others(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Another thread has run an operation. An error waits until the module's code ends, which may wait for that thread."""
        if not self._whole:
            self._fail_later("another thread runs torch calls, which are not recorded")
            return
        self._recorder.meter.add(func, args, kwargs, out)
        if self._whole[-1].failure is None:
            with suppress(TraceError):
                self._whole[-1].note_others(func, args, kwargs)

    def _fail_later(self, what: str) -> None:
        if self._failure is None:
            self._failure = self._recorder.error(what)

    def _note_backward(self, outputs: Sequence[Any], inputs: Sequence[Any], accumulates: bool) -> None:
        if threading.get_ident() != self._thread:
            if self._whole:
                with suppress(TraceError):
                    self._whole[-1].note_backward(inputs, accumulates)
            return
        if torch._C._are_functorch_transforms_active() and not self._whole:
            return  # an error, or recorded, as the operations that it comes down to
        if self._whole:
            self._whole[-1].note_backward(inputs, accumulates)
        elif not self._recorder.in_transforms:  # of torch.func, the operations are recorded
            self.refuse("forward differentiates (torch.autograd)", differentiation.OWN_MODULE)

    def _note_random(self, name: str, seeds: bool) -> None:
        if threading.get_ident() != self._thread:
            self._states = self._generators.states()  # approximately: another thread draws
        elif self._whole:
            self._whole[-1].note_random(name, seeds)
        else:
            self.refuse(f"forward calls {name}", _OWN_RANDOM)

    def _check_torch_generator(self) -> None:
        if self._generators.is_torch_moved():
            self.refuse("forward seeds or sets torch's generator, here or before", _OWN_RANDOM)

    def _check_other_generators(self) -> None:
        used = self._generators.used(self._states) if self._closely and not self._whole else ()
        if used:
            self.refuse(f"forward uses {used[0]} generator, here or before", _OWN_RANDOM)

    def _check_left(self, modes: tuple[bool, bool], settings: torch_calls.Settings) -> None:
        now = torch_calls.modes()
        changed = torch_calls.changed_setting(settings, torch_calls.settings())
        if now != modes:
            changed = "grad mode" if now[0] != modes[0] else "inference mode"
        if changed:
            self.refuse(f"forward leaves {changed} changed", _RESTORE)

    def _check_swapped(self, call: WholeCall, module: nn.Module) -> None:
        swapped = self.ownership.swapped(module)
        if swapped:
            call.refuse(f"another tensor replaces {swapped}", _REGISTER)

    def _check_generators_after(self, call: WholeCall, states: tuple[Any, ...], of_torch: bytes) -> None:
        used = self._generators.used(states)
        self._states = self._generators.states()
        leaks = bool(used) or (
            call.is_real and not call.is_forked
        )  # in a real run, torch's generator is put back anyway
        leaks |= call.seeds.startswith("torch.cuda") and not call.is_forked  # put off until CUDA is initialized
        if randomness.torch_state() != of_torch or (call.seeds and leaks):
            call.refuse(f"it leaves a generator in another state ({call.seeds or 'torch'})", _OWN_RANDOM)
        for name in (*used, *call.generators):
            other = self._users.setdefault(name, call.fqn)
            if other != call.fqn and name not in randomness.EVERYONES:
                call.refuse(f"module {other!r} draws from the same generator ({name})", _OWN_RANDOM)


def differentiated(nodes: Sequence[Node], outputs: Sequence[str]) -> frozenset[str]:
    """The nodes whose backward runs if these outputs are differentiated: an index or a comparison has none, nor what leads only to it."""
    by_name = {node.name: node for node in nodes}
    writers: dict[str, list[str]] = {}
    for node in nodes:
        for name in node.mutates:
            writers.setdefault(name, []).append(node.name)
    found: set[str] = set()
    pending = list(outputs)
    while pending:
        node = by_name[pending.pop()]
        has_none = node.spec is not None and not node.spec.requires_grad and node.name not in writers
        if node.name in found or has_none:
            continue
        found.add(node.name)
        pending += [*node.inputs, *writers.get(node.name, ())]
    return frozenset(found)


_Convert = Callable[[Tensor], Tensor]


@contextmanager
def watching_conversions(recorder: Recorder) -> Iterator[None]:
    """In this context the model's modules are converted as a trace can hold it; others as by torch."""
    original, thread = nn.Module._apply, threading.get_ident()

    def apply(module: nn.Module, fn: _Convert, recurse: bool = True) -> Any:
        is_own = id(module) in recorder.modules and threading.get_ident() == thread
        if not is_own or torch.__future__.get_overwrite_module_params_on_conversion():
            return original(module, fn, recurse)  # type: ignore[no-untyped-call]
        for child in module.children() if recurse else ():
            child._apply(fn)  # type: ignore[no-untyped-call]
        for parameter in module._parameters.values():
            if parameter is not None:
                recorder.watch.converted[id(module)] = None
                _check_converted(recorder, parameter, fn)
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in recorder.state.names:
                _check_converted(recorder, buffer, fn)
            elif buffer is not None:
                module._buffers[name] = fn(buffer)
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


def _check_converted(recorder: Recorder, tensor: Tensor, fn: _Convert) -> None:
    """Raises TraceError unless the conversion of a parameter or buffer is the tensor as it was."""
    version = version_of(tensor)
    with torch.no_grad():
        found = fn(tensor)
    if found is tensor and version_of(tensor) == version:
        return
    before, after = (f"{value.dtype} on {value.device.type}" for value in (tensor, found))
    change = f"from {before} to {after}" if before != after else "in other memory, or with other values"
    lasting = "which lasts: from then on it would be trained in a type that its optimizer was not given"
    lasting = f", {lasting}" if before != after and isinstance(tensor, torch.nn.Parameter) else ""
    recorder.watch.refuse_everywhere(f"forward converts {recorder.known(tensor)} {change}{lasting}", CONVERT)
