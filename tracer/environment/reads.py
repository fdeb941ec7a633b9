"""Notes what a recording's Python reads besides its inputs, while it runs; `smpc.tracer.environment.environment_guards` keeps it.

    attributes of modules   `nn.Module.__getattribute__` is ours for the time of the recording
    globals                 of every function that is called, as its code names them
    closures, defaults      of the functions that were reached and called
    what these hold         attributes of objects, by the names that the code that ran uses

Values are taken down when they are first read, so that what the run itself writes afterwards shows: `finish` gives the guards, and
those that do not hold then are state that the run changed. An attribute that the run writes before it reads it depends on the run alone.

Python's standard library, numpy and torch are trusted to change nothing; `smpc.tracer.effects.randomness` watches their random generators.
"""

from __future__ import annotations

import builtins
import dataclasses
import operator
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from smpc.tracer.environment.environment_guards import (
    BASES,
    CLASS,
    EnvironmentGuard,
    GuardSource,
    Names,
    Question,
    hook_tables,
)
from smpc.tracer.environment.object_identity import Identity, RecordingRun, TensorClasses, compares_identity
from smpc.tracer.environment.outside_reads import (
    CallHook,
    OutsideRead,
    handed_over,
    is_outside,
    is_parallel,
    model_frame,
    read_of,
    text_of,
)
from smpc.tracer.environment.process_questions import (
    CACHE,
    DECIMAL,
    DEFAULT_DTYPE,
    FILTERS,
    asked,
    depends_on_decimal,
    is_asked,
    is_question,
    kept_by_cache,
    question_of,
    question_of_cache,
)
from smpc.tracer.environment.reachable_values import (
    MUTABLE,
    Called,
    Reached,
    global_names,
    global_values,
    has_unseen_code,
    imported_modules,
    is_looked_into,
    is_trusted,
    is_trusted_class,
    places_in,
    stored_variables,
    tables_in,
)
from smpc.tracer.environment.value_snapshots import (
    MISSING,
    AnyTensor,
    Contents,
    DerivedError,
    Frozen,
    Identical,
    Spec,
    Written,
    freeze,
    freeze_tensor,
)
from smpc.tracer.state.fakes import FakeState
from smpc.tracer.state.python_state import Running, is_generator

_MODULE_FILE = nn.Module.__call__.__code__.co_filename
_LOOKS = frozenset(
    {"getattr", "hasattr", "vars", "__dict__", "attrgetter", "__getattribute__", "eval", "exec", "globals"}
)
_LOOKING = (getattr, hasattr, vars, dir, object.__getattribute__)
_WORD = re.compile(r"[^\W\d]\w*")
_LASTING = (
    type,
    ModuleType,
    FunctionType,
    torch.Tensor,
)  # looked after elsewhere, as long as nothing is put in their places
_GETTERS = (operator.attrgetter, operator.methodcaller)
_INTERNAL = frozenset(vars(nn.Module())) - {"training", "_parameters", "_buffers", "_modules"} | {
    "_call_impl", "_slow_forward", "_compiled_call_impl", "__class__",
}  # fmt: skip
_TABLES = frozenset({"_parameters", "_buffers", "_modules"})  # tables, which have guards of their own


class Reads:
    """The reads of one recording. `names`: FQNs of the model's modules by id."""

    def __init__(self, names: Mapping[int, str], state: FakeState, run: RecordingRun) -> None:
        self._names, self._run, self._thread = names, run, threading.get_ident()
        self._state = {id(tensor) for tensor in (*state.fakes, *state.originals.values())}
        self._originals = tuple(state.originals.values())
        self.identity = Identity(state, run, lambda tensor: self._object(tensor, None))
        self.calls, self.running = CallHook(self._called), Running()
        self.classes = TensorClasses(state.originals)
        self._hooks: list[Any] = []  # of the model's modules
        self.contents = self._contents()
        self._guards: dict[tuple[int, Any], EnvironmentGuard] = {}
        self._written: dict[tuple[int, str], None] = {}  # attributes that the run has written before any read
        self._writers: dict[tuple[int, str], dict[str, None]] = {}
        self._codes: dict[CodeType, Called] = {}
        self._trusted: set[CodeType] = set()
        self._quiet: set[CodeType] = set()  # of these, what answers no question either
        self._dull: set[Any] = set()  # functions of C in modules that tell nothing of the process
        self._own: set[CodeType] = set()  # of smpc
        self._of_objects: dict[int, list[EnvironmentGuard]] = {}  # guards of an object's attributes
        self._object_of: dict[int, int] = {}  # guard -> the object whose attribute it is
        self._reaching: dict[
            int, list[EnvironmentGuard]
        ] = {}  # object or container -> guards of the values that it was found in
        self._early: dict[
            tuple[int, Any], tuple[Any, Frozen | None]
        ] = {}  # by place: what it held when a function began
        self._early_objects: dict[int, Any] = {}
        self._early_names: dict[int, set[str]] = {}
        self._alive: list[Any] = []
        self._constants: dict[int, EnvironmentGuard] = {}
        self._variables: dict[int, EnvironmentGuard] = {}  # that count whatever the code names
        self._questions: dict[Question, GuardSource] = {}
        self._kept_keys: dict[int, dict[int, Any]] = {}  # by cache: keys whose results have been looked at, by id
        self._of_caches: dict[int, list[EnvironmentGuard]] = {}
        self._looks = False  # whether attributes were looked up by names that no code names
        self.outside: list[OutsideRead] = []
        self.is_again = (
            False  # whether the model has been recorded before, to see whether what it reads from outside matters
        )
        self._specs: dict[int, list[Spec]] = {}  # of tensors that were found in attributes, by id
        self._names_of: list[Names] = []  # of the objects and classes that were reached
        self._shadows: dict[int, Names] = {}  # by namespace: globals that would hide what is Python's own
        self._unseen: set[int | None] = {None}  # objects any of whose attributes may count; what is none of an object's
        self.of_torch: list[ModuleType] = []  # modules of Python, see `smpc.tracer.environment.reachable_values`
        self.used: set[str] | None = None  # the names of attributes that count, None if any may; known after `finish`
        self.listed: dict[
            int, nn.Module
        ] = {}  # modules that were asked for all their members, or for one that they have not

    def of_model(self, model: nn.Module) -> None:
        """Called before the run: takes down what the classes of the model's modules hold."""
        modules = list(model.modules())
        for module in modules:
            if not isinstance(module, torch.jit.ScriptModule):
                fqn = self._names[id(module)]
                place = GuardSource(module, CLASS, f"the class of {f'module {fqn!r}' if fqn else 'the model'}")
                self._read(place, type(module), fqn)
        self._hooks = [hook for module in modules for table in hook_tables(module) for hook in table.values()]
        self._answer(DEFAULT_DTYPE)
        filters = FILTERS.read()
        self._early[id(FILTERS.holder), FILTERS.key] = filters, self._taken(filters)
        for place in (place for original in self._originals for place in places_in(original)):
            self._read(place, place.read(), None)

    # -- while the model runs ------------------------------------------------------------------------------------------

    def attribute(self, module: nn.Module, name: str, value: Any, before: Any) -> None:
        """Called for the attributes that are read from modules; `value` is MISSING where there is none.

        `before`: what the module's own `__dict__` had there before the read.
        """
        if (
            isinstance(module, torch.jit.ScriptModule)
            or self._run.is_unseen
            or (name.startswith("__") and name != "__dict__")
        ):
            return
        frame = sys._getframe(2)
        if frame.f_code.co_filename == _MODULE_FILE:
            if name != "forward":
                return
        elif frame.f_code in self._own or str(frame.f_globals.get("__name__", "")).startswith("smpc."):
            self._own.add(frame.f_code)
            return
        if name in _TABLES or value is MISSING:
            self.listed[id(module)] = module
        if threading.get_ident() != self._thread:
            self._attributes(module, name, value, before)
            return
        self.calls.pause()  # what a model's objects do when they are looked at here is not what the model does
        try:
            self._attributes(module, name, value, before)
        finally:
            self.calls.resume()

    def _attributes(self, module: nn.Module, name: str, value: Any, before: Any) -> None:
        """An attribute that the model's code has read, or all of them."""
        if name == "__dict__":
            if all(item.holder is not value for item in self._names_of):
                text, fqn = _of(module, self._names), self._names.get(id(module))
                self._names_of.append(Names(value, text, fqn, are_all_read=True))
            for key in [key for key in value if key not in _TABLES]:
                self._attribute(module, key, value[key])
        elif name not in _TABLES:
            self._attribute(module, name, before)

    def _attribute(self, module: nn.Module, name: str, before: Any) -> None:
        attributes: dict[str, Any] = object.__getattribute__(module, "__dict__")
        context = self._run.context()
        key = (id(attributes), name)
        if name in attributes and key in self._written:
            self._writers[key][context] = None
            return
        known = self._guards.get(key)
        if known is None:
            fqn = self._names.get(id(module))
            place = GuardSource(attributes, name, f"attribute {name!r} {_of(module, self._names)}")
            known = self._read(place, before, fqn, is_attribute=True)
        if known is not None:
            known.readers[context] = None
        if name not in attributes:
            self._class_place(type(module), name, context)

    def _class_place(self, cls: type, name: str, context: str) -> None:
        """Notes a name that a class, or one of its bases, gives, and that those before it do not."""
        for base in cls.__mro__:
            value = vars(base).get(name, MISSING)
            if not is_trusted_class(base) or not hasattr(type(value), "__get__"):
                guard = self._read(GuardSource(base, name, f"{base.__qualname__}.{name}"), value, None)
                if guard is not None:
                    guard.readers[context] = None
            if name in vars(base):
                return

    def write(self, module: nn.Module, name: str) -> None:
        """Called for every attribute that is about to be set on a module."""
        if self._run.is_unseen:
            return
        key = (id(vars(module)), name)
        if (
            key not in self._guards
            and name not in module._parameters
            and name not in module._buffers
            and name not in module._modules
        ):
            self._written[key] = None
            self._alive.append(vars(module))
        self._writers.setdefault(key, {})[self._run.context()] = None
        guard = self._guards.get(key)
        if guard is not None:
            guard.readers[self._run.context()] = None

    def constant(self, tensor: torch.Tensor) -> None:
        """Called for every tensor whose values become part of the trace."""
        if id(tensor) not in self._constants and not isinstance(tensor, FakeTensor):
            place = GuardSource({"": tensor}, "", "a tensor that no module holds")
            self._constants[id(tensor)] = EnvironmentGuard(place, [Written(tensor, tensor._version)], tensor)
            for spec in self._specs.pop(id(tensor), ()):
                spec.baked = tensor

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        """A profile function: notes the globals that a function names before it runs, and what is read from outside the process."""
        if event == "call":
            if frame.f_code not in self._quiet:
                self._begins(frame)
        elif event == "c_call" and argument not in self._dull:
            owner = getattr(argument, "__self__", None)
            if type(owner) not in CallHook.PLAIN:
                self._asks(frame, argument, owner)

    def _asks(self, frame: FrameType, function: Any, owner: Any) -> None:
        """A C function is about to be called."""
        if is_outside(function):
            if not self._run.is_unseen and not _is_importing(frame):
                self.outside += filter(None, (read_of(function, frame, self._run.context()),))
        elif is_question(function):
            self._answer(question_of(function, frame))
        elif function in _LOOKING:
            self._looked_at(frame)
        elif type(owner) is ModuleType:
            self._dull.add(function)
        elif id(owner) in self._reaching or id(owner) in self._early_objects:
            self.running.used(owner)

    def _begins(self, frame: FrameType) -> None:
        """A function of Python is about to run."""
        code, is_known = frame.f_code, is_trusted(str(frame.f_globals.get("__name__", "")))
        if is_generator(code) and not is_known:
            self.running.resumed(frame)
        if is_asked(code) and not _is_importing(frame):
            self._answer(asked(frame))
        if is_parallel(code) and not self._run.is_unseen:
            self.outside += filter(None, (handed_over(frame, self._run.context()),))
        if code in self._trusted:
            return
        if code not in self._codes and is_known:
            self._trusted.add(code)
            if not is_asked(code) and not is_parallel(code):
                self._quiet.add(code)
            return
        if self._run.is_unseen or (code not in self._codes and _is_importing(frame)):
            return
        if code in self._codes and not code.co_freevars and self._codes[code].namespace is frame.f_globals:
            self._codes[code].contexts[self._run.context()] = None
            return
        self._named_in(frame, self._run.context())

    def _named_in(self, frame: FrameType, context: str) -> None:
        """Notes the values of names in a model's function, as it begins. Classes in a closure (`super()`) stay the same: looked at once."""
        code, namespace, local = frame.f_code, frame.f_globals, frame.f_locals
        called = self._codes.setdefault(code, Called(namespace))
        was_here = context in called.contexts and called.namespace is namespace
        called.contexts[context] = None
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            value = local.get(name)
            if type(value) in MUTABLE and id(value) not in called.arguments:  # it may be a default
                called.arguments[id(value)] = value, self._taken(value)
        if code.co_freevars:
            values = [local.get(name, MISSING) for name in code.co_freevars]
            if was_here and called.free and called.has_classes(values):
                return
            called.free.append([(value, self._taken(value)) for value in values])
        self._globals_of(code, namespace, context)
        if "type" in code.co_names:
            self.classes.show_in(namespace)

    def _answer(self, place: GuardSource | None) -> None:
        """Notes what is about to be asked of the process."""
        if place is None or self._run.is_unseen:
            return
        if isinstance(place.holder, Question):
            place = self._questions.setdefault(place.holder, place)
        guard = self._read(place, place.read(), None)
        if guard is not None:
            guard.readers[self._run.context()] = None
            self._variables[id(guard)] = guard
            if isinstance(place.holder, Question) and place.holder.about is not None:
                self._object_of[id(guard)] = id(place.holder.about)

    def text(self, frame: FrameType, tensor: str) -> str:
        """The text of a recorded tensor for the code of that frame: in a second recording, a text with every form that numbers have."""
        self.outside += filter(None, (text_of(frame, self._run.context()),))
        known = f"{tensor}, whose values are not known while the model is recorded"
        return f"tensor(-nan, -inf, 1.234567890e+06, {known}, True, False)" if self.is_again else f"<tensor {known}>"

    def _looked_at(self, frame: FrameType) -> None:
        """Code is about to look an attribute up by a name that it has computed: of what Python's own code has, all attributes count."""
        if self._run.is_unseen:
            return
        if not is_trusted(str(frame.f_globals.get("__name__", ""))):
            self._looks |= _LOOKS.isdisjoint(frame.f_code.co_names)  # it has another name for the function
        elif model_frame(frame) is not None:
            for value in frame.f_locals.values():
                if is_looked_into(value) and not is_trusted_class(type(value)):
                    self._unseen.add(id(value))
                    self._alive.append(value)

    def _globals_of(self, code: CodeType, namespace: dict[str, Any], context: str) -> None:
        """Notes the globals that a function names, all of them if it asks for their dict, and the modules that it imports."""
        module = str(namespace.get("__name__", ""))
        used = global_names(code)
        self._of_python([name for name in used if name not in namespace and name in vars(builtins)], namespace, module)
        names = [name for name in used if name in namespace or name in stored_variables(code)]
        names += global_values(namespace) if "globals" in code.co_names else []
        places = [GuardSource(namespace, name, f"global {name!r} of {module}") for name in dict.fromkeys(names)]
        imported = [
            name for name in imported_modules(code, namespace) if name in sys.modules or "modules" in code.co_names
        ]
        for place in (*places, *(GuardSource(sys.modules, name, f"module {name!r}") for name in imported)):
            guard = self._read(place, place.read(), None)
            if guard is not None:
                guard.readers[context] = None
                if place.holder is sys.modules:
                    self._variables[id(guard)] = guard

    def _of_python(self, names: list[str], namespace: dict[str, Any], module: str) -> None:
        """Notes functions of Python's own that code names: others may be put in their places, or globals before them."""
        for name in names:
            guard = self._read(GuardSource(vars(builtins), name, f"Python's {name}"), vars(builtins)[name], None)
            if guard is not None:
                self._variables[id(guard)] = guard
        shadow = self._shadows.setdefault(id(namespace), Names(namespace, f"of {module}", None))
        shadow.used = (shadow.used or set()).union(names)

    def _behind_caches(self) -> None:
        """Notes the globals of functions whose functools caches have answered: an earlier attempt, or other code, has called them."""
        queue = [guard.value for guard in self._guards.values() if isinstance(guard.value, CACHE)]
        while queue:
            function = queue.pop()
            if isinstance(function, CACHE):
                self._note_kept(function)
                function = function.__wrapped__
            if not isinstance(function, FunctionType) or is_trusted(str(function.__module__)):
                continue
            code = function.__code__
            if code in self._codes:
                continue
            values = [GuardSource(cell, "", "").read() for cell in function.__closure__ or ()]
            free = [(value, self._taken(value)) for value in values]
            self._codes[code] = Called(function.__globals__, free=[free])
            self._globals_of(code, function.__globals__, "")
            queue += (function.__globals__[name] for name in global_names(code) if name in function.__globals__)

    def _contents(self) -> Contents:
        """The values to keep alive until they are frozen; the model itself holds its modules, parameters and buffers."""
        return Contents(outlives=lambda value: id(value) in self._names or id(value) in self._state)

    def _freeze(self, value: Any, contents: Contents, is_attribute: bool) -> Frozen | None:
        """The value as it is now; None if the run has made it."""

        def tensor(found: torch.Tensor) -> Frozen:
            if id(found) in self._state:
                self.identity.reached(found)
                return AnyTensor()
            if not isinstance(found, FakeTensor):
                contents.objects.setdefault(id(found), found)
            # The stages read the tensors that modules hold; of others the values are part of the trace.
            if isinstance(found, FakeTensor) or not (is_attribute and id(found) not in self._constants):
                return freeze_tensor(found) if isinstance(found, FakeTensor) else Identical(found)
            spec = freeze_tensor(found)
            self._specs.setdefault(id(found), []).append(spec)
            return spec

        try:
            return freeze(value, tensor, contents)
        except DerivedError:
            return None

    def _read(
        self,
        place: GuardSource,
        value: Any,
        owner: str | None,
        *,
        is_attribute: bool = False,
        before: Frozen | None = None,
    ) -> EnvironmentGuard | None:
        """Takes down a value that is read for the first time, and was `before` the run; None for one that the run has made."""
        known = self._guards.get((id(place.holder), place.key))
        if known is not None:
            return known
        is_function = isinstance(value, FunctionType) and str(value.__module__).startswith("smpc.tracer.")
        if is_function or self.classes.is_shown(value):
            return None  # ours, for the time of the recording
        if isinstance(value, _GETTERS) or any(value is getter for getter in _GETTERS):
            self._looks = True
        if depends_on_decimal(value):
            self._answer(DECIMAL)
        value, early = self._early.get((id(place.holder), place.key), (value, before))
        contents = self._contents()
        frozen = self._freeze(value, contents, is_attribute)
        if frozen is None and before is None:
            return None
        expected = early or frozen
        assert expected is not None, place
        guard = EnvironmentGuard(place, [expected], value, owner=owner, fades=contents.fades)
        self._guards[id(place.holder), place.key] = guard
        self._alive.append(place.holder)
        for key, entry in contents.containers.items():
            self.contents.containers.setdefault(key, entry)
        for key in (*contents.objects, *contents.containers):
            self._reaching.setdefault(key, []).append(guard)
        for item in contents.objects.values():
            self._object(item, owner)
        if isinstance(value, CACHE):
            self._note_kept(value)
        return guard

    def _note_kept(self, function: Any) -> None:
        """Notes what else a cache has kept, as far as others may change it; nothing if that has come from the run."""
        known = self._kept_keys.setdefault(id(function), {})
        keys = [key for key in kept_by_cache(function) if id(key) not in known]
        known.update((id(key), key) for key in keys)  # held, as nothing else has their ids then
        place = question_of_cache(function, keys)
        value, contents = place.read(), self._contents()
        frozen = self._freeze(value, contents, False)
        if frozen is None:
            for early in self._of_caches.pop(id(function), ()):
                self._guards.pop((id(early.place.holder), early.place.key), None)
        elif frozen.deep or not all(isinstance(item, _LASTING) for item in contents.objects.values()):
            guard = self._read(place, value, None)
            if guard is not None:
                self._variables[id(guard)] = guard
                self._object_of[id(guard)] = id(function)
                self._of_caches.setdefault(id(function), []).append(guard)

    def _taken(self, value: Any) -> Frozen | None:
        """A variable's value before a function runs, with its contents; None if the run has made it.

        Whether the variable is one of the model's, or of a function that the run makes, is known in the end.
        """
        contents = self._contents()
        frozen = self._freeze(value, contents, False)
        for key, entry in contents.containers.items():
            self.contents.containers.setdefault(key, entry)
        for item in contents.objects.values():
            self._remember(item)
        return frozen

    def _remember(self, item: Any) -> None:
        if id(item) in self._early_objects or id(item) in self._of_objects:
            return
        self._early_objects[id(item)] = item
        self._early_names.update((id(table), set(table)) for table, _ in tables_in(item))
        for place in places_in(item):
            value = place.read()
            self._early[id(place.holder), place.key] = value, self._taken(value)

    def _object(self, value: Any, owner: str | None) -> None:
        """Takes down the attributes of what is no nn.Module; which of them count is known in the end."""
        if id(value) in self._of_objects:
            return
        guards = self._of_objects[id(value)] = []
        self._alive.append(value)
        if not isinstance(value, (type, ModuleType)) and has_unseen_code(value):
            self._unseen.add(id(value))
        for table, text in tables_in(value):
            names = Names(table, text, owner, is_class=isinstance(value, type))
            names.known = self._early_names.get(id(table), names.known)
            self._names_of.append(names)
        for place in places_in(value):
            is_new = (id(place.holder), place.key) not in self._guards
            guard = self._read(place, place.read(), owner)
            if guard is not None:
                guards.append(guard)
                if is_new:
                    self._object_of[id(guard)] = id(value)

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def finish(self) -> list[EnvironmentGuard]:
        """The guards, with the closures and class attributes that were reached, and without what no code names."""
        self.classes.end()
        for code, called in list(self._codes.items()):  # what was imported for the first time while it ran
            self._globals_of(code, called.namespace, "")
        self._behind_caches()
        self.used = names = self._names_used()
        self.identity.check(self._codes)
        for item in self._names_of:
            item.used = None if item.are_all_read else names
            self._appeared(item)
        self._names_of += self._shadows.values()
        kept = self._kept(names)
        if any(map(compares_identity, self._codes)):
            shown = [guard for guard in kept if type(guard.value) in (list, dict, set) and guard.holds()]
            kept += [dataclasses.replace(guard, expected=[Identical(guard.value)]) for guard in shown]
        kept += self._constants.values()
        objects = [item for item in self._alive if id(item) in self._of_objects]
        values = [*(guard.value for guard in kept), *objects, *self._hooks]
        reached = Reached(self._codes, self._guards, self._read)
        guards = {id(guard): guard for guard in kept}
        while values:
            num_known = len(self._alive)
            guards.update((id(guard), guard) for guard in reached.guards(names, values))
            values = [item for item in self._alive[num_known:] if id(item) in self._of_objects]
        guards.update((id(guard), guard) for guard in self._kept(names))  # of objects that were reached last
        self.of_torch = reached.of_torch
        return list(guards.values())

    def _kept(self, names: set[str] | None) -> list[EnvironmentGuard]:
        """The guards of values that the code names, or might use without naming them."""
        return [
            guard
            for guard in self._guards.values()
            if names is None
            or guard.place.key in names
            or guard.place.key in (CLASS, BASES)
            or id(guard) in self._variables
            or self._object_of.get(id(guard)) in self._unseen
        ]

    def _appeared(self, names: Names) -> None:
        """Notes the names that the run itself has given to an object."""
        for name in names.new():
            place = GuardSource(names.holder, name, f"attribute {name!r} {names.text}")
            guard = EnvironmentGuard(place, [Identical(MISSING)], MISSING, owner=names.owner)
            self._guards[id(names.holder), name] = guard
            names.known.add(name)

    @property
    def names(self) -> list[Names]:
        """The names of the attributes of what was reached, for later steps; known after `finish`."""
        return self._names_of

    def restore(self) -> None:
        """Puts everything back that the run has changed in the places that it read."""
        self.contents.restore()
        for guard in self._guards.values():
            if guard.place.read() is not guard.value:
                guard.place.write(guard.value)

    def contexts(self, guard: EnvironmentGuard) -> set[str]:
        """FQNs of the modules that a place belongs to and whose code reads or writes it; "" is among them if nobody knows."""
        found: set[str] = set()
        queue, seen = [guard], {id(guard)}
        while queue:
            item = queue.pop()
            of_object = self._object_of.get(id(item))
            if of_object is None or isinstance(item.place.holder, type):
                found.update(("",) if item.owner is None else (*item.readers, item.owner))
            shared = [key for key, guards in self._reaching.items() if any(other is item for other in guards)]
            for key in shared if of_object is None else (*shared, of_object):
                for other in self._reaching.get(key, ()):
                    if id(other) not in seen:
                        seen.add(id(other))
                        queue.append(other)
        return found or {""}

    def named(self) -> set[str]:
        """Names in the code that ran, and words in its strings."""
        found: set[str] = set()
        for code in self._codes:
            found.update(code.co_names)
            found.update(_strings_of_code(code.co_consts))
        return found

    def _names_used(self) -> set[str] | None:
        """The names that count; None if the code looks attributes up by names that it computes."""
        found = self.named()
        return None if self._looks or found & _LOOKS else found


def _of(module: nn.Module, names: Mapping[int, str]) -> str:
    """Whose an attribute is, for people."""
    fqn = names.get(id(module))
    return f"of module {fqn!r}" if fqn else "of the model" if fqn == "" else f"of a {type(module).__qualname__}"


def _is_importing(frame: FrameType | None) -> bool:
    """Whether a frame belongs to an import statement: the finders of modules, and the bodies of modules, are not the model's code."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module in ("importlib._bootstrap", "_frozen_importlib"):
            return True
        if module.startswith("smpc."):
            return False  # the recording itself may run while a script is imported
        frame = frame.f_back
    return False


def _strings_of_code(constants: tuple[Any, ...]) -> Iterator[str]:
    """The strings among the constants of code, and words in them that may be names."""
    for constant in constants:
        if isinstance(constant, str):
            yield constant
            if "{" in constant:  # "{0.scale}".format(settings)
                yield from _WORD.findall(constant)
        elif isinstance(constant, (tuple, frozenset)):
            yield from _strings_of_code(tuple(constant))


@contextmanager
def noting_reads(reads: Reads, model: nn.Module) -> Iterator[None]:
    """For the time of a recording: reads of the modules' attributes are noted, and the run's changes are undone at the end."""
    plain = nn.Module.__getattribute__

    def reading(module: nn.Module, name: str) -> Any:
        if name in _INTERNAL:
            return plain(module, name)
        before = plain(module, "__dict__").get(name, MISSING)  # a cached_property writes what it gives
        try:
            value = plain(module, name)
        except AttributeError:
            reads.attribute(module, name, MISSING, before)
            raise
        reads.attribute(module, name, value, before)
        return value

    reads.of_model(model)
    nn.Module.__getattribute__ = reading  # type: ignore[method-assign, assignment]
    try:
        with reads.classes.active(), reads.identity.watched():
            yield
    finally:
        del nn.Module.__getattribute__
        reads.restore()
