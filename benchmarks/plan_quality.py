"""How good plans are, on models of realistic sizes: bottleneck over a proven lower bound, beside what simpler rules give.

    python benchmarks/plan_quality.py                          all models, 2 to 16 stages, four memory weights
    python benchmarks/plan_quality.py --models gpt2-xl --stages 4 --weights 0.8

Models live on the meta device, so nothing is allocated. Every number is the largest stage cost (see `smpc.partitioner.stage_costs`)
divided by the lower bound that no plan can be below. `by` is the solver whose plan it is; the last line counts
them. The rules, all cutting between whole layers:

    layers      equal numbers of layers
    params      parameters balanced (DeepSpeed's `parameters`); `uniform` is `layers`
    time, size  torchgpipe's block partition by time or by memory
    tree        the published algorithm of the original (arXiv 2111.05972): module tree, cost w memory + (1 - w) time, min-max
                segments of a node's children, D'Hondt shares of the ranks, and so on inside each segment
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from smpc.codegen.schedules.named import choose
from smpc.partitioner.costs.device import H100
from smpc.partitioner.costs.node_costs import CostModel
from smpc.partitioner.planner import solve_partition
from smpc.partitioner.solvers.chain import ChainProblem, solve_chain
from smpc.partitioner.solvers.coarsen import Analysis, analyse
from smpc.partitioner.stage_costs import Scale, Units, stage_costs
from smpc.tracer import Trace, record

MICROBATCHES = 32
Built = tuple[nn.Module, dict[str, torch.Tensor]]


class UNet(nn.Module):
    """Five levels, two convolutions each, skip connections across."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        sizes = [width * 2**i for i in range(5)]
        self.down = nn.ModuleList(self._block(a, b) for a, b in itertools.pairwise([3, *sizes]))
        self.up = nn.ModuleList(self._block(a + b, a) for a, b in reversed(list(itertools.pairwise(sizes))))
        self.out = nn.Conv2d(width, 3, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Sequential:
        layers = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU()]
        return nn.Sequential(*layers, nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for block in self.down:
            x = block(F.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        for block, skip in zip(self.up, reversed(skips[:-1]), strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skip], 1))
        return self.out(x)


def _tokens(batch: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(batch, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def _gpt2_xl() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=48, n_embd=1600, n_head=25, use_cache=False)), _tokens(4, 1024)


def _llama(layers: int, hidden: int, inner: int, heads: int) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=8, vocab_size=128256, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), _tokens(1, 4096)


def _t5_11b() -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=1024, d_kv=128, d_ff=65536, num_heads=128, num_layers=24, use_cache=False, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config), _tokens(4, 512)


def _vit_h() -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1280, num_hidden_layers=32, num_attention_heads=16, intermediate_size=5120, patch_size=14
    )
    labels = torch.zeros(16, dtype=torch.long)
    return ViTForImageClassification(config), {"pixel_values": torch.zeros(16, 3, 224, 224), "labels": labels}


MODELS: dict[str, Callable[[], Built]] = {
    "gpt2-xl": _gpt2_xl,
    "llama-8b": lambda: _llama(32, 4096, 14336, 32),
    "llama-70b": lambda: _llama(80, 8192, 28672, 64),
    "t5-11b": _t5_11b,
    "vit-h": _vit_h,
    "unet": lambda: (UNet(), {"x": torch.zeros(4, 3, 256, 256)}),
}


def trace_of(name: str) -> Trace:
    """The trace of one microbatch, in bfloat16."""
    with torch.device("meta"):
        model, inputs = MODELS[name]()
        model = model.bfloat16().train()
        inputs = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    return record(model, (), inputs)


def layer_of(analysis: Analysis) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The layer of each rank: a member of an outermost list of modules is one, and so is a run of nodes between two."""
    spans = analysis.graph.call_spans.tolist()
    calls = analysis.graph.trace.calls
    starts = {0}
    end = 0
    for call, (first, last) in zip(calls, spans, strict=True):
        if first >= end and last > first and call.fqn.rpartition(".")[2].isdecimal():
            starts |= {first, last}
            end = last
    bounds = np.asarray(sorted(starts))
    return np.searchsorted(bounds, np.arange(analysis.graph.num_compute), side="right") - 1


def by_blocks(units: Units, layers: Any, num_stages: int, in_flight: Sequence[int], memory_weight: float) -> list[int]:
    """The best contiguous partition of the layers by one quantity."""
    merged = units.merged(layers, int(layers.max()) + 1)
    problem = ChainProblem(merged, Scale.of(merged, in_flight, memory_weight), tuple(in_flight))
    placed = solve_chain(problem, num_stages).assignment(len(merged))
    return [placed[layer] for layer in layers.tolist()]


def parameters_only(units: Units) -> Units:
    """The same units, of which only parameters count."""
    none = (0,) * len(units)
    return Units(none, units.static_bytes, none)


def by_tree(analysis: Analysis, scale: Scale, in_flight: Sequence[int], num_stages: int) -> list[int]:
    """The published algorithm: see the module docstring."""
    spans = analysis.graph.call_spans.tolist()
    units = analysis.units
    memory = np.asarray(units.static_bytes) + max(1, sum(in_flight) // len(in_flight)) * np.asarray(
        units.activation_bytes
    )
    weight = np.concatenate(([0.0], np.cumsum(scale.cost(np.asarray(units.time), memory))))
    children: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for call, (first, last) in zip(analysis.graph.trace.calls, spans, strict=True):
        if call.parent >= 0 and last > first and tuple(spans[call.parent]) != (first, last):
            children.setdefault(tuple(spans[call.parent]), []).append((first, last))
    stage_of = [0] * len(units)

    def cost(piece: tuple[int, int]) -> float:
        return float(weight[piece[1]] - weight[piece[0]])

    def pieces_of(span: tuple[int, int]) -> list[tuple[int, int]]:
        bounds = sorted({*span, *(bound for child in children.get(span, []) for bound in child)})
        return list(itertools.pairwise(bounds))

    def place(pieces: list[tuple[int, int]], ranks: list[int]) -> None:
        if len(ranks) == 1 or (len(pieces) == 1 and not children.get(pieces[0])):
            for piece in pieces:
                stage_of[piece[0] : piece[1]] = [ranks[0]] * (piece[1] - piece[0])
            return
        if len(pieces) == 1:
            place(pieces_of(pieces[0]), ranks)
            return
        segments = _segments([cost(piece) for piece in pieces], min(len(pieces), len(ranks)))
        shares = _dhondt([sum(cost(pieces[i]) for i in segment) for segment in segments], len(ranks))
        used = 0
        for segment, share in zip(segments, shares, strict=True):
            own = ranks[used : used + share] or [ranks[max(0, used - 1)]]
            place([pieces[i] for i in segment], own)
            used += share

    place([(0, len(units))], list(range(num_stages)))
    return stage_of


def _segments(costs: Sequence[float], count: int) -> list[range]:
    """Contiguous segments whose largest cost is smallest."""
    n = len(costs)
    sums = list(itertools.accumulate(costs, initial=0.0))
    best = [[math.inf] * (n + 1) for _ in range(count + 1)]
    cut = [[0] * (n + 1) for _ in range(count + 1)]
    best[0][0] = 0.0
    for k in range(1, count + 1):
        for j in range(k, n + 1):
            best[k][j], cut[k][j] = min((max(best[k - 1][i], sums[j] - sums[i]), i) for i in range(k - 1, j))
    ends = [n]
    for k in range(count, 0, -1):
        ends.append(cut[k][ends[-1]])
    return [range(a, b) for a, b in itertools.pairwise(reversed(ends))]


def _dhondt(votes: Sequence[float], seats: int) -> list[int]:
    """Seats in proportion to votes."""
    shares = [0] * len(votes)
    for _ in range(seats):
        winner = max(range(len(votes)), key=lambda i: votes[i] / (shares[i] + 1))
        shares[winner] += 1
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--weights", nargs="+", type=float, default=[0.0, 0.2, 0.8, 1.0])
    options = parser.parse_args()
    names = ("layers", "params", "time", "size", "tree")
    print(
        f"{'model':<10} {'stages':>6} {'weight':>6} {'smpc':>8} {'by':>6}  " + " ".join(f"{name:>8}" for name in names)
    )
    worst, beaten, wins = 1.0, 0, Counter[str]()
    for name in options.models:
        trace = trace_of(name)
        analysis = analyse(trace, CostModel.of(H100, 8))
        layers = layer_of(analysis)
        num_layers = int(layers.max()) + 1
        for num_stages, weight in itertools.product(options.stages, options.weights):
            in_flight = choose(num_stages, MICROBATCHES).in_flight
            units = analysis.units
            scale = Scale.of(units, in_flight, weight)
            plan = solve_partition(
                trace, num_stages=num_stages, in_flight=in_flight, memory_weight=weight, cost_model=analysis.cost_model
            )
            bound = plan.objective.lower_bound
            ours = plan.objective.bottleneck / bound
            rules: list[list[int] | None] = [None] * 5
            if num_stages <= num_layers:
                rules[0] = [layer * num_stages // num_layers for layer in layers.tolist()]
                rules[1] = by_blocks(parameters_only(units), layers, num_stages, (1,) * num_stages, 1.0)
                rules[2] = by_blocks(units, layers, num_stages, in_flight, 0.0)
                rules[3] = by_blocks(units, layers, num_stages, in_flight, 1.0)
            rules[4] = by_tree(analysis, scale, in_flight, num_stages)
            found = [
                math.inf if rule is None else float(stage_costs(units, scale, in_flight, rule).max()) / bound
                for rule in rules
            ]
            worst, beaten = max(worst, ours), beaten + (min(found) < ours * (1 - 1e-9))
            wins[plan.objective.solver] += 1
            cells = " ".join(f"{value:8.3f}" if math.isfinite(value) else f"{'-':>8}" for value in found)
            print(
                f"{name:<10} {num_stages:>6} {weight:>6g} {ours:8.3f} {plan.objective.solver:>6}  {cells}", flush=True
            )
    print(
        f"worst bottleneck over lower bound: {worst:.3f}; plans that a rule beats: {beaten}; plans by solver: {dict(wins.most_common())}"
    )


if __name__ == "__main__":
    main()
