"""What sharing a sequence saves: a training step of a small Llama on two ranks beside one process, and the ring beside slices in a row.

    python benchmarks/context_parallel.py [--length 2048] [--rounds 5] [--layers 2] [--hidden 256]

Every rank runs a forward and a backward of the same batch, one thread a process, over gloo on one host. Variants alternate within a
round, so that whatever else the machine does hits all; a ratio is the median over rounds of the ratio within a round. Both processes run
the whole model at the same time for `whole`, so that two cores are busy in every variant.

    whole         the model in one process, on each of them
    p2p           `smpc.context_parallel.shard`, keys and values in a ring, zigzag slices
    all_gather    the same with keys and values gathered
    a2a           the same with heads for slices
    contiguous    a ring over slices in a row: one rank waits for the other

Bars, on idle cores: p2p / whole <= 0.60, all_gather / whole <= 0.62, ring alone: zigzag / contiguous <= 0.75 (0.67 is ideal).
`busy` is the same ratio of the processor time of the busier rank, which says beside other work too how much each way computes, copies and
sends, but not how long a rank waits. `ring` and `ring contiguous` are attention alone, without a model. Work of ranks, in pairs of
pieces: `smpc.codegen.ring_order.pairs_of_work`.

On GPUs, one process a GPU, over NCCL (not measured here: it needs several):

    torchrun --nproc-per-node 2 benchmarks/context_parallel.py --torchrun --device cuda --length 32768 --hidden 4096 --dtype bfloat16
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
import transformers
from torch import Tensor

from smpc.codegen.ring_order import pairs_of_work
from smpc.context_parallel import shard
from smpc.executor.collectives import TensorGroup, own_pieces
from smpc.executor.sequence.ring import ring_attention

BARS = {"p2p": 0.60, "all_gather": 0.62, "ring": 0.75}
BASE = {"p2p": "whole", "all_gather": "whole", "a2a": "whole", "contiguous": "whole", "ring": "ring contiguous"}
WAYS = {
    "p2p": {"attention": "p2p", "layout": "zigzag"},
    "all_gather": {"attention": "all_gather", "layout": "zigzag"},
    "a2a": {"attention": "a2a", "layout": "zigzag"},
    "contiguous": {"attention": "p2p", "layout": "contiguous"},
}
Step = Callable[[], object]


def variants(options: argparse.Namespace, device: torch.device) -> dict[str, Step]:
    """A step of each."""
    torch.manual_seed(0)
    heads = max(4, options.hidden // 64)
    config = transformers.LlamaConfig(
        num_hidden_layers=options.layers, hidden_size=options.hidden, intermediate_size=3 * options.hidden,
        num_attention_heads=heads, num_key_value_heads=heads // 2, vocab_size=1024, max_position_embeddings=options.length,
    )  # fmt: skip
    dtype = getattr(torch, options.dtype)
    model = transformers.LlamaForCausalLM(config).to(device, dtype)
    ids = torch.randint(1024, (1, options.length), device=device)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    found: dict[str, Step] = {"whole": _trained(model, batch)}
    for name, ways in WAYS.items():
        found[name] = _trained(shard(copy.deepcopy(model), batch, dist.group.WORLD, outputs=("loss",), **ways), batch)
    whole = [torch.randn(1, n, options.length, 64, device=device, dtype=dtype) for n in (heads, heads // 2, heads // 2)]
    for name, mirrored in (("ring", True), ("ring contiguous", False)):
        found[name] = _ring(whole, mirrored)
    return found


def _trained(module: torch.nn.Module, batch: dict[str, object]) -> Step:
    def step() -> object:
        module.zero_grad()
        loss = module(**batch).loss
        loss.backward()
        return loss.item()

    return step


def _ring(whole: list[Tensor], mirrored: bool) -> Step:
    group = TensorGroup.of(dist.group.WORLD)
    own = [own_pieces(tensor, 2, group.rank, group.size, (), mirrored).requires_grad_() for tensor in whole]

    def step() -> object:
        out = ring_attention(group, (2, (), mirrored), *own, causal=True)
        out.backward(out.detach())
        return out.flatten()[0].item()

    return step


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, list[tuple[float, float]]]:
    """Seconds by variant and round: until the slower rank is done, and of the processor time of the busier one."""
    steps = variants(options, device)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(options.rounds + 1):
        for name, step in steps.items():
            dist.barrier()
            start, begin = time.perf_counter(), time.process_time()
            step()
            took = torch.tensor([time.perf_counter() - start, time.process_time() - begin], device=device)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if number:  # the first is for warming up
                wall, busy = took.tolist()
                times[name].append((wall, busy))
    return times


def report(times: dict[str, list[tuple[float, float]]], ranks: int) -> None:
    """A line for each variant."""
    for name, seconds in times.items():
        base = BASE.get(name)
        text = f"{name:<16} {1e3 * statistics.median(wall for wall, _ in seconds):9.1f} ms"
        if base is not None:
            pairs = list(zip(seconds, times[base], strict=True))
            ratio, busy = (statistics.median(a[i] / b[i] for a, b in pairs) for i in range(2))
            bar = f"  (bar {BARS[name]:.2f})" if name in BARS else ""
            text += f"   {ratio:5.2f} of {base}{bar}, busy {busy:.2f}"
        print(text)
    work = [pairs_of_work(rank, ranks, causal=True, mirrored=True) for rank in range(ranks)]
    print(f"work of ranks, zigzag: {work}")


def _rank(rank: int, ranks: int, options: argparse.Namespace, path: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
    times = measure(options, torch.device("cpu"))
    if rank == 0:
        report(times, ranks)
    dist.destroy_process_group()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("length", 2048), ("rounds", 5), ("layers", 2), ("hidden", 256), ("ranks", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--torchrun", action="store_true", help="started by torchrun, one process a device")
    options = parser.parse_args()
    if options.torchrun:
        device = torch.device(options.device, int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        times = measure(options, device)
        if dist.get_rank() == 0:
            report(times, dist.get_world_size())
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (options.ranks, options, str(Path(folder) / "store")), options.ranks)


if __name__ == "__main__":
    main()
