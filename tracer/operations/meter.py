"""Facts about a call from a fake run: its cost in FLOPs, bytes and random draws, what it writes, and whether its dtypes have a kernel.

`Meter` is a TorchDispatchMode that sees the aten operations under a recorded torch function.

`check_dtypes`: dtypes that an operation's real kernel does not take, though its fake run does. Shape rules ask little about dtypes: over
fake tensors, a linear layer of floats takes integers, and a plan comes out that no device can run. So each aten operation that a
recording sees is also run for real, once for each combination of operation, dtypes and small sizes, on tensors of a few elements, with
what other arguments it has.

An operation is refused only if dtypes are why it fails: the same call passes with other ones, so the sizes were right. The call is
accepted where there is no such evidence:

    it fails with any dtypes        a few elements are too few for it, or invented values are wrong
    it passes with wide floats      this processor has no kernel for the dtype, which says nothing of a GPU. So float16, bfloat16 and the
                                    like stand for themselves only as far as they differ from each other

Example: addmm(bias: float32, x: int64, weight: float32) fails, and passes with x: float32. So float32 was expected for x.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from smpc.tracer.effects.torch_calls import same_memory, written_by

WAY_OUT = "what to do: convert the tensor to that dtype, in the model or before it is passed in"
_SIZES = (2, 8)  # most elements along a dimension: few do for most operations, pooling and the like need more
_WIDE = (torch.float32, torch.float64)
_TRIED = (torch.float32, torch.int64, torch.bool)  # for an argument, beside the dtypes of the others
_NOT_RUN = (
    *("_unsafe_view", "clone", "copy", "_like", "new_"),  # they take all dtypes
    *(
        "mkldnn",
        "cudnn",
        "miopen",
        "rnn",
        "lstm",
        "gru",
        "quant",
        "sparse",
        "nested",
        "pack",
    ),  # they want more than tensors of a size
)

_BY_MASKS = ("index_put", "masked_scatter")  # how many values they take depends on what is true in a mask
_TRUTH = ("false", "true")  # bools in a description: there, True would be equal to 1

Dtypes = tuple[torch.dtype, ...]  # of a call's tensors, in order


class DtypeError(Exception):
    """An operation does not take tensors of these dtypes. Says which it takes."""


class _NoEvidence(Exception):
    """An argument is something that no kernel should be run with."""


class _Tensor(tuple[Any, ...]):
    """A tensor argument as far as it matters: (dtype, sizes up to the largest of `_SIZES`)."""

    __slots__ = ()


class _Float:
    """A number with a fraction; its value does not matter. As a number it would be equal to a whole one."""


def check_dtypes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """DtypeError if the real kernel of an aten operation, which has just run over fakes, takes no tensors of these dtypes."""
    if func.__class__ is not OpOverload or func.namespace != "aten" or func.is_view:
        return
    try:
        refusal = _refusal(
            func, _hashable_argument(args), tuple([(key, _hashable_argument(value)) for key, value in kwargs.items()])
        )
    except (_NoEvidence, TypeError):  # the latter: an argument that cannot be hashed
        return
    if refusal:
        raise DtypeError(refusal)


def _hashable_argument(value: Any) -> Any:
    """An argument, hashable, so that calls which differ in large sizes alone are one."""
    kind = value.__class__
    if kind is FakeTensor or kind is torch.Tensor or kind is torch.nn.Parameter:
        if value.layout is not torch.strided:
            raise _NoEvidence
        return _Tensor((value.dtype, tuple([size if size < _SIZES[-1] else _SIZES[-1] for size in value.shape])))
    if kind is tuple or kind is list:
        return tuple([_hashable_argument(item) for item in value])
    if kind is int:
        return value if value < _SIZES[-1] else _SIZES[-1]  # it may be one of the sizes
    if kind is float:
        return _Float
    if kind is bool:
        return _TRUTH[value]
    if isinstance(value, (torch.Tensor, torch.Generator)):
        raise _NoEvidence
    return value


@lru_cache(maxsize=4096)
def _refusal(func: OpOverload, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> str:
    """Why the kernel does not take these dtypes; "" if it does, or nothing shows that it does not."""
    found = tuple(tensor[0] for tensor in _metered_tensors((args, kwargs)))
    if any(word in func._schema.name for word in _BY_MASKS) and (torch.bool in found or torch.uint8 in found):
        return ""
    if not found or any(word in func._schema.name for word in _NOT_RUN):
        return ""
    wide = _widened(found)
    with _for_real(func):
        for size in _SIZES:
            error = _failure(func, args, kwargs, size, found)
            if error is None or (wide != found and _failure(func, args, kwargs, size, wide) is None):
                return ""
            if _failure(func, _rounded(args), _rounded(kwargs), size, wide) is None:
                return f"expected whole numbers, found a float; {func._schema.name} says: {_first_line(error)}"
            for dtypes in _alternatives(wide):
                if _failure(func, args, kwargs, size, dtypes) is None:
                    return _explained(func, args, kwargs, wide, dtypes, error)
    return ""


def _metered_tensors(value: Any) -> Iterator[_Tensor]:
    """The tensors in nested tuples."""
    if isinstance(value, _Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _metered_tensors(item)


def _rounded(value: Any) -> Any:
    """With whole numbers in place of floats."""
    if type(value) is tuple:
        return tuple(_rounded(item) for item in value)
    return 1 if value is _Float else value


def _widened(found: Dtypes) -> Dtypes:
    """With float32 and float64 in place of other floats, as many different ones as before; unchanged if there are more than two."""
    floats = [dtype for dtype in dict.fromkeys(found) if dtype.is_floating_point]
    if len(floats) > len(_WIDE):
        return found
    free = [dtype for dtype in _WIDE if dtype not in floats]
    instead = {dtype: dtype if dtype in _WIDE else free.pop(0) for dtype in floats}
    return tuple(instead.get(dtype, dtype) for dtype in found)


def _alternatives(found: Dtypes) -> Iterator[Dtypes]:
    """Other dtypes: for one of the tensors, one for all floats or for all, or floats for one and indices for another."""
    for i, own in enumerate(found):
        for dtype in dict.fromkeys((*found, *_TRIED)):
            if dtype != own:
                yield (*found[:i], dtype, *found[i + 1 :])
    for dtype in _TRIED:
        yield tuple(dtype if own.is_floating_point else own for own in found)
        yield (dtype,) * len(found)
    for value, index in itertools.permutations(range(len(found)), 2):
        yield tuple({value: torch.float32, index: torch.int64}.get(i, own) for i, own in enumerate(found))


@contextmanager
def _for_real(func: OpOverload) -> Iterator[None]:
    """Real tensors are made and computed with; nobody's random state changes."""
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    with torch._C.DisableTorchFunction(), unset_fake_temporarily(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = torch.get_rng_state() if is_random else None
        try:
            yield
        finally:
            if state is not None:
                torch.set_rng_state(state)


def _failure(
    func: OpOverload, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], size: int, dtypes: Dtypes
) -> Exception | None:
    """The error of a run on tensors of these dtypes; None if it passes, with integers that are all 1, or all 0."""
    failed: Exception | None = None
    for integer in (1, 0):
        left = iter(dtypes)
        try:
            built = _built_argument(args, size, left, integer), _built_argument(kwargs, size, left, integer)
            func(*_adapted(func, built[0]), **dict(built[1]))
        except Exception as error:
            failed = failed or error
        else:
            return None
    return failed


def _built_argument(value: Any, size: int, dtypes: Iterator[torch.dtype], integer: int) -> Any:
    """An argument of a real call. All floats are 1."""
    if isinstance(value, _Tensor):
        dtype = next(dtypes)
        shape = [min(extent, size) for extent in value[1]]
        return torch.full(shape, 1 if dtype.is_floating_point else integer, dtype=dtype, device="cpu")
    if isinstance(value, tuple):
        return tuple(_built_argument(item, size, dtypes, integer) for item in value)
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if value is _Float:
        return 1.0
    if value in _TRUTH:
        return value == _TRUTH[True]
    return min(value, size) if type(value) is int else value


def _adapted(func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, where numbers among them have to agree with more than one size."""
    if func is torch.ops.aten.convolution.default:
        tensors = [None if value is None else torch.ones([1] * value.dim(), dtype=value.dtype) for value in args[:3]]
        ones = (1,) * (args[0].dim() - 2)
        return (*tensors, ones, (0,) * len(ones), ones, args[6], (0,) * len(ones), 1)
    if func is torch.ops.aten.native_group_norm.default:
        batch, channels, *rest = args[0].shape
        return (*args[:3], batch, channels, math.prod(rest), 1, *args[7:])
    return args


def _explained(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    wide: Dtypes,
    dtypes: Dtypes,
    error: Exception,
) -> str:
    """The dtypes that pass, the dtypes found, and the kernel's error."""
    found = [tensor[0] for tensor in _metered_tensors((args, kwargs))]
    names = [name for argument, value in _named(func, args, kwargs) for name in _parts(argument, value)]
    narrow = dict(zip(wide, found, strict=True))
    changed = [i for i, dtype in enumerate(dtypes) if dtype != wide[i]]
    expected = [f"{names[i]} of {_text(narrow.get(dtypes[i], dtypes[i]))}, found {_text(found[i])}" for i in changed]
    others = [f"{names[i]} is {_text(found[i])}" for i in range(len(found)) if i not in changed]
    beside = f" ({', '.join(others)})" if others else ""
    return f"expected {', '.join(expected)}{beside}; {func._schema.name} says: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].strip()


def _named(func: OpOverload, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> Iterator[tuple[str, Any]]:
    """Names and values of arguments, as the operation calls them."""
    yield from zip((argument.name for argument in func._schema.arguments), args, strict=False)
    yield from kwargs


def _parts(name: str, value: Any) -> list[str]:
    """A name for each tensor in an argument."""
    if isinstance(value, _Tensor):
        return [name]
    number = sum(1 for _ in _metered_tensors(value))
    return [f"{name}[{i}]" for i in range(number)]


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """FLOPs of softmax(q k^T) v for shapes [batch, heads, queries, d] and [batch, heads, keys, d]: two matrix products."""
    batch, heads, queries, width = query.shape
    return int(2 * batch * heads * queries * key.shape[-2] * (width + value.shape[-1]))


def _grouped_flops(left: Any, right: Any, *args: Any, **kwargs: Any) -> int:
    """FLOPs of one matrix product for each group of rows or columns, which together are all: see `torch.nn.functional.grouped_mm`."""
    shared = left.dim() > right.dim()  # [E, M, K] @ [K, N]: each column is multiplied by one group's matrix
    return int(2 * math.prod(left.shape[1:] if shared else left.shape) * right.shape[-1])


# torch's registry lacks the fused attention of CPUs, and grouped products.
_OWN_FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._grouped_mm: _grouped_flops,
    torch.ops.aten._scaled_grouped_mm: _grouped_flops,
}


_DEVICE = torch.ops.prim.device.default
_LSTM = torch.ops.aten.mkldnn_rnn_layer.default
_MOST_STEPS = 33  # of a sequence, run for real: what is kept is in pages


def _with_workspace(args: tuple[Any, ...], out: tuple[Any, ...]) -> tuple[Any, ...]:
    """Results of an LSTM layer on a CPU, with what it keeps for its backward: much, and nothing in fakes."""
    steps, *sizes = args[0].shape
    many = min(steps, _MOST_STEPS)
    kept = _workspace_bytes(args, (many, *sizes))
    if steps > many:
        kept += (steps - many) * (kept - _workspace_bytes(args, (1, *sizes))) // (many - 1)
    return *out[:3], out[3].new_empty(kept)


def _workspace_bytes(args: tuple[Any, ...], shape: tuple[int, ...]) -> int:
    """Bytes that a real layer keeps of a sequence of this shape; 0 where there is no kernel for its dtype."""
    kinds = [(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None for value in args]
    others = [
        tuple(value) if isinstance(value, list) else value for value in args if not isinstance(value, torch.Tensor)
    ]
    return _kept_by_lstm((shape, args[0].dtype), tuple(kinds[1:]), tuple(others))


@lru_cache(maxsize=64)
def _kept_by_lstm(sequence: Any, tensors: tuple[Any, ...], others: tuple[Any, ...]) -> int:
    left = iter(others)
    with _for_real(_LSTM), torch.enable_grad():  # without, it keeps nothing
        made = [
            torch.zeros(kind[0], dtype=kind[1]) if kind is not None else next(left) for kind in (sequence, *tensors)
        ]
        try:
            kept = _LSTM(*made)[3]
        except RuntimeError:
            return 0
    return 0 if kept is None else int(kept.untyped_storage().nbytes())


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the FLOPs of the aten operations that pass, and notes whether one draws random numbers.

    written      tensors that operations write into by their schemas: over fakes, `torch._foreach_mul_` counts no version
    on_moved     called with a tensor that gets other memory (`set_`, which is no call that a function mode sees)
    """

    supports_higher_order_operators = True  # `torch.cond` and the like pass, not counted

    def __init__(self, on_moved: Callable[[torch.Tensor], None] = lambda _: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.random = False
        self.written: list[torch.Tensor] = []
        self._on_moved = on_moved

    def reset(self) -> None:
        """Starts again at zero."""
        self.flops, self.random, self.written = 0, False, []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device  # asked for by every node of autograd: what the fakes' mode answers
        out = func(*args, **(kwargs or {}))
        if func is _LSTM:
            out = _with_workspace(args, out)
        check_dtypes(func, args, kwargs or {})
        self.add(func, args, kwargs or {}, out)
        return out

    def add(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Adds an operation that has returned `out`."""
        if isinstance(func, torch._ops.HigherOrderOperator):
            return
        packet = func._overloadpacket
        if packet in flop_registry:
            self.flops += int(flop_registry[packet](*args, **kwargs, out_val=out))
        elif packet in _OWN_FORMULAS:
            self.flops += _OWN_FORMULAS[packet](*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random = True
        if func._schema.is_mutable:
            self.written += written_by(func, args, kwargs)
        if packet is torch.ops.aten.set_:
            self._on_moved(args[0])


def moved_bytes(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], writes: bool) -> int:
    """Bytes that a call reads and writes; none if it only makes views."""
    if not writes and all(any(same_memory(output, tensor) for tensor in inputs) for output in outputs):
        return 0
    return sum(touched_bytes(tensor) for tensor in (*inputs, *outputs))


def touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes that reading the whole tensor moves: an expanded tensor counts its memory once."""
    if tensor.layout is not torch.strided:
        return int(tensor.numel() * tensor.element_size())
    distinct = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return distinct * tensor.element_size()
