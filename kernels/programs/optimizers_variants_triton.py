"""How the kernels of the optimizers are launched, for the compile gate: every kernel by dtypes, with and without its options.

The types of a launch are as in `smpc.kernels.programs.optimizers_triton`: addresses in int64 tables, scalars in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton.language as tl

from smpc.kernels.launch.variants import KernelVariant, variant
from smpc.kernels.programs.optimizers_triton import (
    BLOCK,
    SUM_BLOCK,
    SUM_WARPS,
    WARPS,
    adamw_kernel,
    lamb_moments_kernel,
    lamb_params_kernel,
    norm_parts_kernel,
    norm_sums_kernel,
    novograd_kernel,
    scale_tensors_kernel,
)
from smpc.kernels.shared.tensor_table import CHUNK


def _variant(name: str, kernel: Any, constexprs: dict[str, object], left_out: Sequence[str] = ()) -> KernelVariant:
    """A launch with the usual argument types; of `constexprs` those that the kernel has."""
    pointers = {"rows": "*i64:16", "chunks": "*i32:16", "starts": "*i32:16", "num_chunks": "i32", "num_rows": "i32"}
    pointers |= dict.fromkeys(("parts", "out", "factor", "clip", "ratios", "factors", "lr_pointer"), "*fp32:16")
    given: dict[str, object] = {"CHUNK": CHUNK, "BLOCK": BLOCK, "ALIGNED": True, **constexprs}
    arguments = [argument for argument in kernel.arg_names if argument not in left_out and not argument.isupper()]
    return variant(
        name,
        kernel,
        {argument: pointers.get(argument, "fp32") for argument in arguments},
        {argument: given[argument] for argument in kernel.arg_names if argument.isupper()} | dict.fromkeys(left_out),
        num_warps=SUM_WARPS if kernel is norm_sums_kernel else WARPS,
    )


def _update_variants(param: str, grad: str, master: bool, aligned: bool = True) -> tuple[KernelVariant, ...]:
    names = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
    kinds = {"PARAM_KIND": names[param], "GRAD_KIND": names[grad], "MASTER": master, "ALIGNED": aligned}
    label = f"{param} grad {grad}{' master' if master else ''}{'' if aligned else ' unaligned'}"
    ratio: tuple[str, ...] = ("lr_pointer",)
    whole_update = ("lr_pointer", "parts", "clip")
    return (
        _variant(f"adamw {label}", adamw_kernel, {**kinds, "AMSGRAD": False}, ("lr_pointer",)),
        _variant(f"adamw amsgrad {label}", adamw_kernel, {**kinds, "AMSGRAD": True}),
        _variant(f"lamb moments {label}", lamb_moments_kernel, {**kinds, "RATIO": True}, ratio),
        _variant(f"lamb whole {label}", lamb_moments_kernel, {**kinds, "RATIO": False}, whole_update),
        _variant(f"lamb params {label}", lamb_params_kernel, kinds),
        _variant(f"novograd {label}", novograd_kernel, kinds),
    )


VARIANTS = (
    *(
        _variant(
            f"norm parts {'max' if maximum else 'squares'} {kind}",
            norm_parts_kernel,
            {"KIND": {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[kind], "MAXIMUM": maximum},
        )
        for kind in ("bf16", "fp16", "fp32")
        for maximum in (False, True)
    ),
    *(
        _variant(
            f"norm sums {'max' if maximum else 'squares'}", norm_sums_kernel, {"MAXIMUM": maximum, "BLOCK": SUM_BLOCK}
        )
        for maximum in (False, True)
    ),
    *(
        _variant(f"scale tensors {kind}", scale_tensors_kernel, {"KIND": dtype})
        for kind, dtype in (("bf16", tl.bfloat16), ("fp16", tl.float16), ("fp32", tl.float32))
    ),
    *_update_variants("fp32", "fp32", False),
    *_update_variants("bf16", "bf16", True),
    *_update_variants("bf16", "fp32", False),
    *_update_variants("fp16", "fp16", True),
    *_update_variants("fp32", "fp32", False, aligned=False),
)
