"""The list of every kernel that is launched, with every way it is compiled: what the compile gate compiles.

How to add a kernel
1. Write it in a file of this folder with `@triton.jit`. A kernel that is launched from Python has a name that ends
   in `_kernel`; helpers called from kernels have not.
2. At the end of the file list each way it is launched, with the argument types of a typical call:

       VARIANTS = (
           variant(
               "rms_norm_forward bf16 n4096",                  # unique; what the gate prints
               rms_norm_forward_kernel,
               {"x": "*bf16:16", "out": "*bf16:16", "row_stride": "i32:16", "columns": "i32", "eps": "fp32"},
               {"BLOCK": 4096},                                # the tl.constexpr arguments; None for a pointer left out
               num_warps=8,
           ),
       )

   Types are Triton's (`fp32`, `i32`, `i64`, pointers `*fp16`, `*bf16`, `*fp32`). `:16` says what Triton finds out at
   launch: an address or an integer is a multiple of 16; `:1`: an integer is 1. Choose them as a typical call has them,
   since both change the code. Every candidate of an autotuner is a variant; make both from one table.
3. Add the module's name to KERNEL_FILES below. A test fails for a kernel that has no variant.

`smpc.kernels.compile_gate` compiles all of it for every target and prints registers, spills and shared memory. Spills
may be no more than MAX_SPILL_BYTES, shared memory no more than the target has; a variant for some targets only says
so in `targets`, and why beside it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Modules of smpc.kernels that have a `VARIANTS` tuple, in alphabetical order.
KERNEL_FILES: tuple[str, ...] = (
    "programs.activations_triton",
    "attention.variants_triton",
    "programs.bias_dropout_add_triton",
    "programs.norms_triton",
    "programs.optimizers_variants_triton",
    "programs.rotary_triton",
    "programs.scale_triton",
    "programs.token_loss_triton",
)

# Compute capabilities without the dot: A100, H100 and H200, B200.
TARGETS: tuple[int, ...] = (80, 90, 100)

# Bytes of shared memory one program may have, by target (CUDA's programming guide, "compute capabilities").
SHARED_MEMORY: Mapping[int, int] = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}

MAX_SPILL_BYTES = 16


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """One way one kernel is compiled; see the module's docstring."""

    name: str
    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, object], ...]
    num_warps: int
    num_stages: int
    targets: tuple[int, ...]
    shared_limit: int | None  # bytes, for what also runs on cards with less than the target; None for the target's own

    def __post_init__(self) -> None:
        given = [argument for argument, _ in (*self.signature, *self.constexprs)]
        expected = list(self.kernel.arg_names)
        assert sorted(given) == sorted(expected), (
            f"variant {self.name!r}: expected the kernel's arguments {expected}, found {given}"
        )
        assert set(self.targets) <= set(TARGETS), f"variant {self.name!r}: unknown target in {self.targets}"


def variant(
    name: str,
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, object],
    *,
    num_warps: int = 4,
    num_stages: int = 1,
    targets: tuple[int, ...] = TARGETS,
    shared_limit: int | None = None,
) -> KernelVariant:
    """Describes one way that `kernel` is compiled; every argument of it is in `signature` or in `constexprs`."""
    return KernelVariant(
        name, kernel, tuple(signature.items()), tuple(constexprs.items()), num_warps, num_stages, targets, shared_limit
    )


def variants_of(module: str) -> tuple[KernelVariant, ...]:
    """The variants that a module lists."""
    found: tuple[KernelVariant, ...] = importlib.import_module(f"smpc.kernels.{module}").VARIANTS
    return found
