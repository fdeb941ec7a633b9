"""Where a kernel runs, and how large a launch is.

A kernel runs compiled on a CUDA device, in Triton's interpreter, or as the same formula in torch.

    backend(device)    an NVIDIA card from Ampere on, Triton installed    -> Backend.TRITON
                       TRITON_INTERPRET=1, Triton installed               -> Backend.INTERPRETER   (tests without a GPU)
                       anything else                                      -> Backend.TORCH         (correct everywhere)

Every op of this package asks `backend` when it is called; nothing is decided, and no environment variable read, when
`smpc` is imported. Files with `@triton.jit` in them are imported by the op, inside the branch that launches, so that
a machine without Triton never imports them. Triton reads TRITON_INTERPRET when a kernel is decorated, which is when
such a file is first imported: set it before the first op runs, for the whole process.

    def rms_norm_forward(x, weight, eps):
        if backend(x.device) is Backend.TORCH:
            return reference_forward(x, weight, eps)
        from smpc.kernels.programs.norms_triton import launch_forward
        with launching_on(x.device):
            return launch_forward(x, weight, eps)      # kernel[grid](..., num_warps=8, **LAUNCH_OPTIONS)

`num_programs` is the number of programs for a device, `warps_for` the number of warps for a program.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Mapping
from enum import StrEnum

import torch

# Given with every launch, and by the compile gate. Contracting a * b + c is asked for by name because Triton's default
# for it depends on its version, with a warning.
LAUNCH_OPTIONS: Mapping[str, bool] = {"enable_fp_fusion": True}


class Backend(StrEnum):
    """How an op computes its result."""

    TRITON = "triton"
    INTERPRETER = "interpreter"
    TORCH = "torch"


@functools.cache
def triton_installed() -> bool:
    """Whether Triton can be imported; it has wheels for Linux alone."""
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Whether kernels decorated now would run in Triton's interpreter (the values Triton itself takes for yes)."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def backend(device: torch.device) -> Backend:
    """The way an op takes for tensors on this device."""
    if not triton_installed() or device.type not in ("cpu", "cuda"):
        return Backend.TORCH
    if interpreting():
        return Backend.INTERPRETER
    if device.type == "cpu" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return Backend.TORCH
    return Backend.TRITON


def launching_on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes `device` the current one: Triton launches on the current device, whatever the tensors' is."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


# Enough programs to take several turns each in small tests.
_INTERPRETER_PROGRAMS = 4
_ELEMENTS_PER_WARP = 512  # 16 for each thread
_MAX_WARPS = 32


def num_programs(device: torch.device) -> int:
    """Programs of a kernel that strides over its work: two for each multiprocessor, so that one computes as the other waits."""
    if device.type != "cuda":
        return _INTERPRETER_PROGRAMS
    return 2 * int(torch.cuda.get_device_properties(device).multi_processor_count)


def warps_for(elements: int) -> int:
    """Warps of a program that holds `elements` (a power of two) at a time."""
    return max(1, min(_MAX_WARPS, elements // _ELEMENTS_PER_WARP))
