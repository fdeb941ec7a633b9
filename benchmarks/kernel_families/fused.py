"""Norms, activations, dropout and rotary embedding: shares of a `copy_`, and ratios to torch, torch.compile and Liger-Kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_families.measure import Bench, Case, Function, Row, liger
from smpc.kernels.activations import bias_gelu, swiglu
from smpc.kernels.bias_dropout_add import bias_dropout_add
from smpc.kernels.layer_norm import add_layer_norm, layer_norm
from smpc.kernels.rms_norm import add_rms_norm, rms_norm
from smpc.kernels.rotary import rotary

ELEMENTS = 2**28  # of a tensor: half a GiB, far more than caches hold
EPS = 1e-6
NORM_GOALS = {"forward": 0.9, "backward": 0.65}
ACTIVATION_GOALS = {"forward": 0.9, "backward": 0.8}


def norms(bench: Bench) -> Iterator[Row]:
    """LayerNorm and RMSNorm, alone and of a sum."""
    for columns in (64,) if bench.small else (2048, 4096, 8192, 16384):
        for case in _norm_cases(bench, columns):
            yield from case.rows(bench, "norms")


def _norm_cases(bench: Bench, columns: int) -> Iterator[Case]:
    rows = _rows(bench, columns)
    x, r, w, b = bench.leaf(rows, columns), bench.leaf(rows, columns), bench.leaf(columns), bench.leaf(columns)
    size = (columns,)
    alone, of_sum = {"forward": 2, "backward": 3}, {"forward": 4, "backward": 4}

    def case(
        kernel: str,
        ours: Function,
        eager: Function,
        fused: Function | str,
        inputs: tuple[Tensor, ...],
        moved: Mapping[str, float],
    ) -> Iterator[Case]:
        if bench.wants(kernel):
            yield Case(kernel, f"n{columns}", ours, _peers(bench, eager, fused), inputs, moved, NORM_GOALS)

    yield from case(
        "layer_norm",
        lambda x, w, b: layer_norm(x, size, w, b, EPS),
        lambda x, w, b: F.layer_norm(x, size, w, b, EPS),
        _liger("LigerLayerNormFunction", EPS),
        (x, w, b),
        alone,
    )
    yield from case(
        "rms_norm",
        lambda x, w: rms_norm(x, size, w, EPS),
        lambda x, w: F.rms_norm(x, size, w, EPS),
        _liger("LigerRMSNormFunction", EPS, 0.0, "llama", False),
        (x, w),
        alone,
    )
    yield from case(
        "add_layer_norm",
        lambda x, r, w, b: add_layer_norm(x, r, w, b, EPS),
        lambda x, r, w, b: (F.layer_norm(s := x + r, size, w, b, EPS), s),
        "has none",
        (x, r, w, b),
        of_sum,
    )
    yield from case(
        "add_rms_norm",
        lambda x, r, w: add_rms_norm(x, r, w, EPS),
        lambda x, r, w: (F.rms_norm(s := x + r, size, w, EPS), s),
        _liger("LigerFusedAddRMSNormFunction", EPS),
        (x, r, w),
        of_sum,
    )


def activations(bench: Bench) -> Iterator[Row]:
    """bias-GELU, SwiGLU and bias-dropout-add."""
    columns = 64 if bench.small else 16384
    rows = _rows(bench, columns)
    x, other, b = bench.leaf(rows, columns), bench.leaf(rows, columns), bench.leaf(columns)
    for form in ("none", "tanh"):
        if bench.wants(f"bias_gelu {form}"):
            yield from Case(
                f"bias_gelu {form}",
                f"n{columns}",
                lambda x, b, form=form: bias_gelu(x, b, approximate=form),
                _peers(bench, lambda x, b, form=form: F.gelu(x + b, approximate=form), "has none"),
                (x, b),
                {"forward": 2, "backward": 3},
                ACTIVATION_GOALS,
            ).rows(bench, "activations")
    if bench.wants("swiglu"):
        yield from Case(
            "swiglu",
            f"n{columns}",
            swiglu,
            _peers(bench, lambda g, u: F.silu(g) * u, _liger("LigerSiLUMulFunction")),
            (x, other),
            {"forward": 3, "backward": 5},
            ACTIVATION_GOALS,
        ).rows(bench, "activations")
    if bench.wants("bias_dropout_add"):
        yield from Case(
            "bias_dropout_add",
            f"n{columns} p0.1",
            lambda x, r, b: bias_dropout_add(x, b, r, 0.1),
            _peers(bench, lambda x, r, b: r + F.dropout(x + b, 0.1), "has none"),
            (x, other, b),
            {"forward": 3, "backward": 2},
            ACTIVATION_GOALS,
        ).rows(bench, "activations")


def rotary_embedding(bench: Bench) -> Iterator[Row]:
    """Rotary embedding of halves."""
    if not bench.wants("rotary"):
        return
    batch, heads, positions, features = (1, 2, 16, 8) if bench.small else (16, 32, 4096, 128)
    q = bench.leaf(batch, heads, positions, features)
    angle = torch.rand(positions, features // 2, device=bench.device)
    cos, sin = angle.cos(), angle.sin()

    def eager(q: Tensor) -> Tensor:
        a, b = q.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(q.dtype)

    function = liger("LigerRopeFunction")
    tables = [torch.cat((table, table), -1).unsqueeze(0) for table in (cos, sin)]
    few = q.detach()[:, :1].clone()  # Liger turns q and k together: one key head of 32
    peer = function if isinstance(function, str) else lambda q: function.apply(q, few, *tables)[0]
    yield from Case(
        "rotary",
        f"b{batch} h{heads} s{positions} d{features}",
        lambda q: rotary(q, cos, sin),
        _peers(bench, eager, peer),
        (q,),
        {"forward": 2, "backward": 2},
        {"forward": 0.8, "backward": 0.8},
    ).rows(bench, "rotary")


def _rows(bench: Bench, columns: int) -> int:
    return 8 if bench.small else ELEMENTS // columns


def _peers(bench: Bench, eager: Function, fused: Function | str) -> dict[str, Function | str]:
    return {"eager": eager, "compiled": bench.compiler(eager), "Liger": fused}


def _liger(name: str, *options: object) -> Function | str:
    """Liger's function with these arguments after the tensors, or why there is none."""
    function = liger(name)
    return function if isinstance(function, str) else lambda *tensors: function.apply(*tensors, *options)
