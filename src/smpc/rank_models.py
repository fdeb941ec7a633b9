"""The model of each rank when all ranks share one process: every rank has memory of its own, as if it were a process.

Terms
    home        of a parameter or buffer: the first rank that holds it. It uses the user's own tensor there, so gradients, hooks and
                the optimizer need no copies
    holder      another rank that holds it, in a tensor of its own, which is updated before every step
    foreign     a parameter that a rank does not hold. It is empty there, as after `smpc.v1.layout.placement`, so a program that reads it
                fails here, too. What no stage uses every rank keeps, and so all buffers; only holders' are brought up to date

Each rank has a copy of the modules, and of attribute values that reference tensors or modules; other values are shared.
If one rank alone calls a module whole, and the module references no tensors of other ranks, that rank uses the
user's own module. The same holds for a tensor in an attribute that one rank alone uses. The user's changes between steps (modes,
attributes and their contents, hooks, modules, buffers) apply to all ranks, as in a script that every process runs. Attributes that a
rank's modules set during a step appear on the user's modules afterwards, but on no other rank.

    models = RankModels(model, plan, programs)
    models.begin_step()
    ...                         # programs over models.of_rank[r]
    models.end_step()

Objects that module attributes reference: which of them ranks in one process may share, and whether a script has changed
the others.

A value that references no tensor and no module is shared by all ranks, since a script changes it in the same way in every process. Other
values are copied for each rank; `Print` says when one has to be copied again.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

from smpc.changes_after_compile import changed_parameter
from smpc.codegen.program import RankProgram
from smpc.errors import PartitionError
from smpc.partitioner.graph.plan import Plan
from smpc.tracer.effects.randomness import generators_of
from smpc.tracer.state.state_use import StateUse, moved_buffer
from smpc.tracer.structure import split_item

_ATOMS = (
    bool, int, float, complex, str, bytes, NoneType, type, FunctionType, BuiltinFunctionType, ModuleType, CodeType,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_MAX_VALUES = 10_000  # of one attribute


def is_atom(value: Any) -> bool:
    """Whether a value is immutable, contents included."""
    return isinstance(value, _ATOMS)


def parts(value: Any) -> list[Any]:
    """The objects that a value references directly. For tensors only attributes set by a script; for modules none."""
    if isinstance(value, (*_ATOMS, nn.Module)):
        return []
    if isinstance(value, Tensor):
        return _attributes_of_value(value)
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    found: list[Any] = []
    if isinstance(value, dict):
        found += [*dict.keys(value), *dict.values(value)]
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        found += value
    found += _attributes_of_value(value)
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                found.append(getattr(value, name))
    return found


def _attributes_of_value(value: Any) -> list[Any]:
    """The names and values of an object's own attributes."""
    own = getattr(value, "__dict__", {})
    return [*own.keys(), *own.values()]


def reached(values: Iterable[Any]) -> Iterator[Any]:
    """The values and everything that they reference, each once, up to a bound."""
    seen: dict[int, Any] = {}
    queue = deque(values)
    while queue and len(seen) < _MAX_VALUES:
        value = queue.popleft()
        if id(value) not in seen:
            seen[id(value)] = value
            yield value
            queue.extend(parts(value))


def paired(value: Any, copied: Any) -> Iterator[tuple[Any, Any]]:
    """Everything that a value references, paired with the counterparts in a copy of it, up to a bound. Members of sets are left out."""
    seen: dict[int, Any] = {}
    queue = deque([(value, copied)])
    while queue and len(seen) < _MAX_VALUES:
        theirs, ours = queue.popleft()
        if id(theirs) in seen or type(theirs) is not type(ours) or isinstance(theirs, (*_ATOMS, set, frozenset)):
            continue
        seen[id(theirs)] = theirs
        yield theirs, ours
        inside, copies = parts(theirs), parts(ours)
        if len(inside) == len(copies):
            queue.extend(zip(inside, copies, strict=True))


def shareable(values: Iterable[Any]) -> Iterator[Any]:
    """The objects reachable from the values that themselves reference no tensor and no module."""
    everything = list(reached(values))
    inside = {id(value): [id(part) for part in parts(value)] for value in everything}
    around: dict[int, list[int]] = {}
    for holder, held in inside.items():
        for part in held:
            around.setdefault(part, []).append(holder)
    queue = [id(value) for value in everything if isinstance(value, (Tensor, nn.Module))]
    queue += [holder for holder, held in inside.items() if any(part not in inside for part in held)]  # beyond the bound
    leading = set(queue)
    while queue:
        found = [holder for holder in around.get(queue.pop(), ()) if holder not in leading]
        leading.update(found)
        queue += found
    return (value for value in everything if id(value) not in leading and not is_atom(value))


class Print:
    """The objects that a value referenced, and the version of each tensor."""

    def __init__(self, value: Any) -> None:
        self._content = [(item, _writes_of_value(item)) for item in reached((value,))]

    def is_of(self, value: Any) -> bool:
        """Whether the value references the same objects and versions now."""
        now = [(item, _writes_of_value(item)) for item in reached((value,))]
        return len(now) == len(self._content) and all(
            a is b and before == after for (a, before), (b, after) in zip(now, self._content, strict=True)
        )


def _writes_of_value(value: Any) -> tuple[int, int] | None:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    return value.data_ptr(), -1 if value.is_inference() else value._version


_OWN_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_Seen = tuple[int, int]  # the tensor, and its version


class RankModels:
    """`of_rank[r]` is rank r's model. With a single rank it is the user's."""

    def __init__(self, model: nn.Module, plan: Plan, programs: Sequence[RankProgram]) -> None:
        self._model = model
        self._called = [frozenset(path for code in program.stages for path in code.modules) for program in programs]
        self._read = [
            dict.fromkeys(split_item(path)[0] for code in program.stages for path in code.attributes)
            for program in programs
        ]
        num_ranks = len(programs)
        self._holders: dict[str, tuple[int, ...]] = {}
        self._written: frozenset[str] = frozenset()  # buffers, by any program
        self._parameters = dict(model.named_parameters())
        names = {id(buffer): name for name, buffer in model.named_buffers()}
        every = model.named_buffers(remove_duplicate=False)
        self._canonical = {name: names[id(buffer)] for name, buffer in every}  # of buffers
        self._memos: list[dict[int, Any]] = []  # by rank: id of a value of the user's modules -> the rank's copy
        self._shared: dict[int, Any] = {}  # values of all ranks, by id
        self._kept: list[Any] = [
            *model.modules(),
            *model.buffers(),
        ]  # keeps alive other objects whose ids are in the memos
        self._is_alone = num_ranks == 1
        if not self._is_alone:
            self._share(value for module in model.modules() for value in _held_by_rank_model(module))
        self.add(plan)
        self.of_rank = [model] if self._is_alone else [self._copy(rank) for rank in range(num_ranks)]
        self._attributes: dict[int, dict[str, Any]] = {}  # of the user's modules, by id, as last seen
        self._prints: dict[tuple[int, str], Print] = {}  # of those attributes that ranks have copies of
        self._hooks: dict[int, dict[str, tuple[int, ...]]] = {}
        self._buffers: dict[int, dict[str, _Seen]] = {}
        self._seen_modules: list[nn.Module] = []
        self._before: list[
            list[tuple[dict[str, Any], dict[str, Any]]]
        ] = []  # by rank, of each module: attributes, buffers
        self._look()

    def begin_step(self) -> None:
        """Brings every rank up to date with the user's model."""
        if self._is_alone:
            return
        self.follow()
        self._before = [
            [(plain_attributes(module), dict(module._buffers)) for module in own.modules()] for own in self.of_rank
        ]

    def follow(self) -> None:
        """Applies the user's changes to every rank. StepError for parameters that were added or removed."""
        self._check_parameters()
        if self._is_alone:
            return
        changed = self._changed_attributes()
        for rank, own in enumerate(self.of_rank):
            copies = dict(self._memos[rank])
            self._follow_modules(rank, own, copies)
            self._follow_attributes(own, changed, copies)
            self._follow_hooks(own, copies)
            self._follow_buffers(rank, own)
            self._follow_parameters(rank, own)
        self._let_go()
        self._look()

    def end_step(self) -> None:
        """Copies attributes that the step has set on a rank's modules to the user's modules."""
        if self._is_alone:
            return
        for own, before in zip(self.of_rank, self._before, strict=True):
            for ours, theirs, (attributes, buffers) in zip(own.modules(), self._model.modules(), before, strict=True):
                if ours is theirs:
                    continue
                changed = {k: v for k, v in ours._buffers.items() if v is not buffers.get(k, _MISSING)}
                theirs._buffers.update(changed)
                now = plain_attributes(ours)
                vars(theirs).update({k: v for k, v in now.items() if v is not attributes.get(k, _MISSING)})
                for key in attributes.keys() - now.keys():
                    vars(theirs).pop(key, None)
        self._before = []
        self._look()

    # -- who holds what ------------------------------------------------------------------------------------------------

    def add(self, plan: Plan, use: StateUse | None = None) -> None:
        """Apply a program's plan. Raises PartitionError if a parameter, or a buffer that is written, would have to move.

        `use`: the state that the program uses; None for the first program.
        """
        found: dict[str, list[int]] = {}
        for stage in plan.stages:
            for name in (*stage.parameters, *stage.buffers):
                found.setdefault(name, []).append(stage.rank)
        now = {name: tuple(sorted(set(ranks))) for name, ranks in found.items()}
        if use is not None:
            self._written |= use.written
            now = use.counting(self._holders, now)
        moved = moved_buffer(self._written, self._holders, now)
        if moved:
            raise PartitionError(moved)
        for name, holders in now.items():
            known = self._holders.setdefault(name, holders)
            if name in self._parameters and not set(holders) <= set(known):
                raise PartitionError(
                    f"expected parameter {name!r} on the ranks of the first program that uses it, {list(known)}, found that another "
                    f"program uses it on {list(holders)}; compile it with like=, or install it in a runtime of its own"
                )

    def _home(self, name: str) -> int:
        return self._holders.get(name, (0,))[0]

    # -- copies --------------------------------------------------------------------------------------------------------

    def _copy(self, rank: int) -> nn.Module:
        # All code that draws from one generator runs on one rank. It uses the user's own generator, in modules called whole and
        # around them.
        memo: dict[int, Any] = {id(generator): generator for generator in generators_of(self._model)} | self._shared
        at_home: dict[int, None] = {}  # storages
        for name, parameter in self._model.named_parameters():
            is_held = rank in self._holders.get(name, (rank,))
            if self._home(name) == rank:
                memo[id(parameter)] = parameter
                at_home[_memory(parameter)] = None
            else:
                memo[id(parameter)] = own_parameter(parameter) if is_held else own_parameter(parameter, torch.empty(0))
        for name, buffer in self._model.named_buffers():
            if self._home(name) == rank:
                memo[id(buffer)] = buffer
                at_home[_memory(buffer)] = None
        for value in _attribute_tensors(self._model):
            if _memory(value) in at_home:
                memo.setdefault(id(value), value)  # a view of this rank's tensor
        elsewhere = frozenset(path for other, paths in enumerate(self._called) if other != rank for path in paths)
        for path in sorted(self._called[rank] - elsewhere):
            module = self._model.get_submodule(path)
            if self._stands_alone(module, at_home):
                memo.update({id(inner): inner for inner in module.modules()})
        memo.update({id(value): value for value in self._used_alone(rank)})
        memo.update({id(inner): inner for inner in self._script_modules()})
        copied = copied_model(self._model, memo)
        self._memos.append(memo | _pairs_of_rank_models(self._model, copied))
        return copied

    def _script_modules(self) -> Iterator[nn.Module]:
        """TorchScript's modules, which all ranks share: their copies would have parameters of their own. One rank alone may call each."""
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        for name, module in self._model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                inside = [names.get(id(parameter), "") for parameter in module.parameters()]
                ranks = {rank for inner in inside for rank in self._holders.get(inner, ())}
                if len(ranks) > 1:
                    raise PartitionError(
                        f"expected the TorchScript module {name!r} on one rank, found its parameters on ranks {sorted(ranks)} of a "
                        "pipeline in one process, where it cannot be copied; give all modules that share its parameters one stage"
                    )
                yield module

    def _used_alone(self, rank: int) -> Iterator[Tensor]:
        """Tensors in attributes that only this rank's program uses."""
        of_all = [{id(value) for value in self._used(other)} for other in range(len(self._called))]
        others = set[int]().union(*(ids for other, ids in enumerate(of_all) if other != rank))
        state = {id(value) for value in (*self._model.parameters(), *self._model.buffers())}
        return (value for value in self._used(rank) if id(value) not in others | state)

    def _used(self, rank: int) -> Iterator[Tensor]:
        """Tensors in attributes that a rank's program reads, or that belong to modules which it calls whole."""
        for path in self._read[rank]:
            owner, _, name = path.rpartition(".")
            value = vars(self._model.get_submodule(owner)).get(name)
            yield from (item for item in reached((value,)) if isinstance(item, Tensor))
        for path in self._called[rank]:
            yield from _attribute_tensors(self._model.get_submodule(path))

    def _stands_alone(self, module: nn.Module, at_home: Mapping[int, Any]) -> bool:
        """Whether a module and its values reference only modules inside it, and tensors of these storages."""
        inside = {id(inner) for inner in module.modules()}
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        tensors = (*module.parameters(), *module.buffers(), *_attribute_tensors(module))
        shared = (tensor for tensor in tensors if len(self._holders.get(names.get(id(tensor), ""), ())) > 1)
        strange = (tensor for tensor in tensors if _memory(tensor) not in at_home)
        others = (held for held in _attribute_modules(module) if id(held) not in inside)
        return not any(True for found in (shared, strange, others) for _ in found)

    # -- keeping up ----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Records the state of the user's modules."""
        modules = list(self._model.modules())
        self._attributes = {id(module): plain_attributes(module) for module in modules}
        self._prints = {
            (id(module), key): Print(value)
            for module in modules
            for key, value in self._attributes[id(module)].items()
            if not is_atom(value) and id(value) not in self._shared
        }
        self._hooks = {id(module): _hooks_of_rank_model(module) for module in modules}
        self._buffers = {
            id(module): {k: _seen_in_rank_model(v) for k, v in module._buffers.items() if v is not None}
            for module in modules
        }
        self._seen_modules = modules  # while they live, no other object has their ids

    def _check_parameters(self) -> None:
        now = dict(self._model.named_parameters())
        for name in dict.fromkeys((*self._parameters, *now)):
            if self._parameters.get(name) is not now.get(name):
                raise changed_parameter(name, self._parameters, now)

    def _changed_attributes(self) -> dict[int, list[str]]:
        """By module, the attributes that were replaced, or that reference something else now."""
        found: dict[int, list[str]] = {}
        for module in self._model.modules():
            before = self._attributes.get(id(module), {})
            for key, value in plain_attributes(module).items():
                known = self._prints.get((id(module), key))
                if value is not before.get(key, _MISSING) or not (known is None or known.is_of(value)):
                    found.setdefault(id(module), []).append(key)
                    self._share((value,))
        return found

    def _share(self, values: Iterable[Any]) -> None:
        """From now on all ranks share these values, if they reference no tensor and no module."""
        for value in shareable(values):
            self._shared[id(value)] = value
            for memo in self._memos:
                memo[id(value)] = value

    def _let_go(self) -> None:
        """Drops shared values that the model no longer references, if weak references could reveal that they are kept alive."""
        if not any(map(weakref.getweakrefcount, self._shared.values())):
            return
        held = {
            id(value)
            for value in shareable(value for module in self._model.modules() for value in _held_by_rank_model(module))
        }
        for key in self._shared.keys() - held:
            for memo in (self._shared, *self._memos):
                memo.pop(key, None)

    def _follow_modules(self, rank: int, own: nn.Module, copies: dict[int, Any]) -> None:
        memo = self._memos[rank]
        queue = [(own, self._model)]
        while queue:
            ours, theirs = queue.pop()
            if ours is theirs:
                continue
            if type(ours) is not type(theirs):
                ours.__class__ = type(theirs)
            wanted: dict[str, nn.Module | None] = {}
            for name, child in theirs._modules.items():
                if child is not None and id(child) not in memo:
                    copied = _copy_if_possible(child, copies)
                    memo.update(_pairs_of_rank_models(child, copied))
                    self._kept.append(child)
                wanted[name] = None if child is None else memo[id(child)]
            if list(map(id, wanted.values())) != list(map(id, ours._modules.values())) or [*wanted] != [*ours._modules]:
                ours._modules.clear()
                ours._modules.update(wanted)
            queue += ((memo[id(child)], child) for child in theirs._modules.values() if child is not None)

    def _follow_attributes(self, own: nn.Module, changed: dict[int, list[str]], copies: dict[int, Any]) -> None:
        if changed:  # a value set under two names is one object here as well
            for value, copied in self._unchanged(own, changed):
                copies.setdefault(id(value), copied)
        for ours, theirs in zip(own.modules(), self._model.modules(), strict=True):
            if ours is theirs:
                continue
            for key in changed.get(id(theirs), ()):
                vars(ours)[key] = _copy_if_possible(vars(theirs)[key], copies)
            for key in self._attributes.get(id(theirs), {}).keys() - vars(theirs).keys():
                vars(ours).pop(key, None)

    def _unchanged(self, own: nn.Module, changed: dict[int, list[str]]) -> Iterator[tuple[Any, Any]]:
        """The objects that unchanged attributes reference, with this rank's copies."""
        for ours, theirs in zip(own.modules(), self._model.modules(), strict=True):
            for key, value in () if ours is theirs else plain_attributes(theirs).items():
                if key not in changed.get(id(theirs), ()) and key in vars(ours):
                    yield from paired(value, vars(ours)[key])

    def _follow_hooks(self, own: nn.Module, copies: dict[int, Any]) -> None:
        for ours, theirs in zip(own.modules(), self._model.modules(), strict=True):
            if ours is theirs:
                continue
            known = self._hooks.get(id(theirs), {})
            for key, ids in _hooks_of_rank_model(theirs).items():
                if ids != known.get(key):
                    vars(ours)[key].clear()  # the dict itself is the copy's already
                    vars(ours)[key].update(
                        {i: _copy_if_possible(hook, copies) for i, hook in vars(theirs)[key].items()}
                    )

    def _follow_buffers(self, rank: int, own: nn.Module) -> None:
        """Buffers that are one tensor stay one tensor here, also after the script has replaced some."""
        places = list(self._buffer_places(rank, own))
        copies = {
            id(value): ours[key] for ours, key, value, seen in places if seen is not None and seen[0] == id(value)
        }
        for ours, key, value, seen in places:
            if seen is None or seen[0] != id(value):
                ours[key] = copies.setdefault(id(value), value.detach().clone())
            elif seen != _seen_in_rank_model(value):
                ours[key] = copies[id(value)] = _updated_in_rank_model(copies[id(value)], value)

    def _buffer_places(self, rank: int, own: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor, _Seen | None]]:
        """For tensors that the rank has a copy of: this rank's tables, the names in them, the user's tensors and their earlier values."""
        prefixes = (prefix for prefix, _ in self._model.named_modules())
        for prefix, ours, theirs in zip(prefixes, own.modules(), self._model.modules(), strict=True):
            seen = self._buffers.get(id(theirs), {})
            if isinstance(theirs, torch.jit.ScriptModule):
                continue
            for key in ours._buffers.keys() - theirs._buffers.keys():
                del ours._buffers[key]
            for key, value in () if ours is theirs else theirs._buffers.items():
                name = f"{prefix}.{key}" if prefix else key
                if value is None or self._home(self._canonical.get(name, name)) == rank:
                    ours._buffers[key] = value
                else:
                    yield ours._buffers, key, value, seen.get(key) if ours._buffers.get(key) is not None else None

    def _follow_parameters(self, rank: int, own: nn.Module) -> None:
        theirs = dict(self._model.named_parameters())
        for name, parameter in own.named_parameters():
            value = theirs.get(name)
            if value is None or value is parameter or rank not in self._holders.get(name, (rank,)):
                continue
            parameter.requires_grad_(value.requires_grad)
            parameter.data = _updated_in_rank_model(parameter.data, value.data)


_MISSING = object()


def _memory(tensor: Tensor) -> int:
    """The identity of a tensor's storage; of the tensor itself if it has none, as a sparse one."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def own_parameter(parameter: nn.Parameter, value: Tensor | None = None) -> nn.Parameter:
    """A copy of a parameter, with memory of its own."""
    data = parameter.detach().clone() if value is None else value.to(parameter.dtype)
    own = nn.Parameter(data, parameter.requires_grad)
    vars(own).update(vars(parameter))
    return own


def _updated_in_rank_model(own: Tensor | None, value: Tensor) -> Tensor:
    """The rank's tensor, filled with that value; a new tensor if shape or dtype differ."""
    if own is None or (own.shape, own.dtype, own.device) != (value.shape, value.dtype, value.device):
        return value.detach().clone()
    with torch.no_grad():
        return own.copy_(value)


def _seen_in_rank_model(tensor: Tensor) -> _Seen:
    return id(tensor), -1 if tensor.is_inference() else tensor._version


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """A module's attributes other than parameters, buffers, modules and hooks."""
    return {k: v for k, v in vars(module).items() if k not in _OWN_TABLES and not _is_hooks(k)}


def _is_hooks(key: str) -> bool:
    return key.startswith("_") and "_hooks" in key


def _hooks_of_rank_model(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Which hooks a module has, by kind."""
    return {k: tuple(v) for k, v in vars(module).items() if _is_hooks(k) and isinstance(v, Mapping)}


def _held_by_rank_model(module: nn.Module) -> Iterator[Any]:
    """The objects that a module's plain attributes and hooks reference."""
    hooks = (hook for key in _hooks_of_rank_model(module) for hook in vars(module)[key].values())
    return reached((*plain_attributes(module).values(), *hooks))


def _pairs_of_rank_models(theirs: nn.Module, ours: nn.Module) -> dict[int, Any]:
    """By id, the copy of each module."""
    return {id(a): b for a, b in zip(theirs.modules(), ours.modules(), strict=True)}


def _attribute_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Tensors that modules hold as plain attributes."""
    for module in model.modules():
        yield from (
            item for item in _held_by_rank_model(module) if isinstance(item, Tensor) and item.layout is torch.strided
        )


def _attribute_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that modules hold as plain attributes."""
    for module in model.modules():
        yield from (item for item in _held_by_rank_model(module) if isinstance(item, nn.Module))


def copied_model(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy. A value that cannot be copied (a lock, a process group) is shared, and joins the memo.

    Buffers and attributes that belong to the autograd graph of an earlier call (the weight of `weight_norm`) are copied without it.
    """
    held = (
        value for module in model.modules() for table in (module._buffers, vars(module)) for value in table.values()
    )
    hanging = {id(t): t for t in held if isinstance(t, Tensor) and t.grad_fn is not None and id(t) not in memo}
    memo.update({key: tensor.detach().clone() for key, tensor in hanging.items()})
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception:  # a class's own __deepcopy__ may raise anything
        for module in model.modules():
            for value in (
                *plain_attributes(module).values(),
                *(vars(module)[key] for key in _hooks_of_rank_model(module)),
            ):
                if _copy_if_possible(value, dict(memo)) is value:
                    memo[id(value)] = value
        return copy.deepcopy(model, dict(memo))


def _copy_if_possible(value: Any, memo: dict[int, Any]) -> Any:
    """A copy, or the value itself if it cannot be copied."""
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # as above
        return value
