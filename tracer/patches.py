"""Entry points of torch and of libraries that are led through the recorder while it records.

`Functions`: calls of custom autograd functions, each recorded as one node.

A subclass of torch.autograd.Function has a backward of its own, which a recording of the torch calls in its forward would lose. So its
forward runs unrecorded, over fakes, and the node calls the class again: target "package.module.Class.apply", the arguments as given.

    of the node     where it comes from
    spec, effects   the outputs and the version counters of its arguments, as for every call
    saved           what `save_for_backward` keeps, and tensors held as attributes of `ctx`
    flops, random   all operations in the forward
    bytes_moved     of the torch calls in the forward, added up

The call must contain everything that the forward depends on. A call that cannot be repeated from the node alone is an error, which names
the reason and lets the module around it be called whole (see `smpc.tracer.operations.opaque`):

    a class that no qualified name leads to: one defined inside a function
    an argument that is neither tensor nor constant: a module, a process group, a named tuple
    a parameter, a buffer or a recorded tensor that the forward uses without having been given it
    a class attribute that is set while the model runs
    a forward that needs the values of tensors, and one under `torch.vmap` and the like

Functions inside functions are part of the outermost one, and those inside torch calls are part of these: neither has a node.

    >>> [node.target for node in record(model, (x,)).nodes]                                         # doctest: +SKIP
    ['args[0]', 'transformers.models.bloom.modeling_bloom.GeLUFunction.apply']

`call_script`: calls of TorchScript functions, each recorded as one node that calls the function again.

The script's interpreter is C++ and runs kernels without telling Python, so that nothing inside can be recorded; its backward comes with it
wherever it is called. A function needs a name that leads to it: `@torch.jit.script` at the top of a module. TorchScript modules are called
whole (see `smpc.tracer.record`).

`Transforms`: what runs under `torch.vmap`, `torch.func.grad` and the other transforms of torch.func.

Inside a transform tensors stand for others in a way that only the transform knows, and the function that it transforms has no name to call
it by. A transform performs plain operations on plain tensors, `torch.ops.aten.mul.Tensor` and the like: these are recorded, with autograd
above them as in a run without a transform. So any Python may be inside.

    torch.vmap(lambda row: row * scale)(x)      mul = torch.ops.aten.mul.Tensor(x, scale)

A module that differentiates so is rather called whole, as one that calls torch.autograd.grad: only the model's own forward is recorded
below its derivatives.

Two things stay hidden there: calls of modules, so that a module called under a transform is not called whole, and the backwards of custom
autograd functions, which are refused where they would be needed.

`looking`: libraries that ask whether they are being traced, and take another way then.

Hugging Face's masks do. Run, they look at the positions, find one sequence in each row, and leave the mask to `is_causal`; traced,
they cannot look, and write the mask out: attention then has other kernels (no flash attention), repeats the heads of keys and
values, and the mask travels with the activations. A recording can look where a value depends on sizes alone.

It could look at the model's inputs, too, but then its program would hold only for some: an `attention_mask` of ones is left out,
one with zeros is not. So it looks only at inputs that the caller names (`record`'s `shown`), and a guard says on what that rests.
Training scripts name the masks that are ones in all microbatches of a step. All others are written out, in one program for all.

`run_higher_order`: `torch.cond`, `while_loop`, `scan`, `associative_scan` and `map`. Their Python is recorded as it runs once, like `if`
and `for`.

These operators take functions, which a trace cannot hold. Run by themselves they call their functions one after another, and so they do
while a model is recorded: a branch is taken, a loop runs. The decision is a question about values (see `smpc.tracer.input_guards`): known
where it depends on inputs and buffers alone, and guarded; otherwise the module around the operator is called whole.

    torch.cond(lengths.max() > 4, long, short, (x,))        the nodes of `long(x)`, and a guard
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._functorch import eager_transforms, vmap
from torch._higher_order_ops import utils
from torch._higher_order_ops.associative_scan import associative_scan_op, generic_associative_scan
from torch._higher_order_ops.cond import cond_op
from torch._higher_order_ops.map import map_dense, map_impl
from torch._higher_order_ops.scan import generic_scan, scan_op
from torch._higher_order_ops.while_loop import while_loop_dense, while_loop_op
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode

from smpc.errors import SmpcError
from smpc.tracer import targets
from smpc.tracer.effects import torch_calls
from smpc.tracer.effects.differentiation import OWN_MODULE
from smpc.tracer.effects.torch_calls import tensors_in, version_of
from smpc.tracer.operations.meter import moved_bytes
from smpc.tracer.operations.value_queries import SizeAskedError

if TYPE_CHECKING:
    from smpc.tracer.recording.recorder import Recorder


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
        """The result of `run`, which calls `cls.apply(*args, **kwargs)`; adds the node of that call."""
        recorder, target = self._recorder, self._target(cls)
        recorder.sizes.refuse((args, kwargs))
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
            except (SmpcError, SizeAskedError):
                raise
            except Exception as error:
                self._refuse(cls, f"does not run without values ({type(error).__name__}: {error})", error)
        with torch._C.DisableTorchFunction():
            if inside.foreign:
                self._refuse(cls, f"uses {inside.foreign}, which is not among its arguments")
            self._check_attributes(cls)
            results = list(tensors_in(out))
            for tensor in _held_by_context(cls, results):
                recorder.note_saved(tensor)
            written = recorder.written(before)
            if results or written:
                moved = inside.bytes_moved or moved_bytes(given, results, bool(written))
                recorder.add_call(target, arguments, out, written, moved)
        return out

    def restore(self) -> None:
        """Gives the classes back the attributes that they had: what a recording sets may hold fakes."""
        for cls, attributes in self._attributes.items():
            for name in _changed_attributes(cls, attributes):
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
            changed = _changed_attributes(base, self._attributes[base]) if base in self._attributes else []
            if changed:
                self._refuse(cls, f"has class attributes that are set while the model runs ({', '.join(changed)})")

    def _refuse(self, cls: _Class, why: str, cause: BaseException | None = None) -> NoReturn:
        raise self._recorder.error(f"custom autograd function {cls.__qualname__} {why}", way_out=_WAY_OUT) from cause


class _Inside:
    """Observations of the torch calls inside one call."""

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


def _changed_attributes(cls: type, attributes: Mapping[str, Any]) -> list[str]:
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


def _held_by_context(cls: _Class, results: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Tensors that a function's `ctx` holds as attributes; it is in autograd's graph as the origin of the results."""
    for tensor in results:
        context = tensor.grad_fn
        if isinstance(context, cls._backward_cls):
            yield from tensors_in(tuple(vars(context).values()))
            return


def call_script(
    recorder: Recorder,
    function: Any,
    run: Callable[[], Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """The result of `run`, which calls the torch.jit.ScriptFunction with these arguments; adds the node of that call."""
    with torch._C.DisableTorchFunction():
        target = _script_function_name(recorder, function)
        recorder.sizes.refuse((args, kwargs))
        arguments = recorder.arguments(target, args, kwargs)
        given = list(tensors_in((args, kwargs)))
        before = [(tensor, version_of(tensor)) for tensor in given]
    with recorder.inside_call():
        out = run()
    with torch._C.DisableTorchFunction():
        written = [tensor for tensor, version in before if version_of(tensor) != version]
        recorder.add_call(target, arguments, out, written, moved_bytes(given, list(tensors_in(out)), bool(written)))
    return out


def _script_function_name(recorder: Recorder, function: Any) -> str:
    """The qualified name of a TorchScript function; an error if it does not lead to it."""
    origin: Any = vars(function).get("_torchdynamo_inline")  # the Python that was compiled
    name = f"{origin.__module__}.{origin.__qualname__}" if origin is not None else function.name
    try:
        found = targets.function(name)
    except KeyError:
        found = None
    if found is not function:
        raise recorder.error(
            f"TorchScript function {function.name} must be defined at the top of a module, where its name leads to it"
        )
    return name


# Where torch enters a transform: (module, name of the context manager).
_ENTRIES: tuple[tuple[Any, str], ...] = (
    (vmap, "vmap_increment_nesting"),
    (eager_transforms, "grad_increment_nesting"),
    (eager_transforms, "jvp_increment_nesting"),
)


class Transforms:
    """The transforms that one recording meets."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._depth = 0

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """In this context, what runs under a transform is recorded."""
        originals = [getattr(owner, name) for owner, name in _ENTRIES]
        differentiate = eager_transforms._autograd_grad

        def differentiated(*args: Any, **kwargs: Any) -> Any:  # by the function that torch.func.vjp returns
            with self._operations():
                return differentiate(*args, **kwargs)

        for (owner, name), original in zip(_ENTRIES, originals, strict=True):
            setattr(owner, name, self._entering(original, differentiates=owner is eager_transforms))
        eager_transforms._autograd_grad = differentiated
        try:
            yield
        finally:
            eager_transforms._autograd_grad = differentiate
            for (owner, name), original in zip(_ENTRIES, originals, strict=True):
                setattr(owner, name, original)

    def _entering(
        self, original: Callable[..., AbstractContextManager[Any]], *, differentiates: bool
    ) -> Callable[..., Any]:
        recorder = self._recorder

        @contextmanager
        def entering(*args: Any, **kwargs: Any) -> Iterator[Any]:
            if differentiates and not recorder.muted and recorder.context():
                raise recorder.error("forward differentiates (torch.func)", way_out=OWN_MODULE)
            with original(*args, **kwargs) as level, self._operations():
                yield level

        return entering

    @contextmanager
    def _operations(self) -> Iterator[None]:
        """Records operations in this context, unless it is part of something larger that is recorded."""
        recorder = self._recorder
        if recorder.muted:
            yield
            return
        operations = _Operations(recorder)
        with recorder.inside_call():
            self._depth += 1
            recorder.in_transforms += 1
            try:
                with operations:
                    yield
            finally:
                self._depth -= 1
                recorder.in_transforms -= 1
            operations.note_saved()

    def check_function(self, cls: type[torch.autograd.Function], args: Any) -> None:
        """Raise if a custom autograd function that is called under a transform has a backward that is needed."""
        if not self._depth or not torch.is_grad_enabled():
            return
        if any(_plain_tensor(tensor).requires_grad for tensor in tensors_in(args)):
            raise self._recorder.error(
                f"custom autograd function {cls.__qualname__} is called under a transform, such as torch.vmap, where its backward "
                "cannot be recorded"
            )


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations: this sees them when transforms and autograd have done their part."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._made: list[tuple[int, torch.Tensor]] = []  # position of a node, and what it returned

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        recorder, kwargs = self._recorder, dict(kwargs or {})
        real = torch_calls.lifted(func, args)
        recorder.begin_call()
        out = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if real is not None:
                if not recorder.known(real):
                    recorder.add_constant(real, out)
                return out
            written = _written_arguments(func, args, kwargs)
            results = list(tensors_in(out))
            if results or written:
                target = targets.name_of(func)
                moved = moved_bytes(list(tensors_in((args, kwargs))), results, bool(written))
                arguments = recorder.arguments(target, args, kwargs)
                position = len(recorder.nodes)
                recorder.add_call(target, arguments, out, written, moved)
                self._made += [(position, tensor) for tensor in results]
        return out

    def note_saved(self) -> None:
        """Notes tensors that autograd has saved meanwhile: inside transforms its hooks do not run."""
        with torch._C.DisableTorchFunction():
            for position, tensor in self._made:
                if tensor.grad_fn is not None:
                    names = (name for name in dir(tensor.grad_fn) if name.startswith("_saved_"))
                    saved = tensors_in(tuple(getattr(tensor.grad_fn, name) for name in names))
                    self._recorder.amend_saved(position, [found for found in saved if not _is_wrapped(found)])


def _written_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operation writes in place, as its schema says."""
    found: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_in(args[position] if position < len(args) else kwargs.get(argument.name))
    return found


def _is_wrapped(tensor: torch.Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def _plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor below all transforms."""
    while _is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


_ASKED = "transformers.utils.import_utils", "is_fake_tensor"


@contextmanager
def looking(is_shown: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """In this context such libraries take a fake tensor for a real one if it is shown."""
    library = sys.modules.get(_ASKED[0])
    original = getattr(library, _ASKED[1], None)
    if original is None:
        yield
        return

    def is_fake_tensor(value: Any) -> bool:
        return bool(original(value)) and not is_shown(value)

    setattr(library, _ASKED[1], is_fake_tensor)
    try:
        yield
    finally:
        setattr(library, _ASKED[1], original)


def _cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any) -> Any:
    return true_fn(*operands) if pred else false_fn(*operands)


def _scan(combine_fn: Callable[..., Any], init: Any, xs: Any, additional_inputs: Any = ()) -> Any:
    return generic_scan(combine_fn, init, xs, additional_inputs=additional_inputs)  # type: ignore[no-untyped-call]


def _associative_scan(combine_fn: Callable[..., Any], xs: Any, additional_inputs: Any = ()) -> Any:
    return generic_associative_scan(combine_fn, xs, additional_inputs=additional_inputs)  # type: ignore[no-untyped-call]


_OTHER_WAY = (
    "what to do: take an implementation without it (attn_implementation='sdpa' in place of 'flex_attention'), "
    "or have the module called whole that makes these functions (leaf_modules=[...], smpc.mark_leaf)"
)

_DIRECTLY: dict[Any, Callable[..., Any]] = {
    cond_op: _cond,
    while_loop_op: while_loop_dense,
    scan_op: _scan,
    associative_scan_op: _associative_scan,
    map_impl: map_dense,
}


def is_higher_order(func: Callable[..., Any]) -> bool:
    """Whether the call is of an operator that takes functions."""
    return isinstance(func, torch._ops.HigherOrderOperator)


def run_higher_order(
    recorder: Recorder, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The operator's result; the calls of its functions are recorded. Raises UntraceableError for other operators."""
    if func not in _DIRECTLY:
        what = f"torch.ops.higher_order.{func.__name__} takes Python functions, which a trace cannot hold"
        raise recorder.error(what, way_out=_OTHER_WAY)
    with recorder:
        return _DIRECTLY[func](*args, **kwargs)


@contextmanager
def without_compiling() -> Iterator[None]:
    """In this context these operators are not compiled before they run, which they are otherwise, if only by Dynamo."""
    original = utils._hop_compile_and_call

    def call(function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any] | None = None) -> Any:
        return function(*args, **(kwargs or {}))

    utils._hop_compile_and_call = call
    try:
        yield
    finally:
        utils._hop_compile_and_call = original
