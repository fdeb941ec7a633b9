"""Torch calls: their kind, their effects on arguments, and the settings and modes that surround them.

Some calls are not made by the model's Python alone. They are told apart before anything is recorded:

    inside a kernel      C++ code calls kernels by itself (TorchScript, say). Their calls are below autograd: a record of it
                         would compute the same values and have no backward. It is not recorded.
    data from elsewhere  a real tensor that no recorded call made: from a numpy array, from a global. A small one becomes a constant, the
                         node `torch.tensor([...], dtype=...)`; a large one belongs in a buffer.
    transforms           Inside `torch.vmap` and the like, tensors stand for others in a way that only the transform knows: an error.
    others' overrides    an argument's class with a `__torch_function__` of its own decides itself what to call; what it calls is recorded.
    Python on elements   `Tensor.apply_` and the like read memory, which a fake tensor does not have.

Example: `torch.from_numpy(np.arange(3.0))` reaches the recorder as the kernel `lift_fresh` on a real tensor, and is recorded as

    torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64, device=self._device)

autograd's version counters show what a call writes; batch normalisation, which updates its running statistics without autograd's
knowledge, is known by name.

`CallModes` is what surrounds a call and no argument shows: whether gradients are recorded, and autocast.

`watching_others`: torch calls on the recording's tensors in threads that forward hands work to. A mode that watches torch calls belongs
to one thread: other threads bypass the recorder. Fakes themselves are the same in all threads, and so is the class that runs operations
on them. A module whose code hands work over is called whole (`smpc.tracer.environment.outside_reads`); this notices what its threads
use, write and draw, since a stage only has its arguments and its own tensors.

Autograd's engine has threads of its own, which run no code of the model.

`settings` are settings of the process that decide what torch calls give, and that a trace does not hold. Grad mode and autocast are
recorded with every node. All else must be, while a node is recorded, as it was when the recording began: a stage calls the node's function
under the settings of its own process. A module that changes a setting and puts it back is called whole; one that leaves it changed is
refused.

`uncompiled`: what was given to torch.compile runs as it is, without compiling, while anybody asks for that. torch keeps one setting for
all threads, its stance, and stages of one process run in threads. If each thread set it and put back what
it found, threads that overlap would leave it set for good: the last to leave would put back what the first had set. They are counted.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _pop_mode

from smpc.tracer import targets
from smpc.tracer.constants import TraceDevice
from smpc.tracer.ir import Autocast

CONSTANT = "torch.tensor"
MAX_CONSTANT = 4096  # elements: a trace is text

_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift.default)
_ON_ELEMENTS = ("apply_", "map2_", "map_", "__dlpack__")
_TEXT = ("__repr__", "__format__")
_GIVING_VALUES = ("tolist", "numpy", "__array__", "__dlpack__", *_TEXT)  # to Python or others


def in_kernel() -> bool:
    """Whether the call comes from a kernel that runs over fakes: the fake mode is off there."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None


def in_transform(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call takes tensors of a transform, such as `torch.vmap`: they mean nothing outside of it."""
    if not torch._C._are_functorch_transforms_active():
        return False
    return any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors_in((args, kwargs)))


def lifted(func: Callable[..., Any], args: tuple[Any, ...]) -> torch.Tensor | None:
    """The real tensor that the call takes into the run, if it does that."""
    found = args[0] if func in _LIFTS else None
    return None if isinstance(found, FakeTensor) else found


def from_array(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> torch.Tensor | None:
    """The real tensor behind `out`, which a torch function has made of numpy arrays."""
    if not isinstance(out, torch.Tensor) or any(True for _ in tensors_in((args, kwargs))):
        return None
    data = next((value for value in (*args, *kwargs.values()) if _has_array(value)), None)
    if data is None:
        return None
    with unset_fake_temporarily():
        real = torch.as_tensor(numpy.asarray(data)).to(out.dtype)
    return real if real.shape == out.shape else None


def override(types: tuple[type, ...]) -> Any:
    """The first class among `types` that is no tensor's and overrides torch functions by itself."""
    return next((cls for cls in types if not issubclass(cls, torch.Tensor)), None)


def works_on_elements(func: Callable[..., Any]) -> bool:
    """Whether the function calls Python with the elements of a tensor, or gives its memory away."""
    return getattr(func, "__name__", "") in _ON_ELEMENTS


def is_of_memory(func: Callable[..., Any]) -> bool:
    """Whether the function says where in memory a tensor is, which a fake does not know."""
    return getattr(func, "__name__", "") in ("data_ptr", "untyped_storage", "storage", "_typed_storage")


def makes_text(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether the function makes text of a fake tensor."""
    is_fake = bool(args) and isinstance(args[0], FakeTensor)
    return is_fake and getattr(func, "__name__", "") in _TEXT


def is_of_real(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether the function gives the values of a tensor that is real, such as an attribute of a module."""
    is_real = bool(args) and isinstance(args[0], torch.Tensor) and not isinstance(args[0], FakeTensor)
    return is_real and getattr(func, "__name__", "") in _GIVING_VALUES


def values_of_real(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], note: Callable[[torch.Tensor], None]
) -> Any:
    """These values, which are part of the trace from now on: calls `note`."""
    note(args[0])
    with torch._C.DisableTorchFunction(), unset_fake_temporarily():
        return func(*args, **kwargs)


def constant(tensor: torch.Tensor) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]] | None:
    """Arguments for `torch.tensor` that make the real tensor again; None if that is not for a trace."""
    plain = tensor.layout is torch.strided and tensor.device.type != "meta" and not tensor.requires_grad
    if isinstance(tensor, FakeTensor) or not plain or tensor.numel() > MAX_CONSTANT:
        return None
    with torch._C.DisableTorchFunction(), unset_fake_temporarily():
        values = tensor.tolist()
    return (values,), (("dtype", tensor.dtype), ("device", TraceDevice()))


def why_unknown(tensor: torch.Tensor) -> str:
    """The error for a tensor that a trace can neither name nor hold."""
    if isinstance(tensor, FakeTensor):
        return "no recorded call returned and no module holds (from TorchScript, or other C++ code?)"
    return "comes from outside the model and is too large for a trace, or requires grad: register it as a buffer"


def _has_array(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_has_array(item) for item in value)
    return isinstance(value, numpy.ndarray)


# Positions of the running mean and variance, which these write in place when `training` (position, default) says so.
_RUNNING_STATISTICS = {
    "torch.nn.functional.batch_norm": ((1, "running_mean"), (2, "running_var"), (5, "training"), False),
    "torch.nn.functional.instance_norm": (
        (1, "running_mean"),
        (2, "running_var"),
        (5, "use_input_stats"),
        True,
    ),
    "torch.batch_norm": ((3, "running_mean"), (4, "running_var"), (5, "training"), False),
}


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in the arguments or the result of a torch call."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors_in(item)
    elif isinstance(tree, slice):
        yield from tensors_in((tree.start, tree.stop, tree.step))


def dense(value: Any) -> torch.Tensor | None:
    """The value if it is one tensor with strides: others, such as sparse ones, stay where they are made."""
    return value if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


def version_of(tensor: torch.Tensor) -> int:
    """Autograd's count of writes into a tensor; inference tensors have none."""
    return -1 if tensor.is_inference() else tensor._version


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether one is a view of the other, or both of a third."""
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def running_statistics(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """Running mean and variance that this call writes."""
    if "norm" not in getattr(func, "__name__", ""):
        return []
    entry = _RUNNING_STATISTICS.get(targets.name_of(func))
    if entry is None:
        return []
    *statistics, training, default = entry

    def argument(position: int, name: str, otherwise: Any) -> Any:
        return args[position] if len(args) > position else kwargs.get(name, otherwise)

    if not argument(*training, default):
        return []
    values = [argument(*statistic, None) for statistic in statistics]
    return [value for value in values if value is not None]


def statistics_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Running mean and variance that an operation writes, whose schema does not say so."""
    if "batch_norm" not in str(func):
        return []
    given = {parameter.name: value for parameter, value in zip(func._schema.arguments, args, strict=False)} | dict(
        kwargs
    )
    values = [given.get("running_mean"), given.get("running_var")] if given.get("training", True) else []
    return [value for value in values if value is not None]


class CallModes:
    """Autocast as it was when the recording began, for the CPU and the model's own type of device."""

    def __init__(self, device: torch.device) -> None:
        self._begun = {kind: _autocast(kind) for kind in dict.fromkeys(("cpu", device.type))}
        self._scope, self._is_over = 0, True

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notes where torch forgets what it has cast: at the end of an outermost autocast, and where it is told to."""
        decrement, clear = torch.autocast_decrement_nesting, torch.clear_autocast_cache
        around = torch.autocast_increment_nesting() - 1
        decrement()

        def ending() -> int:
            nesting: int = decrement()
            self._is_over = self._is_over or nesting <= around
            return nesting

        def clearing() -> None:
            self._is_over = True
            clear()

        torch.autocast_decrement_nesting, torch.clear_autocast_cache = ending, clearing
        try:
            yield
        finally:
            torch.autocast_decrement_nesting, torch.clear_autocast_cache = decrement, clear

    def now(self) -> tuple[bool, Autocast | None]:
        """Whether gradients are recorded, and the autocast that the model has set; None if it is the one of the beginning."""
        for kind, begun in self._begun.items():
            autocast = _autocast(kind)
            if autocast != begun:
                return torch.is_grad_enabled(), self._in_scope(autocast) if autocast.enabled else autocast
        return torch.is_grad_enabled(), None

    def _in_scope(self, autocast: Autocast) -> Autocast:
        if self._is_over:
            self._scope, self._is_over = self._scope + 1, False
        return dataclasses.replace(autocast, scope=self._scope)


def _autocast(kind: str) -> Autocast:
    dtype = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
    is_enabled = torch.is_autocast_enabled(kind)
    return Autocast(kind, dtype, is_enabled, not is_enabled or torch.is_autocast_cache_enabled())


Note = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], None]  # operation, arguments, keyword arguments, result


@contextmanager
def watching_others(mode: FakeTensorMode, note: Note) -> Iterator[None]:
    """In this context `note` is called after every operation on fakes of that mode that other threads run."""
    own, original = threading.get_ident(), FakeTensor.__dict__["__torch_dispatch__"]

    def dispatch(
        cls: type[FakeTensor],
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = original.__get__(None, cls)(func, types, args, kwargs)
        is_others = threading.get_ident() != own and sys._getframe().f_back is not None
        if is_others and any(tensor.fake_mode is mode for tensor in tensors_in((args, kwargs)) if type(tensor) is cls):
            note(func, args, kwargs, out)
        return out

    FakeTensor.__torch_dispatch__ = classmethod(dispatch)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        FakeTensor.__torch_dispatch__ = original  # type: ignore[method-assign]


def written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The arguments of an operation that it writes into, as its schema says."""
    parameters = func._schema.arguments
    values = [*zip(parameters, args, strict=False), *((p, kwargs[p.name]) for p in parameters if p.name in kwargs)]
    return [t for p, value in values if p.alias_info is not None and p.alias_info.is_write for t in tensors_in(value)]


Settings = tuple[Any, ...]
_KERNELS = "the kernels of attention (sdpa_kernel)"

_DENORMAL = 2.0**-1060  # torch has no way to ask: on its thread, what Python computes is rounded alike

_READERS: tuple[tuple[str, Callable[[], Any], Callable[[Any], Any] | None], ...] = (
    ("the default dtype (torch.set_default_dtype)", torch.get_default_dtype, torch.set_default_dtype),
    (
        "saved_tensors_hooks",
        lambda: torch._C._autograd._top_saved_tensors_default_hooks(True),
        lambda top: _pop_hooks(top),
    ),
    ("a TorchDispatchMode", lambda: _dispatch_modes(), lambda modes: _pop_modes(modes)),
    ("the level of forward-mode differentiation", lambda: forward_ad._current_level, None),
    (
        "the precision of float32 matrix products",
        torch._C._get_float32_matmul_precision,
        torch._C._set_float32_matmul_precision,
    ),
    ("deterministic algorithms", torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (_KERNELS, torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (_KERNELS, torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (_KERNELS, torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (_KERNELS, torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    ("mkldnn", torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    ("the number of threads", torch.get_num_threads, torch.set_num_threads),
    ("denormal numbers (torch.set_flush_denormal)", lambda: _DENORMAL * 1.0 == 0.0, torch.set_flush_denormal),
)
_READ = tuple(read for _, read, _ in _READERS)


def _dispatch_modes() -> tuple[type, ...]:
    """Modes beside the recording's own, of which kernels that run over fakes leave one out."""
    found = (torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack()))
    kinds = [type(mode) for mode in found]
    return tuple(kind for kind in kinds if kind is not FakeTensorMode and not kind.__module__.startswith("smpc."))


def settings() -> Settings:
    """The settings now."""
    return tuple([read() for read in _READ])


def changed_setting(before: Settings, now: Settings) -> str:
    """The setting that has changed; "" if none has. In transforms such as `torch.vmap`, saved-tensor hooks are off."""
    in_transform = torch._C._are_functorch_transforms_active()
    for (name, _, _), old, new in zip(_READERS, before, now, strict=True):
        if old != new and not (in_transform and name == "saved_tensors_hooks"):
            return name
    return ""


@contextmanager
def kept_settings() -> Iterator[None]:
    """Settings are afterwards what they were, grad mode among them."""
    grad_enabled, before = torch.is_grad_enabled(), settings()
    try:
        yield
    finally:
        torch.set_grad_enabled(grad_enabled)
        for (_, _, write), old, new in zip(_READERS, before, settings(), strict=True):
            if old != new and write is not None:
                write(old)


def _pop_hooks(top: Any) -> None:
    while torch._C._autograd._top_saved_tensors_default_hooks(True) not in (top, None):
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _pop_modes(modes: tuple[type, ...]) -> None:
    for _ in range(len(_dispatch_modes()) - len(modes)):
        _pop_mode()


def modes() -> tuple[bool, bool]:
    """Grad mode and inference mode, which are recorded with every node: a call of a module must leave them as they were."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


_lock = threading.Lock()
_stances: list[AbstractContextManager[object]] = []  # the one that the first to enter has set
_inside = 0


@contextmanager
def uncompiled() -> Iterator[None]:
    """In this context compiled modules and functions run what they were compiled from, in all threads.

    Under a mode that watches torch calls torch.compile would compile what the mode does, or nothing, and never again what it has met there.
    """
    global _inside
    with _lock:
        if (
            not _stances and "torch._dynamo" in sys.modules
        ):  # importing it takes a second; nothing is compiled without it
            _stances.append(torch.compiler.set_stance("force_eager"))
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _stances:
                _stances.pop().__exit__(None, None, None)
