"""Durations, cuts, loss scales, arguments: what needs no other rank."""

import dataclasses
from collections import UserDict
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.trainer_cases import classifier, trainer
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import TensorDataset

from smpc.composer.batch_step import is_out_of_memory
from smpc.composer.checkpoint import LossScale
from smpc.composer.duration import Duration, Timestamp
from smpc.composer.microbatches import cut, moved, num_samples, num_tokens
from smpc.composer.trainer import Trainer
from smpc.errors import ConfigError, ConfigTypeError, ConfigUnsupportedError


@given(st.integers(1, 40), st.sampled_from(["ep", "ba", "sp", "tok"]), st.integers(0, 60), st.integers(0, 60))
def test_durations(count, unit, done, more):
    duration = Duration.parse(f"{count}{unit}", "x")
    name = {"ep": "epoch", "ba": "batch", "sp": "sample", "tok": "token"}[unit]
    before, now = (dataclasses.replace(Timestamp(), **{name: value}) for value in (done, done + more))
    assert duration.is_over(now) == (done + more >= count)
    assert duration.passed(before, now) == any(value % count == 0 for value in range(done + 1, done + more + 1))


def test_durations_that_cannot_be():
    assert Duration.parse(3, "x") == Duration(3, "ep")
    for value in ("", "4", "4 ba", "-1ba", "0ba", "1.5ep", "ba"):
        with pytest.raises(ConfigError, match="x: expected a number of at least 1 and ep, ba, sp or tok"):
            Duration.parse(value, "x")
    for value in (1.5, True, None):
        with pytest.raises(ConfigTypeError, match="x: expected text such as 4ba"):
            Duration.parse(value, "x")


class Pair(NamedTuple):
    first: torch.Tensor
    name: str


@given(st.integers(1, 12), st.integers(1, 14))
def test_cuts(count, size):
    batch = {
        "x": torch.arange(count),
        "pair": Pair(torch.arange(count) * 2, "n"),
        "list": [torch.ones(count, 2)],
        "scale": torch.tensor(3),
    }
    pieces = cut(batch, size)
    assert [num_samples(piece) for piece in pieces[:-1]] == [size] * (len(pieces) - 1)
    assert torch.equal(torch.cat([piece["x"] for piece in pieces]), batch["x"])
    assert torch.equal(torch.cat([piece["pair"].first for piece in pieces]), batch["pair"].first)
    assert all(piece["pair"].name == "n" and piece["scale"] == 3 for piece in pieces)


def test_batches_that_cannot_be_cut():
    with pytest.raises(ConfigError, match="expected tensors with one number of rows in a tuple, found 2, 3"):
        num_samples((torch.ones(2), torch.ones(3)))
    with pytest.raises(ConfigError, match="found no tensor"):
        num_samples(["a"])
    assert num_tokens({"input_ids": torch.ones(2, 5, dtype=torch.long)}) == 10
    assert num_tokens((torch.ones(2, 5), torch.ones(2))) == 0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (MemoryError(), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_says_that_memory_was_not_enough(error, expected):
    assert is_out_of_memory(error) is expected


def test_the_scale_of_losses():
    """Beside torch's GradScaler on the same gradients."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    own, theirs = LossScale(8.0, window=2), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for gradient in (1.0, float("inf"), 1.0, 1.0, 1.0, float("nan"), 1.0):
        weight.grad = torch.full((3,), gradient)
        theirs.scale(torch.ones(()))  # as a loss
        theirs.step(optimizer)
        theirs.update()
        weight.grad = torch.full((3,), gradient)
        assert own.unscale(optimizer) == (gradient == 1.0)
        assert own.factor == theirs.get_scale()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"precision": "amp_fp16"}, LossScale(65536.0, 2000, 1)),
        ({"deepspeed_config": {"fp16": {"enabled": True}}}, LossScale(65536.0, 1000, 2)),
        ({"deepspeed_config": {}, "precision": "amp_fp16"}, LossScale(65536.0, 1000, 2)),
        ({"deepspeed_config": {"fp16": {"enabled": True, "loss_scale": 8}}}, LossScale(8.0, is_fixed=True)),
        ({"deepspeed_config": {"fp16": {"enabled": False, "loss_scale": 8}}}, None),
    ],
)
def test_the_scale_that_a_run_begins_with(options, expected):
    """Those of torch's GradScaler, and DeepSpeed's under its configuration."""
    assert trainer(4, **options).state.scale == expected


OTHER = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"algorithms": []}, ConfigError, "algorithms: no argument of this Trainer; change the model or the batch"),
        ({"precision": "amp_fp8"}, ConfigUnsupportedError, "amp_fp8 is not supported"),
        ({"precision": "fp64"}, ConfigError, "precision: expected fp32, amp_fp16, amp_bf16, found 'fp64'"),
        ({"device": "tpu"}, ConfigUnsupportedError, "device: expected cpu or gpu"),
        ({"device_train_microbatch_size": 0}, ConfigError, "expected at least 1, found 0"),
        ({"device_train_microbatch_size": 1.5}, ConfigTypeError, "expected a whole number or 'auto'"),
        (
            {"fsdp_config": {}, "deepspeed_config": {}},
            ConfigError,
            "fsdp_config and deepspeed_config: expected one of them",
        ),
        ({"parallelism_config": {"pp": {}}}, ConfigError, "parallelism_config: expected fsdp and tp, found 'pp'"),
        (
            {"parallelism_config": {"tp": {"degree": 2}}},
            ConfigError,
            "tp: expected tensor_parallel_degree and layer_plan",
        ),
        ({"max_duration": "4 weeks"}, ConfigError, "max_duration: expected a number"),
        ({"ddp_sync_strategy": "never"}, ConfigError, "ddp_sync_strategy: expected single_auto_sync"),
        ({"autoresume": True}, ConfigError, "missing save_folder, run_name"),
        (
            {"load_path": "nowhere://bucket/run"},
            ConfigError,
            "load_path: cannot reach nowhere://bucket/run: .*install the fsspec package",
        ),
        ({"callbacks": 3}, ConfigTypeError, "callbacks: expected functions of the state, found int"),
        ({"save_folder": 3}, ConfigTypeError, "save_folder: expected text, found 3"),
        ({"save_filename": "{epock}.pt"}, ConfigError, "save_filename: '{epock}.pt': expected the fields rank, "),
        ({"save_filename": "{epoch.pt"}, ConfigError, "save_filename: '{epoch.pt': expected the fields rank, "),
        ({"fsdp_config": {"process_group": "set3"}}, ConfigError, "process_group 'set3': expected a K that divides"),
        ({"fsdp_config": {"process_group": ("set1", "some")}}, ConfigError, "expected self, node, .* found 'some'"),
        (
            {"save_filename": "{rank:99999}.pt"},
            ConfigError,
            "expected a plain field, as {batch} or {batch:06d}, found rank:99999",
        ),
        ({"save_filename": "{rank.real}.pt"}, ConfigError, "found rank.real:"),
        ({"save_filename": "{rank:{batch}}.pt"}, ConfigError, "found rank:{batch}"),
        ({"save_filename": "../{epoch}.pt"}, ConfigError, "expected a name inside of save_folder, found '../0.pt'"),
        (
            {"save_filename": "{run_name}.pt", "run_name": "/etc/x"},
            ConfigError,
            "inside of save_folder, found '/etc/x.pt'",
        ),
        (
            {"fsdp_config": {"state_dict_type": "sharded", "sharded_ckpt_prefix_dir": "{day}"}},
            ConfigError,
            "sharded_ckpt_prefix_dir: '{day}': expected the fields",
        ),
        ({"save_num_checkpoints_to_keep": 0}, ConfigError, "expected at least 1, or -1 for all, found 0"),
        ({"save_overwrite": "no"}, ConfigTypeError, "save_overwrite: expected True or False, found 'no'"),
        ({"load_ignore_keys": "state/model/*"}, ConfigTypeError, "load_ignore_keys: expected a list of patterns"),
        ({"load_ignore_keys": [3]}, ConfigTypeError, "load_ignore_keys: expected a list of patterns"),
        ({"seed": "7"}, ConfigTypeError, "seed: expected a whole number, found '7'"),
        ({"dist_timeout": "5min"}, ConfigTypeError, "dist_timeout: expected seconds, found '5min'"),
        ({"dist_timeout": 0}, ConfigError, "dist_timeout: expected seconds above 0, found 0"),
        ({"fsdp_config": {"data_parallel_shard_degree": 3}}, ConfigError, "= 1 processes, found None x 3"),
        ({"schedulers": "cosine"}, ConfigTypeError, "schedulers: expected torch's, found str"),
        (
            {"schedulers": StepLR(OTHER, 1)},
            ConfigError,
            "schedulers: expected schedulers of the optimizer in optimizers",
        ),
        ({"schedulers": ReduceLROnPlateau(OTHER)}, ConfigUnsupportedError, "ReduceLROnPlateau steps by a metric"),
        ({"train_dataloader": 5}, ConfigTypeError, "train_dataloader: expected a DataLoader"),
        ({"eval_dataloader": TensorDataset(torch.ones(2, 2))}, ConfigTypeError, "which gives samples one by one"),
        (
            {"seed": 1.5, "precision": "fp64", "algorithms": [], "max_duration": -1},
            ConfigError,
            r"algorithms: no argument.*\nseed: expected.*\nprecision: expected.*\nmax_duration: expected",
        ),
    ],
)
def test_arguments_that_cannot_be(options, error, says):
    with pytest.raises(error, match=says):
        trainer(4, **options)
    assert not torch.distributed.is_initialized()


def test_models_and_optimizers_that_cannot_be():
    with pytest.raises(ConfigTypeError, match="model: expected a ComposerModel, found Linear"):
        Trainer(model=torch.nn.Linear(1, 1))
    model = classifier()
    with pytest.raises(ConfigError, match="optimizers: expected parameters of the model alone, found 10 others"):
        Trainer(model=model, optimizers=torch.optim.SGD(classifier().parameters(), lr=0.1), device="cpu")
    two = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(ConfigError, match="optimizers: expected one optimizer, found 2"):
        Trainer(model=model, optimizers=two, device="cpu")


class Encoding(UserDict):
    """Its keys are attributes, as of a tokenizer's BatchEncoding."""

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


def test_mappings_keep_their_class():
    """They became dicts, and the model's forward ended with an AttributeError."""
    batch = Encoding(x=torch.arange(4), name="n")
    whole = moved(batch, torch.device("cpu"))
    assert whole.x.tolist() == [0, 1, 2, 3]
    assert [(piece.x.tolist(), piece.name) for piece in cut(batch, 3)] == [([0, 1, 2], "n"), ([3], "n")]
    assert batch.x.tolist() == [0, 1, 2, 3], "the batch is as it was"
