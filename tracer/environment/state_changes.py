"""Changes of a recording that the next call of the model would find.

State that a recording's Python reads and then changes: a counter, a cache, a recurrent state.

The next call of the model would find another value, so a trace of one call does not hold for it. Three ways out, tried in this order:

    settled     a second recording from what the first has left changes nothing more and is the same trace, but for cached tensors that
                depend on sizes alone: a cache of a mask. The trace holds for both values
    whole       the state belongs to one module and is used by its own code alone: the module is called whole, and its Python runs
    refused     everything else: an error that names the state

`Survivors`: fake tensors that outlive the recording that made them, in a cache or a global: the next call of the model would meet them.

    with Survivors() as survivors:
        survivors.watch(fake)
        ...                                 # the recording
    survivors.check()                       # forgets what functools' caches have kept; TraceError for what is kept elsewhere

Objects in cycles are no survivors, but only the garbage collector can tell. It looks at what the recording has made alone: everything
older is frozen meanwhile.

`check_histories`: parameters and buffers that forward leaves with the autograd graph of what it has written into them.

    self.mean = 0.9 * self.mean + hidden.mean(0)            the next call meets a tensor that hangs on the graph of this one
    self.mean = 0.9 * self.mean.detach() + hidden.mean(0)   the next call lets go of it

A recording meets these tensors without a graph, as the first call does. Its trace holds for later calls if no output hangs on what they
were: plain PyTorch would differentiate through the earlier call a second time, and fail. One that has a graph before the first call, as it
was computed from parameters, is refused if anything uses it.
"""

from __future__ import annotations

import gc
import inspect
import traceback
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, ModuleType, TracebackType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from smpc.errors import TraceError
from smpc.tracer.constants import Ref
from smpc.tracer.environment.environment_guards import EnvironmentGuard, shown
from smpc.tracer.environment.process_questions import CACHE
from smpc.tracer.environment.value_snapshots import Never
from smpc.tracer.input_guards import NoAnswerError, is_fixed, values_of
from smpc.tracer.ir import Node, NodeKind, Trace
from smpc.tracer.operations.value_queries import SizeAskedError
from smpc.tracer.recording.node_tables import is_within
from smpc.tracer.recording.untraceable import UntraceableError, has_users_hook
from smpc.tracer.state.fakes import untrained

_WAY_OUT = (
    "what to do: pass it to the model as an input and return its new value, keep it as a tensor in a registered buffer, or keep it in a "
    "submodule that nobody else's code reads or writes, which is then called whole"
)
_HOLD = "what to do: hold the object itself, or read the reference in a submodule that nobody else's code reads, which is then called whole"


class UnsettledError(Exception):
    """The state that the run has left depends on more than sizes."""


_HOOK_TABLES = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


class NewHooks:
    """The hooks that a run registers on modules: hooks of transformers collect hidden states, and a flag says that they are there.

    Made before the run. A script's hooks that are still there after it would be called in the next call, too, of which the trace knows
    nothing; a module that is called whole registers its own.
    """

    def __init__(self, model: nn.Module, leaves: Collection[str]) -> None:
        self._before = [
            (fqn, table, set(table))
            for fqn, module in model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule) and not any(is_within(fqn, leaf) for leaf in leaves)
            for name, table in vars(module).items()
            if name.endswith(_HOOK_TABLES) and isinstance(table, dict)
        ]
        self._added: list[tuple[dict[int, Any], dict[int, Any]]] = []

    def note(self) -> None:
        """After the run, before the recording takes them away."""
        found = (
            (table, {key: hook for key, hook in table.items() if key not in known}) for _, table, known in self._before
        )
        self._added = [(table, added) for table, added in found if added]

    def of_script(self) -> str:
        """The name of a module that has one of the script's; "" if none has."""
        names = {id(table): fqn for fqn, table, _ in self._before}
        hooks = ((names[id(table)], filter(callable, added.values())) for table, added in self._added)
        return next((fqn for fqn, each in hooks if has_users_hook(each)), "")

    def add(self) -> None:
        """Registers them, as the run has."""
        for table, added in self._added:
            table.update(added)

    def remove(self) -> None:
        """Takes them away again."""
        for table, added in self._added:
            for key in added:
                table.pop(key, None)


class Leftovers:
    """The values that a run has left in the places that it changed. `cached`: the nodes whose tensors are among them."""

    def __init__(
        self,
        changed: Sequence[EnvironmentGuard],
        nodes: Sequence[Node],
        node_of: Callable[[torch.Tensor], str],
        hooks: NewHooks,
    ) -> None:
        self._nodes, self._node_of, self._hooks = nodes, node_of, hooks
        self.cached: dict[str, None] = {}
        self._content: list[tuple[EnvironmentGuard, Any]] = [(guard, guard.place.read()) for guard in changed]
        self._real: list[tuple[EnvironmentGuard, Any]] = []
        self._before: list[tuple[Any, Any]] = []  # containers that `apply` has filled, with what they held

    def evaluate(self) -> None:
        """Makes real tensors of the recorded ones. Raises UnsettledError where they depend on more than sizes."""
        content, self._content = self._content, []
        for guard, value in content:
            if guard.place.is_answer or guard.fades or any(isinstance(frozen, Never) for frozen in guard.expected):
                raise UnsettledError
            self._real.append((guard, self._evaluated(value)))

    def leave(self) -> None:
        """Before a run of the program: fills what is as it was before the recorded run, as plain PyTorch would. Each time with copies of
        containers and tensors, as whoever has them may change them."""
        empty = [(guard, value) for guard, value in self._real if guard.expected[0].holds(guard.place.read())]
        if not empty:
            return
        self._hooks.add()
        copies: dict[int, torch.Tensor] = {}
        _fill_places([(guard, _copied_state(value, copies)) for guard, value in empty])

    def apply(self) -> None:
        """Puts everything there, as the run has left it, until `restore`."""
        self._hooks.add()
        self._before += _fill_places(self._real)

    def _evaluated(self, value: Any) -> Any:
        if isinstance(value, FakeTensor):
            name = self._node_of(value)
            if not name or not is_fixed(self._nodes, (name,)):
                raise UnsettledError
            try:
                with torch._C.DisableTorchFunction(), unset_fake_temporarily():
                    real = values_of(self._nodes, (name,))[name]
            except NoAnswerError as error:
                raise UnsettledError from error
            self.cached[name] = None
            return real
        if type(value) in (list, tuple, set):
            return type(value)(map(self._evaluated, value))
        if type(value) is dict:
            return {key: self._evaluated(item) for key, item in value.items()}
        if isinstance(value, (list, set, dict)):
            raise UnsettledError  # of a class of its own, which may not be made anew
        return value

    def restore(self) -> None:
        """Puts back what containers held before `apply`."""
        for container, content in self._before:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)
        self._before.clear()
        self._hooks.remove()


def _fill_places(content: Iterable[tuple[EnvironmentGuard, Any]]) -> list[tuple[Any, Any]]:
    """Puts values into places: into the existing container, if it has that type. Returns these containers with their former contents."""
    before = []
    for guard, value in content:
        current = guard.place.read()
        if type(current) is type(value) and isinstance(value, (list, dict, set)):
            before.append((current, type(current)(current)))
            current.clear()
            current.extend(value) if isinstance(value, list) else current.update(value)
        else:
            guard.place.write(value)
    return before


def _copied_state(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """The value with containers and tensors of its own; tensors that are one stay one."""
    if isinstance(value, torch.Tensor):
        return copies.setdefault(id(value), value.clone())
    if type(value) in (list, tuple, set):
        return type(value)(_copied_state(item, copies) for item in value)
    if type(value) is dict:
        return {key: _copied_state(item, copies) for key, item in value.items()}
    return value


def common_module(contexts: Iterable[str]) -> str:
    """The FQN of the innermost module around all of these; "" for the model itself."""
    parts = [context.split(".") if context else [] for context in contexts]
    common: list[str] = []
    for column in zip(*parts, strict=False):
        if len(set(column)) > 1:
            break
        common.append(column[0])
    return ".".join(common)


def refusal(guard: EnvironmentGuard) -> str:
    """Why a model whose forward changes a place is refused."""
    if guard.fades:
        return (
            f"cannot trace the model: forward reads {guard.place.text}, with a weak reference to what others hold: a program that knew it "
            f"would hold it, too; {_HOLD}"
        )
    before, now = str(guard.expected[0]), shown(guard.place.read())
    return (
        f"cannot trace the model: forward reads {guard.place.text} and changes it ({before} before the call, {now} after it), so that "
        f"every call finds another value; {_WAY_OUT}"
    )


def settled(
    guards: Sequence[EnvironmentGuard], changed: Sequence[EnvironmentGuard], again: Sequence[EnvironmentGuard]
) -> tuple[EnvironmentGuard, ...]:
    """The guards of a run whose changes do not matter: these places may have either value."""
    places = {(id(guard.place.holder), guard.place.key): guard for guard in again}
    for guard in changed:
        later = places.get((id(guard.place.holder), guard.place.key))
        if later is not None:
            guard.expected.extend(later.expected)
    return tuple(guards)


def is_same(first: Trace, second: Trace, cached: Iterable[str]) -> bool:
    """Whether `second` computes what `first` does, reading tensors from places where `first` computes the nodes `cached`."""
    return bool(_form_of_trace(first, frozenset(cached)) == _form_of_trace(second, frozenset()))


def _form_of_trace(trace: Trace, cached: frozenset[str]) -> Any:
    """The trace without names and without what only cached tensors need; these, and plain tensor attributes, are alike."""
    state = {name for spec in trace.state for name in spec.names}
    wanted, live = set(trace.output_names), set[str]()
    for node in reversed(trace.nodes):
        if node.name in wanted or node.mutates or node.random or node.kind is NodeKind.SET_ATTR:
            live.add(node.name)
            wanted.update(() if node.name in cached else (*node.inputs, *node.mutates))
    names = _PositionNumbers()
    form: list[Any] = []
    for node in (node for node in trace.nodes if node.name in live):
        if node.name in cached or (node.kind is NodeKind.GET_ATTR and node.target not in state):
            names.special[node.name] = len(names.special)
            continue
        writes = tuple(map(names.of, node.mutates))
        context = (node.grad_enabled, node.autocast, node.random)
        form.append((node.kind, node.target, names.within((node.args, node.kwargs)), node.spec, writes, context))
        names.ordinary[node.name] = len(names.ordinary)
    return form, names.within((*trace.output_leaves, *trace.left_leaves))


class _PositionNumbers:
    """Numbers in place of names: by position, and for cached tensors by first use."""

    def __init__(self) -> None:
        self.ordinary: dict[str, int] = {}
        self.special: dict[str, int] = {}
        self._used: dict[str, int] = {}

    def of(self, name: str) -> tuple[str, int]:
        """The stand-in for a node."""
        if name in self.special:
            return "cached", self._used.setdefault(name, len(self._used))
        return "node", self.ordinary[name]

    def within(self, value: Any) -> Any:
        """A tree of arguments with numbers for its nodes."""
        if isinstance(value, Ref):
            return self.of(value.name)
        if isinstance(value, (tuple, list)):
            return tuple(map(self.within, value))
        if isinstance(value, dict):
            return {key: self.within(item) for key, item in value.items()}
        if isinstance(value, slice):
            return "slice", self.within((value.start, value.stop, value.step))
        return value


_DEPTH = 4  # containers around a tensor that are looked through
# Generators and coroutines: to clear the frame of one that waits ends it, and an error that somebody has kept may have come through it.
_WAITING = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Survivors:
    """The fake tensors of one recording."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[torch.Tensor]] = []
        self._freezes = self._disables = False

    def __enter__(self) -> Survivors:
        self._freezes, self._disables = gc.get_freeze_count() == 0, gc.isenabled()
        gc.disable()  # what others do when it runs is not what the model does
        if self._freezes:
            gc.freeze()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if self._disables:
            gc.enable()
        # Keeps the variables of the model's code in a traceback for debugging errors of other kinds.
        if isinstance(error, (TraceError, SizeAskedError)):
            _forget_variables(error)
        if self._alive():
            gc.collect()  # of what is new alone: what was there is frozen
        if self._alive():
            self._forget_cached()
        if self._freezes:
            gc.unfreeze()

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """These should not outlive the recording."""
        self._refs += map(weakref.ref, tensors)

    def check(self) -> None:
        """Raises TraceError if one is kept elsewhere than in the cache of a function."""
        alive = self._alive()
        if alive:
            raise TraceError(
                f"cannot trace the model: forward keeps a tensor of shape {list(alive[0].shape)} beyond the call, in "
                f"{_named_holder(alive[0])}; the next call would find a tensor without values there; what to do: keep it in a registered "
                "buffer or as an attribute of a module, or return it"
            )

    def _forget_cached(self) -> None:
        """Clears the caches of functions that have kept some. Each search goes through all objects: first through the new ones, for all
        that is between a tensor and a cache; then once through the old ones, unless a container of these is in between."""
        kept: list[Any] = list(self._alive())
        if self._freezes:
            kept += _holders(kept)
        with _unfrozen():
            kept += _holders(kept)
        for cache in kept:
            if type(cache) is CACHE:
                cache.cache_clear()

    def _alive(self) -> list[torch.Tensor]:
        return [fake for fake in (ref() for ref in self._refs) if fake is not None]


def _forget_variables(error: BaseException) -> None:
    """Lets go of the tensors in variables of functions that an error has ended. An error of the model's own, its cause, keeps them."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if not frame.f_code.co_flags & _WAITING:
            with suppress(RuntimeError):  # it is running
                frame.clear()
                _ = frame.f_locals  # who has asked for these made a copy, which is brought up to date


@contextmanager
def _unfrozen() -> Iterator[None]:
    """Frozen objects are not searched."""
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if is_frozen:
            gc.freeze()


def _holders(held: list[Any]) -> list[Any]:
    """The holders of objects, through a few containers, except caches of functions and their holders."""
    found: list[Any] = []
    level = held
    seen = {id(held), id(found), *map(id, held)}
    for _ in range(_DEPTH):
        around: list[Any] = []
        seen.add(id(around))
        for holder in gc.get_referrers(*level):
            if id(holder) not in seen and not isinstance(holder, (FrameType, TracebackType)):
                seen.add(id(holder))
                around.append(holder)
        found += around
        level = [holder for holder in around if not isinstance(holder, (ModuleType, CACHE))]
        seen.add(id(level))
        if not level:
            break
    return found


def _named_holder(tensor: torch.Tensor) -> str:
    """The nearest holder with a name."""
    with _unfrozen():
        holders = _holders([tensor])
    for holder in holders:
        if isinstance(holder, ModuleType):
            return f"a global of {holder.__name__}"
        if type(holder) in (dict, list, tuple, set):
            continue
        return f"a {type(holder).__module__}.{type(holder).__qualname__}"
    return "a container that something outside of the model holds"


_DETACH = "what to do: write a detached value into it (value.detach()), or write under torch.no_grad()"
_DETACHING = ("detach", "detach_")


def check_histories(model: nn.Module, trace: Trace, before: Collection[str]) -> None:
    """Raises UntraceableError where a later call would differentiate through an earlier one. `model` is as forward has left it.

    `before`: the buffers that had a graph when the recording began. Raises TraceError if one of these is used.
    """
    whole = tuple(f"{node.target}." for node in trace.nodes if node.kind is NodeKind.CALL_MODULE)
    for spec in trace.state:
        name = next((name for name in spec.names if name in before), "")
        if name and (_use(trace, spec.names) is not None or any(each.startswith(whole) for each in spec.names)):
            raise untrained(name)
    hanging = {name for name, tensor in _tensors(model) if tensor.grad_fn is not None}
    for spec in trace.state:
        fqn = next((name for name in spec.names if name in hanging), "")
        used = _use(trace, spec.names) if fqn else None
        if used is not None:
            place = fqn.rpartition(".")[0]
            raise UntraceableError.inside(
                model.get_submodule(place),
                place,
                used.source,
                f"forward leaves {fqn!r} with the autograd graph of what it has computed, and the output depends on what it was before, so "
                "that the next call would differentiate through this one",
                _DETACH,
            )


def _tensors(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _use(trace: Trace, names: tuple[str, ...]) -> Node | None:
    """The first node by which an output hangs on the graph of a parameter or buffer as the call has found it; None if none does."""
    hanging = {node.name for node in trace.nodes if node.kind is NodeKind.GET_ATTR and node.target in names}
    first: Node | None = None
    for node in trace.nodes:
        if _passes_graph(node) and not hanging.isdisjoint(node.inputs):
            hanging.update((node.name, *node.mutates))
            first = first or node
    return None if hanging.isdisjoint(trace.output_names) else first


def _passes_graph(node: Node) -> bool:
    """Whether what a node gives hangs on the graphs that its inputs hang on."""
    if not node.grad_enabled or node.kind is NodeKind.SET_ATTR or node.target.rpartition(".")[2] in _DETACHING:
        return False
    if node.target == "builtins.getattr" and node.args[1:] == ("data",):
        return False
    return node.spec is None or node.spec.torch_dtype.is_floating_point or node.spec.torch_dtype.is_complex
