"""Cross-entropy and the fused linear cross-entropy, against torch, torch.compile, Liger-Kernel and the GEMMs alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_families.measure import TFLOPS, Bench, Case, Row, Run, liger, reason_of, times
from smpc.kernels.cross_entropy import cross_entropy
from smpc.kernels.linear_cross_entropy import linear_cross_entropy

GEMMS = "its three GEMMs"


def losses(bench: Bench) -> Iterator[Row]:
    """Every loss."""
    rows, classes, features = (8, 32, 16) if bench.small else (8192, 128256, 4096)
    labels = torch.randint(classes, (rows,), device=bench.device)
    if bench.wants("cross_entropy"):
        yield from _cross_entropy(bench, bench.leaf(rows, classes), labels)
    if bench.wants("linear_cross_entropy"):
        yield _linear_cross_entropy(bench, bench.leaf(rows, features), bench.leaf(classes, features), labels)


def _cross_entropy(bench: Bench, logits: Tensor, labels: Tensor) -> Iterator[Row]:
    def eager(x: Tensor) -> Tensor:
        return F.cross_entropy(x.float(), labels)

    function = liger("LigerCrossEntropyFunction")
    fused = function if isinstance(function, str) else lambda x: function.apply(x, labels, None)[0]
    shape, compiled = f"r{len(logits)} v{logits.shape[1]}", bench.compiler(eager)
    yield from Case(
        "cross_entropy",
        shape,
        lambda x: cross_entropy(x, labels),
        {"eager": eager, "compiled": compiled},
        (logits,),
        {"forward": 1, "backward": 2},
        {"forward": 0.85, "backward": 0.85},
    ).rows(bench, "losses")
    yield from Case(  # Liger computes the gradients in the forward pass, over the logits
        "cross_entropy in place",
        shape,
        lambda x: cross_entropy(x, labels, inplace_backward=True),
        {"eager": eager, "compiled": compiled, "Liger": fused},
        (logits,),
        {"both": 3},
        {"both": 0.85},
    ).rows(bench, "losses")


def _linear_cross_entropy(bench: Bench, hidden: Tensor, weight: Tensor, labels: Tensor) -> Row:
    def eager(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), labels)

    function = liger("LigerFusedLinearCrossEntropyFunction")
    fused = function if isinstance(function, str) else lambda h, w: function.apply(h, w, labels)[0]
    ours = times(lambda h, w: linear_cross_entropy(h, w, labels), (hidden, weight), bench, ("both",))["both"]
    ratios: dict[str, float | str] = {GEMMS: bench.clock(_products(hidden.detach(), weight.detach())) / ours}
    for name, peer in (("eager", eager), ("compiled", bench.compiler(eager)), ("Liger", fused)):
        if isinstance(peer, str):
            ratios[name] = peer
            continue
        try:
            ratios[name] = times(peer, (hidden, weight), bench, ("both",))["both"] / ours
        except Exception as error:  # whatever another library raises
            ratios[name] = reason_of(error)
    flops = 6.0 * len(hidden) * weight.shape[0] * weight.shape[1]
    shape = f"r{len(hidden)} v{weight.shape[0]} n{weight.shape[1]}"
    return Row(
        "losses", "linear_cross_entropy", shape, "both", ours, flops / ours / 1e9, TFLOPS, ratios, {GEMMS: 1 / 1.25}
    )


def _products(hidden: Tensor, weight: Tensor) -> Run:
    """The three products that a linear layer with its gradients is."""
    logits = hidden @ weight.t()

    def run() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight)
        torch.mm(logits.t(), hidden)

    return run
