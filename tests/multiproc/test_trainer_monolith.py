"""A model that rank 0 alone has values of, and a file that rank 0 alone reads: the others hold their part, and one tensor at a time."""

import ctypes
import gc
import os
import warnings

import pytest
import torch
from support.checkpoint_harness import peak_of
from support.executor_harness import run_workers
from support.trainer_cases import Block, Classifier, Net, classifier, eager, everything, trainer
from torch import distributed, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

from smpc.composer import ComposerModel, Trainer
from smpc.errors import ConfigError, ConfigUnsupportedError

ALONE = {"sync_module_states": True, "load_monolith_rank0_only": True}


def _place(rank):
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(distributed.get_world_size()), "NODE_RANK": "0"}
    warnings.simplefilter("ignore")


class Odd(Net):
    def forward(self, x):
        return super().forward(self.back(self.odd(x) + self.odd.shift))


class Awkward(Classifier):
    """Two layers with one weight, rows that no number of ranks divides, buffers, and a layer that is not sharded."""

    def __init__(self):
        super().__init__()
        self.model = Odd()
        self.model.blocks[1].up = self.model.blocks[0].up
        self.model.blocks.append(Block())
        self.model.odd = nn.Linear(8, 5)
        self.model.odd.register_buffer("shift", torch.randn(5))
        self.model.back = nn.Linear(5, 8)
        self.scale = nn.Module()
        self.scale.register_buffer("factor", torch.tensor(1.5))
        self.scale.register_buffer("again", self.scale.factor, persistent=False)
        self.other = nn.Linear(8, 8)

    def forward(self, batch):
        x = self.other(batch[0]).detach() + batch[0]
        return self.model(x * self.scale.factor)


def awkward(is_meta):
    torch.manual_seed(0)
    with torch.device("meta" if is_meta else "cpu"):
        return Awkward()


def one_source(rank, folder):
    _place(rank)
    found = []
    kinds = ("SHARD_GRAD_OP", "NO_SHARD")
    for strategy in ({}, *({"sharding_strategy": kind} for kind in kinds), {"cpu_offload": True}):
        for is_meta in (False, True):
            model = awkward(is_meta and rank > 0)
            given = {"sync_module_states": True, "ignored_modules": [model.other]}
            made = trainer(4, 24, model=model, fsdp_config=strategy | given)
            assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
            assert model.model.blocks[1].up.weight is model.model.blocks[0].up.weight
            made.fit()
            found.append((everything(made), model.model.odd.shift, model.scale.factor, model.scale.again))
    return found


@pytest.mark.long
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_values_of_rank_0_alone(tmp_path, world):
    """As if every rank had had them, in parts, in buffers, and in what stays whole."""
    shift = awkward(False).model.odd.shift
    for found in run_workers(one_source, world, tmp_path):
        for (wanted, *_), (values, *buffers) in zip(found[::2], found[1::2], strict=True):
            assert torch.equal(values, wanted)
            assert torch.equal(buffers[0], shift)
            assert buffers[1:] == [1.5, 1.5]
        assert world > 2 or torch.equal(found[0][0], eager(2, 4, count=24, model=awkward(False)))


def refusals(rank, folder):
    _place(rank)
    found = []
    for wrong, options in ((1, {"fsdp_config": {}}), (0, {"fsdp_config": ALONE}), (1, {})):
        with torch.device("meta" if rank == wrong else "cpu"):
            model = classifier()
        with pytest.raises(ConfigError) as caught:
            trainer(4, model=model, **options)
        found.append(str(caught.value))
    model = classifier()
    model.model.head.weight = nn.Parameter(torch.randn(8, 4).t())
    with pytest.raises(ConfigUnsupportedError) as caught:
        trainer(4, model=model, fsdp_config={})
    return [*found, str(caught.value)]


def test_tensors_that_cannot_be_divided(tmp_path):
    for found in run_workers(refusals, 2, tmp_path):
        assert ["found meta tensors on ranks 1" in found[0], "found meta tensors on ranks 0" in found[1]] == [
            True,
            True,
        ]
        assert "model: expected values on all ranks, found meta tensors on ranks 1; fill them, or shard" in found[2]
        assert "head.weight of the model is not contiguous" in found[3]


class Wide(ComposerModel):
    """`count` layers of `rows` times 1024 elements."""

    def __init__(self, count, rows):
        super().__init__()
        self.model = nn.Sequential(*(nn.Linear(1024, rows, bias=False) for _ in range(count)))
        self.model.fsdp_wrap_fn = lambda module: isinstance(module, nn.Linear)

    def forward(self, batch):
        return sum(layer(batch[0]) for layer in self.model)

    def loss(self, outputs, batch):
        return outputs.square().mean()


def _wide(count, rows, is_meta=False):
    with torch.device("meta" if is_meta else "cpu"):
        model = Wide(count, rows)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


SLICED = {"tensor_parallel_degree": 2, "layer_plan": {"model.*": ColwiseParallel(output_layouts=Replicate())}}


def monolith(rank, folder, count, rows, parallelism):
    _place(rank)
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: what is freed goes back, and is not kept for later
    for name, size in (("small", 4), ("large", rows)):
        model, optimizer = _wide(count, size)
        batch = (torch.ones(1, 1024), torch.ones(1))
        made = Trainer(model=model, optimizers=optimizer, train_dataloader=[batch], max_duration="1ba", device="cpu")
        made.fit()
        made.save_checkpoint(str(folder / name))
        del made, model, optimizer
    gc.collect()
    found = []

    def load(name, size):
        model, optimizer = _wide(count, size, is_meta=rank > 0)
        path = str(folder / name)
        given = {"parallelism_config": {"fsdp": ALONE, **parallelism}, "load_path": path}
        found.append(Trainer(model=model, optimizers=optimizer, device="cpu", **given))

    load("small", 4)  # what is imported and kept once
    return peak_of(lambda: load("large", rows))


@pytest.mark.long
@pytest.mark.parametrize(
    ("rows", "parallelism"),
    [
        (2048, {}),
        pytest.param(2048, {"tp": SLICED}, marks=pytest.mark.slow),
        pytest.param(16384, {}, marks=pytest.mark.slow),
    ],
    ids=["parts", "slices", "large"],
)
def test_memory_of_a_monolith(tmp_path, rows, parallelism):
    """Weights and both moments: the others' peak is their part, the largest tensor, and 5%."""
    count, tensor = 8, rows * 1024 * 4
    _, *others = run_workers(monolith, 2, tmp_path, count, rows, parallelism)
    part = 3 * count * tensor / 2
    for peak in others:
        print(f"part {part / 1e6:.1f} MB, largest tensor {tensor / 1e6:.1f} MB, peak {peak / 1e6:.1f} MB")
        assert part < peak <= 1.05 * (part + tensor)
