"""Names for torch functions, and the functions behind the names.

A recorded call is known by the qualified name under which a person would call it: "torch.nn.functional.linear",
"torch.Tensor.view", "torch.ops.aten.add.Tensor", of a custom autograd function "package.module.Class.apply". Reading an attribute of
a tensor (`x.T`) is "builtins.getattr" with the attribute's name as second argument, writing one (`x.data = y`) is "builtins.setattr",
taking an item is "_operator.getitem".
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from smpc.tracer.constants import loaded

GETATTR = "builtins.getattr"
SETATTR = "builtins.setattr"
GETITEM = "_operator.getitem"
SETITEM = "_operator.setitem"
TENSOR_OPS = "smpc.executor.tensor_ops"  # what tensor-parallel stages call
# Of a call of a module, as a keyword: who calls it, with (names, group) before its arguments.
ON_SUMMANDS = f"{TENSOR_OPS}.on_summands"  # names of parameters
BY_EXPERT = "smpc.experts.stacked.by_expert"  # names of attributes that count experts
IN_SEGMENTS = "smpc.experts.segmented.in_segments"  # (name, those) of modules inside
CALLERS = (ON_SUMMANDS, BY_EXPERT, IN_SEGMENTS)
APPLY = ".apply"  # how the names of custom autograd functions end

# torch's own definition, in Python or from 2.14 on in C++: while a model is recorded, it is replaced by another one.
_TORCH_APPLY: Any = torch.autograd.Function.__dict__["apply"]

_OWN_OPS = "torch.ops.smpc."
_OF_NUMPY = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other"}

# Searched in this order: the name that users know best comes first.
_NAMESPACES = (
    "torch.nn.functional",
    "torch",
    "torch.Tensor",
    "torch.special",
    "torch.linalg",
    "torch.fft",
    "torch.nn.init",
    "torch._C._nn",
    "torch._C._special",
    "torch._C._linalg",
    "torch._C._fft",
    "torch._VF",
)


def name_call(func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """The name of a call and the arguments to make it with; a property access becomes `builtins.getattr(x, "T")`.

    Raises KeyError when the function cannot be reached by a name.
    """
    kind = getattr(func, "__name__", "")
    if kind == "__get__":
        return GETATTR, (args[0], _attribute_of_slot(func))
    if kind == "__set__":
        return SETATTR, (args[0], _attribute_of_slot(func), args[1])
    if kind == "__getitem__":
        return GETITEM, args
    if kind == "__setitem__":
        return SETITEM, args
    return name_of(func), args


def plain_arguments(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments of a call as code reads them that knows torch's own names, and looks for the first operands by place.

    torch's functions in C++ also take the names that numpy has (`x.sum(axis=1)` for `dim`), and all their arguments by name.
    """
    if not kwargs or isinstance(func, types.FunctionType):
        return args, kwargs
    if not args:
        args, kwargs = _placed(func, kwargs)
    if any(name in _OF_NUMPY for name in kwargs):
        known = _parameters_of(getattr(func, "__name__", ""))
        torchs = {name: _OF_NUMPY.get(name, name) if name not in known else name for name in kwargs}
        kwargs = {torchs[name] if torchs[name] in known else name: value for name, value in kwargs.items()}
    return args, kwargs


def _placed(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The first operands of a call that has them all by name, by place, and the other arguments."""
    signature = torch.overrides.get_testing_overrides().get(func)
    if signature is None:
        return (), kwargs
    args, left = [], dict(kwargs)
    for parameter in inspect.signature(signature).parameters.values():
        name = next((n for n in (parameter.name, *_numpys(parameter.name)) if n in left), None)
        if name is None or not _is_operand(left[name]) or parameter.name == "out":
            break
        args.append(left.pop(name))
    return tuple(args), left


def _is_operand(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (
        isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value)
    )


def _numpys(name: str) -> list[str]:
    return [other for other, own in _OF_NUMPY.items() if own == name]


@functools.cache
def _parameters_of(name: str) -> frozenset[str]:
    """The names of the arguments of an operation, in all of its forms."""
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return frozenset()
    schemas = (getattr(packet, overload)._schema for overload in packet.overloads())  # type: ignore[no-untyped-call]
    names = {argument.name for schema in schemas for argument in schema.arguments}
    return frozenset({"input" if name == "self" else name for name in names})


def name_of(func: Callable[..., Any]) -> str:
    """The qualified name of a function. Raises KeyError when it has none."""
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"torch.ops.{func}"
    try:
        found = _index_of_functions().get(func)
    except TypeError:  # not hashable
        found = None
    if found is not None:
        return found
    name = f"{func.__module__}.{func.__qualname__}"
    if _name_reaches(name, func):
        return name
    raise KeyError(f"{func!r} is called {name}, but that name does not lead to it")


def name_of_apply(cls: type[torch.autograd.Function]) -> str:
    """The name under which a custom autograd function is called. Raises KeyError when the class cannot be reached by its name."""
    name = f"{cls.__module__}.{cls.__qualname__}{APPLY}"
    apply = _TORCH_APPLY.__get__(None, cls)
    if _name_reaches(name, apply):
        return name
    function.cache_clear()  # a class that a notebook has defined again has the name of the one before
    if _name_reaches(name, apply):
        return name
    raise KeyError(f"{name.removesuffix(APPLY)} does not lead to it")


@functools.cache
def function(name: str) -> Callable[..., Any]:
    """The function of that qualified name, in a module of torch or one that is imported. Raises KeyError if there is none."""
    if name.startswith(_OWN_OPS):
        importlib.import_module("smpc.kernels.ops")  # registers them
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            found: Any = loaded(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        owner: Any = None
        for part in parts[length:]:
            owner, found = found, getattr(found, part, None)
            if isinstance(found, types.ModuleType) and found.__name__.split(".")[0] != parts[0]:
                found = None  # what a module imports is no part of it: torch.os.system
        if not callable(found):
            break
        if name.endswith(APPLY) and isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
            return _TORCH_APPLY.__get__(None, owner)  # type: ignore[no-any-return]
        return found  # type: ignore[no-any-return]
    raise KeyError(
        f"{name}, which a traced model calls, is not defined here; import what defines it before the model runs"
    )


def _attribute_of_slot(func: Callable[..., Any]) -> str:
    """The attribute that a bound `__get__` or `__set__` belongs to."""
    descriptor: Any = func.__self__  # type: ignore[attr-defined]
    getter: Any = descriptor.fget if isinstance(descriptor, property) else descriptor
    return str(getter.__name__)


def _name_reaches(name: str, func: Callable[..., Any]) -> bool:
    """Whether the name leads to this function."""
    try:
        found = function(name)
    except KeyError:
        return False
    return found is func or (isinstance(found, types.MethodType) and found == func)


@functools.cache
def _index_of_functions() -> dict[Callable[..., Any], str]:
    """Every function of the usual namespaces, by identity, with its best name."""
    found: dict[Callable[..., Any], str] = {operator.getitem: GETITEM}
    for namespace in _NAMESPACES:
        home = (
            torch.Tensor
            if namespace == "torch.Tensor"
            else importlib.import_module(namespace)
            if namespace != "torch._VF"
            else torch._VF
        )
        for name in dir(home):
            value = getattr(home, name, None)
            if not callable(value) or isinstance(value, type):
                continue
            try:
                found.setdefault(value, f"{namespace}.{name}")
            except TypeError:  # not hashable
                continue
    return found
