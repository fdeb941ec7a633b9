"""The Trainer on real ranks, beside one process of plain PyTorch: strategies, space and time, automatic sizes, elastic checkpoints."""

import os
import shutil
import time
import warnings
from pathlib import Path

import pytest
import torch
from support.executor_harness import run_workers
from support.trainer_cases import Block, Classifier, FullMemory, classifier, dataset, eager, everything, trainer
from torch import distributed, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from smpc.composer import checkpoint_readers
from smpc.errors import CheckpointError, ConfigError, ConfigUnsupportedError, StepError

STRATEGIES = {
    "replicas": {},
    "FULL_SHARD": {"fsdp_config": {}},
    "SHARD_GRAD_OP": {"fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"}},
    "HYBRID_SHARD": {"fsdp_config": {"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": 1}},
    "_HYBRID_SHARD_ZERO2": {
        "fsdp_config": {"sharding_strategy": "_HYBRID_SHARD_ZERO2", "data_parallel_replicate_degree": 1}
    },
    "NO_SHARD": {"fsdp_config": {"sharding_strategy": "NO_SHARD"}},
    "recomputed": {
        "fsdp_config": {"activation_checkpointing": True, "forward_prefetch": True, "backward_prefetch": "NONE"}
    },
    "parts in CPU memory": {"fsdp_config": {"cpu_offload": True}},
    "offloaded": {"fsdp_config": {"activation_checkpointing": True, "activation_cpu_offload": True}},
    "forced_sync": {"ddp_sync_strategy": "forced_sync"},
    "ZeRO 2": {"deepspeed_config": {"zero_optimization": {"stage": 2}, "train_batch_size": 8}},
    "auto": {"device_train_microbatch_size": "auto"},
}


def _place(rank):
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(distributed.get_world_size()), "NODE_RANK": "0"}
    warnings.simplefilter("ignore")


def strategies(rank, folder):
    _place(rank)
    found = {}
    for name, options in STRATEGIES.items():
        made = trainer(4, **options)
        made.fit()
        found[name] = everything(made)
        units = [module for module in made.state.model.modules() if isinstance(module, FSDPModule)]
        offloaded = [
            isinstance(unit._get_fsdp_state()._fsdp_param_group.offload_policy, CPUOffloadPolicy) for unit in units
        ]
        assert offloaded == [name == "parts in CPU memory"] * len(units)
    return found


@pytest.mark.long
def test_all_strategies_have_the_bits_of_one_process(tmp_path):
    expected = eager(2, 4)
    for found in run_workers(strategies, 2, tmp_path):
        for name, values in found.items():
            assert torch.equal(values, expected), name


SPACE_AND_TIME = {  # ranks: the batch of each, then size of a microbatch and number of samples; the last batch of an epoch may be smaller
    1: (8, [(1, 14)]),
    2: (4, [(1, 14), (3, 16), (4, 14)]),
    4: (2, [(1, 12)]),
}


def cuts(rank, folder, batch_size, cases):
    _place(rank)
    found = []
    for size, count in cases:
        for options in ({}, {"fsdp_config": {}}):
            made = trainer(batch_size, count, device_train_microbatch_size=size, **options)
            made.fit()
            found.append((size, count, everything(made)))
    return found


@pytest.mark.parametrize(
    "world", [pytest.param(world, marks=pytest.mark.slow) if world > 2 else world for world in SPACE_AND_TIME]
)
def test_space_and_time(tmp_path, world):
    """Ranks and microbatches may be exchanged, also where the last microbatch or batch is smaller: 1x8, 2x4, 4x2; 2x1 bit by bit."""
    batch_size, cases = SPACE_AND_TIME[world]
    for found in run_workers(cuts, world, tmp_path, batch_size, cases):
        assert [(size, count) for size, count, _ in found] == [case for case in cases for _ in range(2)]
        for size, count, values in found:
            expected = eager(world, batch_size, count=count)
            if size == batch_size:
                assert torch.equal(values, expected)
            torch.testing.assert_close(values, expected, rtol=1e-5, atol=2e-6)


AUTOMATIC = {
    "replicas": {},
    **{name: STRATEGIES[name] for name in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD", "recomputed")},
    "parts in CPU memory": STRATEGIES["parts in CPU memory"],
}


class Two(Classifier):
    """Of its two children the first one fails before the second one has ever run."""

    def __init__(self):
        super().__init__()
        self.first = Block()

    def forward(self, batch):
        return self.model(self.first(batch[0]))


def _one_run(where, options, size):
    """Everything that is trained, and the size. `where`: None for enough memory."""
    torch.manual_seed(0)
    model = Two()
    if where is not None:
        block = model.first if where == "forward" else model.model.blocks[1]
        inner = block.up if where == "inside of a unit" else block
        inner.register_forward_hook(FullMemory(where, 1, 1))
    dropped = nn.Dropout(0.5)
    model.model.blocks[0].register_forward_hook(lambda module, inputs, output: dropped(output))
    made = trainer(4, model=model, device_train_microbatch_size=size, seed=3, **options)
    made.fit()
    return everything(made), made.state.device_train_microbatch_size


def automatic(rank, folder, where, names):
    _place(rank)
    found = {}
    for name in names:
        options = AUTOMATIC[name]
        began = time.monotonic()
        found[name] = (*_one_run(where, options, "auto"), time.monotonic() - began, _one_run(None, options, 1)[0])
    return found


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize("where", ["forward", "backward", "inside of a unit"])
def test_out_of_memory_on_one_rank(tmp_path, where):
    """All ranks take the smaller size, and have the bits of one that was given from the start; dropout included."""
    check_out_of_memory(tmp_path, where, ("replicas", "FULL_SHARD"))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward", "inside of a unit"])
def test_out_of_memory_on_one_rank_in_every_strategy(tmp_path, where):
    check_out_of_memory(tmp_path, where, tuple(AUTOMATIC))


def check_out_of_memory(folder, where, names):
    for found in run_workers(automatic, 2, folder, where, names):
        assert found.keys() == set(names)
        for name, (made, size, took, fixed) in found.items():
            assert size == 1, name
            assert torch.equal(made, fixed), name
            assert took < 300, "nobody waits for a timeout"


def refusals(rank, folder):
    _place(rank)
    found = []
    model = classifier()
    model.model.blocks[1].register_forward_hook(FullMemory("forward", 0, 0))
    junk = folder / "junk.pt"
    junk.write_bytes(b"no checkpoint")
    alone = {"sync_module_states": True, "load_monolith_rank0_only": True}
    wider = classifier()
    wider.model.head = nn.Linear(8, 5)
    other = classifier()
    other.model.fsdp_wrap_fn = lambda module: {"sharding_strategy": "NO_SHARD"} if module is other.model.head else False
    cases = (
        (
            StepError,
            "out of memory with microbatches of one sample, (1, 8), (1,)",
            {"model": model, "device_train_microbatch_size": "auto"},
        ),
        (ConfigError, "expected data_parallel_replicate_degree x", {"fsdp_config": {"data_parallel_shard_degree": 3}}),
        (
            ConfigError,
            "found rank 0: [0, 1], rank 1: [1]",
            {"fsdp_config": {"process_group": [0, 1] if rank == 0 else [1]}},
        ),
        (ConfigUnsupportedError, "sharding_strategy NO_SHARD beside FULL_SHARD", {"model": other, "fsdp_config": {}}),
        (CheckpointError, "junk.pt", {"load_path": str(junk), "fsdp_config": alone}),
        (CheckpointError, "no checkpoint at", {"load_path": str(folder / "absent")}),
        (ConfigError, "max_duration: '1ba' on rank 0, '2ba' on rank 1", {"max_duration": f"{rank + 1}ba"}),
        (ConfigError, "eval_dataloader: one on rank 0, none on rank 1", {"eval_dataloader": None if rank else [()]}),
        (
            ConfigError,
            "{'mixed_precision': 'FULL'} on rank 0, {'mixed_precision': 'PURE'}",
            {"fsdp_config": {"mixed_precision": ("FULL", "PURE")[rank]}},
        ),
        (
            ConfigError,
            "head.weight: torch.float32 (4, 8) on rank 0, torch.float32 (5, 8) on rank 1",
            {"model": wider if rank else classifier()},
        ),
    )
    for error, says, options in cases:
        try:
            trainer(4, **options).fit()
        except error as caught:
            found.append(says in str(caught) or str(caught))
    return found


def test_what_is_refused_on_all_ranks(tmp_path):
    assert run_workers(refusals, 2, tmp_path) == [[True] * 10] * 2


SHARDED = {"state_dict_type": "sharded", "sharded_ckpt_prefix_dir": "ba{batch}-shards"}


def save(rank, folder):
    _place(rank)
    made = trainer(2, fsdp_config=SHARDED, save_folder=str(folder / "run"), save_interval="2ba", max_duration="2ba")
    made.fit()
    halfway = everything(made)
    made.fit("2ba")
    whole = trainer(2, fsdp_config={}, save_folder=str(folder / "full"), save_interval="2ba", max_duration="2ba")
    whole.fit()
    return halfway, everything(made)


def _not_here(*args, **options):
    raise AssertionError("rank 0 alone reads the file")


def resume(rank, folder, run):
    _place(rank)
    size = distributed.get_world_size()
    found = []
    for options in (
        {"fsdp_config": SHARDED, "load_path": str(run / "run" / "ba2-shards")},
        {"load_path": str(run / "run" / "ba2-shards")},
        {"load_path": str(run / "full" / "latest-rank0.pt")},
        {
            "load_path": str(run / "full" / "ep1-ba2-rank0.pt"),
            "fsdp_config": {"sync_module_states": True, "load_monolith_rank0_only": True},
        },
    ):
        if "load_monolith_rank0_only" in options.get("fsdp_config", {}) and rank:
            checkpoint_readers.read_file = _not_here
        found.append(everything(trainer(8 // size, **options)))
    going_on = None
    if size == 4:
        going = trainer(2, fsdp_config=SHARDED, load_path=str(run / "run" / "ba2-shards"))
        going.fit()
        going_on = everything(going)
    return found, going_on


@pytest.mark.long
@pytest.mark.parametrize("sizes", [pytest.param((3, 4), marks=pytest.mark.slow), (1, 2)])
def test_checkpoints_are_resumed_on_any_number_of_ranks(tmp_path, sizes):
    """Four ranks leave exactly five files; parameters and moments come back bit by bit on 1 to 4 ranks, and 2 + 2 batches are 4."""
    (tmp_path / "4").mkdir()
    halfway, end = run_workers(save, 4, tmp_path / "4")[0]
    folder = tmp_path / "4"
    for name in ("ba2-shards", "ba4-shards"):
        assert sorted(path.name for path in (folder / "run" / name).iterdir()) == [
            ".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "__3_0.distcp",
        ]  # fmt: skip
    assert os.path.realpath(folder / "run" / "latest-rank0.pt") == str(folder / "run" / "ba4-shards")
    for size in sizes:
        (tmp_path / f"to{size}").mkdir()
        for found, going_on in run_workers(resume, size, tmp_path / f"to{size}", folder):
            assert all(torch.equal(values, halfway) for values in found)
            assert going_on is None or torch.equal(going_on, end)


def remote(rank, folder):
    _place(rank)
    url = (folder / "bucket").as_uri() + "/run"
    found = []
    for options in ({}, {"fsdp_config": SHARDED}):
        given = {"save_folder": url, "save_interval": "2ba", "run_name": "r", **options}
        made = trainer(4, max_duration="2ba", **given)
        made.fit()
        found.append(torch.equal(everything(trainer(4, autoresume=True, **given)), everything(made)))
        (path,) = (p for p in (folder / "bucket" / "run").iterdir() if p.name in ("ba2-shards", "ep1-ba2-rank0.pt"))
        if path.is_dir():
            path = next(path.glob("*.distcp"))
        distributed.barrier()
        if rank == 0:
            path.unlink()
        try:
            trainer(4, autoresume=True, **given)
        except CheckpointError as error:
            found.append("missing or replaced" in str(error) or "no checkpoint at" in str(error))
        if rank == 0:
            shutil.rmtree(folder / "bucket")
        distributed.barrier()
    return found


def test_a_store_that_fsspec_reaches(tmp_path):
    """Each rank writes its part to it, and what is missing is told on all ranks."""
    assert run_workers(remote, 2, tmp_path) == [[True] * 4] * 2


class Adapted(nn.Module):
    """A layer that does not train, and a small one beside it that does."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(layer.in_features, 2, bias=False), nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def adapted():
    model = classifier()
    for block in model.model.blocks:
        block.up = Adapted(block.up)
    model.model.blocks[1].down.requires_grad_(False)
    return model


def adapt(rank, folder):
    _place(rank)
    found = {}
    for name in ("replicas", "FULL_SHARD", "SHARD_GRAD_OP", "recomputed", "auto"):
        made = trainer(4, model=adapted(), **STRATEGIES[name])
        made.fit()
        found[name] = everything(made)
    options = {"fsdp_config": SHARDED, "save_folder": str(folder / "run"), "save_interval": "2ba"}
    trainer(4, model=adapted(), max_duration="2ba", **options).fit()
    made = trainer(4, model=adapted(), fsdp_config=SHARDED, load_path=str(folder / "run" / "ba2-shards"))
    made.fit()
    return found | {"resumed": everything(made)}


@pytest.mark.long
def test_frozen_and_trained_parameters_in_one_unit(tmp_path):
    expected = eager(2, 4, model=adapted())
    for found in run_workers(adapt, 2, tmp_path):
        for name, values in found.items():
            assert torch.equal(values, expected), name


def own_groups(rank, folder, group):
    _place(rank)
    model = classifier()
    model.model.fsdp_wrap_fn = lambda module: (
        {"process_group": [rank] if group == "list" else group, "mixed_precision": "FULL"}
        if module is model.model.blocks[1]
        else isinstance(module, Block)
    )
    made = trainer(4, model=model, fsdp_config={"verbose": True})
    made.fit()
    own = [parameter.to_local().clone() for parameter in model.model.blocks[1].parameters()]
    shared = [parameter.full_tensor() for parameter in model.model.blocks[0].parameters()]
    return own, shared


@pytest.mark.parametrize("group", ["self", "list"])
def test_units_in_groups_of_their_own(tmp_path, group):
    """The documentation's example: nobody averages a unit of `self`, and everybody the others; a list of ranks may say the same."""
    (one, shared), (other, again) = run_workers(own_groups, 2, tmp_path, group)
    assert all(tensor.shape == same.shape for tensor, same in zip(one, other, strict=True))
    assert not all(torch.equal(tensor, same) for tensor, same in zip(one, other, strict=True))
    assert all(torch.equal(tensor, same) for tensor, same in zip(shared, again, strict=True))
    assert f"unit model.blocks.1: {'self' if group == 'self' else '[0]'}" in Path(tmp_path / "0.log").read_text()


def pairs(rank, folder):
    _place(rank)
    groups = [distributed.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))]
    own = groups[rank // 2], groups[2 + rank % 2]
    found = {}
    for name, pair in {
        "names": ("set2", "mod2"),
        "lists": ([rank // 2 * 2, rank // 2 * 2 + 1], "mod2"),
        "groups": own,
    }.items():
        made = trainer(2, fsdp_config={"process_group": pair}, save_folder=str(folder / name), save_interval="2ba")
        made.fit()
        found[name] = everything(made), made.state.model.model.blocks[0].up.weight.to_local().numel()
    hybrid = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": 2}
    resumed = trainer(2, fsdp_config=hybrid, load_path=str(folder / "names" / "latest-rank0.pt"))
    made = trainer(2, fsdp_config=hybrid)
    made.fit()
    with pytest.raises(
        ConfigError, match=r"make a grid, found shards \[0, 1\], \[2, 3\] and replicas \[0, 1\], \[2, 3\]"
    ):
        trainer(2, fsdp_config={"process_group": ("set2", "set2")})
    return found, everything(resumed), everything(made)


@pytest.mark.slow
def test_shards_and_replicas_as_a_pair_of_groups(tmp_path):
    """What HYBRID_SHARD has; all ranks are in one grid, so that it can be saved."""
    for found, resumed, expected in run_workers(pairs, 4, tmp_path):
        for values, held in found.values():
            assert torch.equal(values, expected)
            assert held == 16 * 8 / 2
        assert torch.equal(resumed, expected)


class Listed(Classifier):
    """Lists and dictionaries of modules are direct children."""

    def __init__(self):
        super().__init__()
        self.blocks, self.heads = self.model.blocks, nn.ModuleDict({"a": nn.ModuleList([self.model.head])})
        del self.model

    def forward(self, batch):
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return self.heads["a"][0](x)


def listed(rank, folder):
    _place(rank)
    torch.manual_seed(0)
    made = trainer(4, model=Listed(), fsdp_config={})
    made.fit()
    assert made.state.model.blocks[0].up.weight.to_local().numel() == 64
    return everything(made)


def test_lists_of_modules_are_looked_through(tmp_path):
    for values in run_workers(listed, 2, tmp_path):
        assert torch.equal(values, eager(2, 4))


def evaluations(rank, folder):
    _place(rank)
    batches = [tuple(tensor[first : first + 4] for tensor in dataset().tensors) for first in (0, 4, 8)]
    own = batches[:2] if rank == 0 else batches[2:]
    found = []
    for options in ({}, {"fsdp_config": {}}):
        made = trainer(4, eval_dataloader=own, **options)
        found += [made.eval(), made.eval()]
    with pytest.raises(ConfigError, match="expected at least one batch on every rank, found none on rank 1"):
        trainer(4, eval_dataloader=own if rank == 0 else [], fsdp_config={}).eval()
    return found


def test_evaluations_of_unequal_length(tmp_path):
    """The mean over all samples, sharded or not."""
    model, (inputs, labels) = classifier(), (tensor[:12] for tensor in dataset().tensors)
    expected = model.loss(model((inputs,)), (inputs, labels)).item()
    for found in run_workers(evaluations, 2, tmp_path):
        assert found == pytest.approx([expected] * 4, rel=1e-5)
