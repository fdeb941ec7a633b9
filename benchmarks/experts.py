"""Experts on two ranks and on one: smpc's beside transformers' own.

    python benchmarks/experts.py [--steps 30] [--sizes small large ...]

    step     a forward and a backward of a Mixtral of two layers on two gloo ranks, one thread each, every rank its own tokens:
             `smpc.expert_parallel.shard` and transformers' `AllToAllEP`, both over the experts' grouped matrix products.
             The bar is a ratio of 0.8
    layer    a forward and a backward of the experts of one such layer in one process: `smpc.experts` (dispatch, grouped linear layers,
             combine, in a group of one) and transformers' grouped matrix products. The bar is 1.0

Both start from the same weights, and their losses and gradients are compared before anything is measured. Steps alternate, so that
whatever else the machine does hits both; a ratio is the median over rounds of the ratio within a round. `busy` is the same ratio of the
processor time of the first rank, which says beside other work too how much each computes and copies; waits for small messages, in which
smpc looks again and again, count in it.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from smpc.executor.collectives import TensorGroup
from smpc.expert_parallel import shard
from smpc.experts import combine, dispatch, grouped_linear

SIZES = {
    "tiny": (64, 64, 96),
    "small": (128, 256, 448),
    "large": (512, 512, 896),
}  # tokens a rank, hidden, intermediate
EXPERTS, CHOSEN, WARM_UP = 8, 2, 3
Step = Callable[[], object]


def _model(size: str) -> nn.Module:
    import transformers

    _, hidden, inner = SIZES[size]
    config = transformers.MixtralConfig(
        vocab_size=256, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN, use_cache=False,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    model: nn.Module = transformers.MixtralForCausalLM(config)
    return model


def _theirs(model: nn.Module) -> nn.Module:
    """The model with `AllToAllEP` in place of its experts' forward."""
    from transformers.distributed.expert_parallel import AllToAllEP

    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("ep", "tp"))
    for layer in model.model.layers:  # type: ignore[union-attr]
        experts = layer.mlp.experts
        for name, parameter in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(parameter.detach().chunk(size)[rank].clone()))
        experts.num_experts = EXPERTS // size
        experts.forward = AllToAllEP(experts, mesh["ep"], mesh["tp"])
    return model


def _training(model: nn.Module, ids: Tensor) -> Callable[[], Tensor]:
    def step() -> Tensor:
        model.zero_grad()
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    return step


def _alternate(first: Step, second: Step, steps: int, meet: Step) -> str:
    """Median milliseconds of both, and the medians of the ratios of a round, by the clock and of processor time."""
    rounds: list[list[tuple[float, float]]] = []
    for number in range(WARM_UP + steps):
        pair = [(0.0, 0.0), (0.0, 0.0)]
        for which in (0, 1) if number % 2 else (1, 0):
            meet()
            start, begin = time.perf_counter(), time.process_time()
            (first, second)[which]()
            pair[which] = (time.perf_counter() - start, time.process_time() - begin)
        rounds.append(pair)
    kept = rounds[WARM_UP:]
    ours, theirs = (statistics.median(pair[which][0] for pair in kept) * 1e3 for which in (0, 1))
    ratio, busy = (statistics.median(own[i] / other[i] for own, other in kept) for i in (0, 1))
    return f"{ours:8.2f} ms   theirs {theirs:8.2f} ms   ratio {ratio:.2f}   busy {busy:.2f}"


def _rank(rank: int, folder: str, sizes: list[str], steps: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    group = TensorGroup.of(dist.group.WORLD)
    for size in sizes:
        ids = torch.randint(0, 256, (1, SIZES[size][0]), generator=torch.Generator().manual_seed(rank))
        whole = _model(size)
        module, other = shard(copy.deepcopy(whole), group, gradients="sum"), _theirs(whole)
        ours, theirs = _training(module, ids), _training(other, ids)
        torch.testing.assert_close(ours(), theirs(), rtol=1e-6, atol=0)
        for (name, own), expected in zip(module.model.named_parameters(), other.parameters(), strict=True):
            close = torch.allclose(own.grad, expected.grad, rtol=1e-3, atol=1e-6)  # type: ignore[arg-type]
            assert close, f"gradients of {name} differ"
        found = _alternate(ours, theirs, steps, dist.barrier)
        if rank == 0:
            print(f"step   {size:<6} {found}", flush=True)
    dist.destroy_process_group()


def _layer(size: str, steps: int) -> None:
    tokens, hidden, _ = SIZES[size]
    experts = _model(size).model.layers[0].mlp.experts  # type: ignore[union-attr]
    up, down, group = experts.gate_up_proj, experts.down_proj, TensorGroup()
    torch.manual_seed(0)
    drawn = torch.randn(4 * tokens, hidden)
    index = torch.rand(4 * tokens, EXPERTS).argsort(1)[:, :CHOSEN]
    weights = torch.rand(4 * tokens, CHOSEN)

    def ours(x: Tensor) -> Tensor:
        rows, plan = dispatch(x, index, EXPERTS, group)
        gate, value = grouped_linear(rows, up, plan.counts).chunk(2, -1)
        return combine(grouped_linear(F.silu(gate) * value, down, plan.counts), plan, weights, group)

    def theirs(x: Tensor) -> Tensor:
        found: Tensor = experts(x, index, weights)
        return found

    def step(layer: Callable[[Tensor], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        def run() -> tuple[Tensor, ...]:
            x = drawn.clone().requires_grad_()
            result = layer(x)
            return result.detach(), *torch.autograd.grad(result.sum(), (x, up, down))

        return run

    first, second = step(ours), step(theirs)
    for own, expected in zip(first(), second(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-4)
    print(f"layer  {size:<6} {_alternate(first, second, steps, lambda: None)}", flush=True)


def main() -> None:
    """Runs both parts, and prints a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder, asked.sizes, asked.steps), nprocs=2)
    for size in asked.sizes:
        _layer(size, asked.steps)


if __name__ == "__main__":
    main()
