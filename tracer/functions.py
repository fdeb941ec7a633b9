"""Calls of custom autograd functions, each recorded as one node.

A subclass of torch.autograd.Function has a backward of its own, which a recording of the torch calls in its forward would lose. So its
forward runs unrecorded, over fakes, and the node calls the class again: target "package.module.Class.apply", the arguments as given.

    of the node     where it comes from
    spec, effects   the outputs and the version counters of its arguments, as for every call
    saved           what `save_for_backward` keeps, and tensors held as attributes of `ctx`
    flops, random   all operations in the forward
    bytes_moved     of the torch calls in the forward, added up

The call must say all that the forward depends on. What cannot be called again from the node alone is an error, which names the reason and
lets the module around it be called whole (see `smpc.tracer.opaque`):

    a class that no qualified name leads to: one defined inside a function
    an argument that is neither tensor nor constant: a module, a process group, a named tuple
    a parameter, a buffer or a recorded tensor that the forward uses without having been given it
    a class attribute that is set while the model runs
    a forward that needs the values of tensors, and one under `torch.vmap` and the like

Functions inside functions are part of the outermost one, and those inside torch calls are part of these: neither has a node.

    >>> [node.target for node in record(model, (x,)).nodes]                                         # doctest: +SKIP
    ['args[0]', 'transformers.models.bloom.modeling_bloom.GeLUFunction.apply']
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch.autograd import Function

from smpc.errors import SmpcError
from smpc.tracer import targets
from smpc.tracer.effects import tensors_in, version_of
from smpc.tracer.measure import moved_bytes
from smpc.tracer.recorder import Recorder

_Class = type[Function]

_CONTAINERS = (tuple, list, dict, slice, torch.Size)  # of another class, a trace would make these
_MISSING = object()
_WAY_OUT = (
    "what to do: give the function all that it needs as arguments, "
    "or have the module called whole (leaf_modules=[...], smpc.mark_leaf)"
)


class Functions:
    """The custom autograd functions that one recording meets."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._attributes = {cls: dict(vars(cls)) for cls in _subclasses(Function)}

    def call(self, cls: _Class, run: Callable[[], Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What `run` returns, which calls `cls.apply(*args, **kwargs)`; adds the node of that call."""
        recorder, target = self._recorder, self._target(cls)
        with torch._C.DisableTorchFunction():
            self._check_containers(cls, args, kwargs)
            node_args, node_kwargs = recorder.arguments(target, args, kwargs)
            arguments = _with_sizes(args, node_args), _with_sizes(tuple(kwargs.items()), node_kwargs)
            given = list(tensors_in((args, kwargs)))
            before = [(tensor, version_of(tensor)) for tensor in given]
            inside = _Inside(recorder, given)
        recorder.begin_call()
        with recorder.inside_call(inside.torch_call):
            try:
                out = run()
            except SmpcError:
                raise
            except Exception as error:
                self._refuse(cls, f"does not run without values ({type(error).__name__}: {error})", error)
        with torch._C.DisableTorchFunction():
            if inside.foreign:
                self._refuse(cls, f"uses {inside.foreign}, which is not among its arguments")
            self._check_attributes(cls)
            results = list(tensors_in(out))
            for tensor in _held(cls, results):
                recorder.note_saved(tensor)
            written = [tensor for tensor, version in before if version_of(tensor) != version]
            if results or written:
                moved = inside.bytes_moved or moved_bytes(given, results, bool(written))
                recorder.add_call(target, arguments, out, written, moved)
        return out

    def restore(self) -> None:
        """Gives the classes back the attributes that they had: what a recording sets may hold fakes."""
        for cls, attributes in self._attributes.items():
            for name in _changed(cls, attributes):
                if name in attributes:
                    setattr(cls, name, attributes[name])
                else:
                    delattr(cls, name)

    def _target(self, cls: _Class) -> str:
        if torch._C._are_functorch_transforms_active():
            self._refuse(cls, "is called under a transform, such as torch.vmap")
        try:
            return targets.name_of_apply(cls)
        except KeyError as error:
            self._refuse(cls, f"must be defined at the top of a module, where its name leads to it: {error.args[0]}")

    def _check_containers(self, cls: _Class, *trees: Any) -> None:
        """A named tuple, say, would come back as a tuple."""
        for tree in trees:
            if not isinstance(tree, (tuple, list, Mapping)):
                continue
            if type(tree) not in _CONTAINERS:
                self._refuse(cls, f"has a {type(tree).__qualname__} as argument, which a trace cannot hold")
            self._check_containers(cls, *(tree.values() if isinstance(tree, Mapping) else tree))

    def _check_attributes(self, cls: _Class) -> None:
        """A node calls the class as it is later, not as it was when the model called it."""
        for base in cls.__mro__:
            changed = _changed(base, self._attributes[base]) if base in self._attributes else []
            if changed:
                self._refuse(cls, f"has class attributes that are set while the model runs ({', '.join(changed)})")

    def _refuse(self, cls: _Class, why: str, cause: BaseException | None = None) -> NoReturn:
        raise self._recorder.error(f"custom autograd function {cls.__qualname__} {why}", way_out=_WAY_OUT) from cause


class _Inside:
    """What is seen of the torch calls inside one call."""

    def __init__(self, recorder: Recorder, given: list[torch.Tensor]) -> None:
        bases = [
            tensor._base for tensor in given if tensor._base is not None
        ]  # autograd reads them after a write into a view
        self._recorder, self._given = recorder, {id(tensor): tensor for tensor in (*given, *bases)}
        self.bytes_moved = 0
        self.foreign = ""  # a tensor of the model that was used without having been given

    def torch_call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a torch call and takes note of it."""
        used = list(tensors_in((args, kwargs)))
        before = [version_of(tensor) for tensor in used]
        out = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            for tensor in used:
                if id(tensor) not in self._given and not self.foreign:
                    self.foreign = self._recorder.known(tensor)
            writes = [version_of(tensor) for tensor in used] != before
            self.bytes_moved += moved_bytes(used, list(tensors_in(out)), writes)
        return out


def _subclasses(cls: type[Function]) -> Iterator[type[Function]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _changed(cls: type, attributes: Mapping[str, Any]) -> list[str]:
    """Names of the attributes of a class that are not those."""
    now = vars(cls)
    names = dict.fromkeys((*attributes, *now))
    return [name for name in names if attributes.get(name, _MISSING) is not now.get(name, _MISSING)]


def _with_sizes(values: Any, tree: Any) -> Any:
    """The arguments with torch.Size where it was: for torch's own functions a tuple is as good, and reads better."""
    if isinstance(values, torch.Size):
        return values
    if isinstance(values, (tuple, list)):
        return type(values)(_with_sizes(value, item) for value, item in zip(values, tree, strict=True))
    if isinstance(values, dict):
        return {key: _with_sizes(value, tree[key]) for key, value in values.items()}
    return tree


def _held(cls: _Class, results: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Tensors that a function's `ctx` holds as attributes; it stands in autograd's graph as the origin of the results."""
    for tensor in results:
        context = tensor.grad_fn
        if isinstance(context, cls._backward_cls):
            yield from tensors_in(tuple(vars(context).values()))
            return
