"""What the Trainer adds to a step: beside torch's own loops, and beside the Trainer it is written after, on ranks of this host.

    python benchmarks/trainer.py [--world 2] [--rounds 5] [--batches 10] [--width 256] [--peer]

All train the same model on the same batches with AdamW, and read them from a DataLoader. In a round each trains some batches, in an
order that turns, so that whatever else the machine does hits all. A ratio is the median over rounds of the ratio of medians within a
round; beside it that of processor time, which depends less on what else the machine does. What is compared has the same bits at the end, or
the benchmark fails.

    replicas     Trainer without a configuration     DistributedDataParallel, forward, backward, step
    fsdp         fsdp_config={}                      fully_shard of the blocks and the model, the same

`--peer` adds the Trainer of mosaicml, which must be importable: tests/multiproc/test_trainer_peer.py shows how it gets there.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from smpc.composer import ComposerModel, Trainer
from smpc.sharding.dtensors import whole

LAYERS, ROWS, RATE = 6, 64, 1e-3
Block_ = Callable[
    [], list[tuple[float, float]]
]  # trains some batches; seconds of each but the first: by the clock, of the processor


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return isinstance(module, Block)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=10, help="of each contestant in a round")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--peer", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, (args, folder), args.world, start_method="spawn")


def run(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    places = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": args.world,
        "LOCAL_WORLD_SIZE": args.world,
        "NODE_RANK": 0,
    }
    os.environ |= {name: str(value) for name, value in places.items()}
    store = dist.FileStore(str(Path(folder) / "store"), args.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.world)
    generator = torch.Generator().manual_seed(0)
    rows = args.world * ROWS * (args.rounds * args.batches + 1)
    data = TensorDataset(torch.randn(rows, args.width, generator=generator))
    for name in ("replicas", "fsdp"):
        made = {"Trainer": _own(name, args, data), "torch": _plain(name, args, data)}
        if args.peer:
            made["peer"] = _peer(name, args, data)
        _compare(name, made, args.rounds)
    dist.destroy_process_group()


def _compare(name: str, made: dict[str, tuple[nn.Module, Block_]], rounds: int) -> None:
    """Run all in turns; what rank 0 prints."""
    order, seconds = list(made), {who: [] for who in made}
    for _ in range(rounds):
        for who in order:
            dist.barrier()
            found = made[who][1]()
            seconds[who].append([statistics.median(column) for column in zip(*found, strict=True)])
        order.append(order.pop(0))
    for who, (model, _) in made.items():
        if any(isinstance(parameter, DTensor) != (name == "fsdp") for parameter in model.parameters()):
            raise SystemExit(f"{name}: {who} does not train so")
    values = {who: [whole(p).detach() for p in model.parameters()] for who, (model, _) in made.items()}
    for who in list(made)[1:]:
        same = all(torch.equal(a, b) for a, b in zip(values["Trainer"], values[who], strict=True))
        pairs = list(zip(seconds["Trainer"], seconds[who], strict=True))
        ratio, of_processor = (statistics.median(a[kind] / b[kind] for a, b in pairs) for kind in (0, 1))
        own, other = (statistics.median(each[0] for each in seconds[name]) * 1e3 for name in ("Trainer", who))
        if dist.get_rank() == 0:
            print(
                f"{name}: Trainer {own:.2f} ms, {who} {other:.2f} ms, ratio {ratio:.3f}, of processor time "
                f"{of_processor:.3f}, same bits: {same}",
                flush=True,
            )
        if not same:
            raise SystemExit(f"{name}: the parameters differ from {who}'s")


def _loader(data: TensorDataset) -> DataLoader[Any]:
    return DataLoader(data, batch_size=ROWS, sampler=DistributedSampler(data, shuffle=False))


def _net(width: int) -> Net:
    torch.manual_seed(0)
    return Net(width)


def _loss(outputs: Tensor, batch: Any) -> Tensor:
    return outputs.square().mean()


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _differences(stamps: list[tuple[float, float]]) -> list[tuple[float, float]]:
    found = [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(stamps)]
    stamps.clear()
    return found


def _model(base: type, width: int) -> Any:
    """What either Trainer trains."""

    class Model(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = _net(width)

        def forward(self, batch: Any) -> Tensor:
            return self.model(batch[0])

        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return _loss(outputs, batch)

        def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
            return self(batch) if outputs is None else outputs

    return Model()


def _own(name: str, args: argparse.Namespace, data: TensorDataset) -> tuple[nn.Module, Block_]:
    model, stamps = _model(ComposerModel, args.width), []
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=RATE),
        train_dataloader=_loader(data),
        device="cpu",
        callbacks=lambda state: stamps.append(_now()),
        fsdp_config={} if name == "fsdp" else None,
    )
    return model, lambda: (trainer.fit(f"{args.batches}ba"), _differences(stamps))[1]


def _plain(name: str, args: argparse.Namespace, data: TensorDataset) -> tuple[nn.Module, Block_]:
    net, stamps = _net(args.width), []
    called: nn.Module = net
    if name == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    else:
        called = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    batches = iter(_loader(data))

    def block() -> list[tuple[float, float]]:
        for _ in range(args.batches):
            batch = next(batches)
            loss = _loss(called(batch[0]), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss.item()  # as a loop that shows its loss does
            stamps.append(_now())
        return _differences(stamps)

    return net, block


def _peer(name: str, args: argparse.Namespace, data: TensorDataset) -> tuple[nn.Module, Block_]:
    if "composer" not in sys.modules:  # it is installed without what it needs for other things
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for absent in ("mcli", "torch_optimizer"):
            sys.modules[absent] = types.ModuleType(absent)
    import composer
    from composer.utils.parallelism import FSDP2Config

    stamps: list[tuple[float, float]] = []

    class Stamps(composer.Callback):  # type: ignore[misc]
        def batch_end(self, state: Any, logger: Any) -> None:
            stamps.append(_now())

    model = _model(composer.ComposerModel, args.width)
    trainer = composer.Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=RATE),
        train_dataloader=_loader(data),
        device="cpu",
        precision="fp32",
        callbacks=[Stamps()],
        progress_bar=False,
        auto_log_hparams=False,
        parallelism_config={"fsdp": FSDP2Config()} if name == "fsdp" else None,
    )
    return model, lambda: (trainer.fit(duration=f"{args.batches}ba"), _differences(stamps))[1]


if __name__ == "__main__":
    main()
