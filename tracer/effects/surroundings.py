"""Settings of the process that decide what torch calls give, and that a trace does not hold.

Grad mode and autocast are recorded with every node. All else must be, while a node is recorded, as it was when the recording began: a stage
calls the node's function under the settings of its own process. A module that changes a setting and puts it back is called whole; one
that leaves it changed is refused.

`uncompiled`: what was given to torch.compile runs as it is, without compiling, while anybody asks for that. torch keeps one setting for
all threads, its stance, and stages of one process run in threads. If each thread set it and put back what
it found, threads that overlap would leave it set for good: the last to leave would put back what the first had set. They are counted.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _pop_mode

Settings = tuple[Any, ...]
_KERNELS = "the kernels of attention (sdpa_kernel)"

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


def changed(before: Settings, now: Settings) -> str:
    """The setting that has changed; "" if none has. In transforms such as `torch.vmap`, saved-tensor hooks are off."""
    in_transform = torch._C._are_functorch_transforms_active()
    for (name, _, _), old, new in zip(_READERS, before, now, strict=True):
        if old != new and not (in_transform and name == "saved_tensors_hooks"):
            return name
    return ""


@contextmanager
def kept() -> Iterator[None]:
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
