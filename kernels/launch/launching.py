"""How large a launch is: programs for each device, warps for each program."""

from __future__ import annotations

import torch

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
