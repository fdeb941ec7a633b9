"""A ZeRO configuration in terms of FSDP: the table, agreement of sizes, refusals; DeepSpeed is not imported."""

import sys

import pytest

from smpc.errors import ConfigError, ConfigTypeError, ConfigUnsupportedError
from smpc.fsdp import translate


def _plan(given, batch_size=8, world_size=2, precision=None):
    return translate(given, batch_size=batch_size, world_size=world_size, precision=precision)


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({}, None),
        ({"stage": 0}, None),
        ({"stage": 1}, {"sharding_strategy": "SHARD_GRAD_OP"}),
        ({"stage": 2, "overlap_comm": True}, {"sharding_strategy": "SHARD_GRAD_OP"}),
        ({"stage": 3, "stage3_max_live_parameters": 1e9}, {"sharding_strategy": "FULL_SHARD"}),
        (
            {"stage": 3, "zero_hpz_partition_size": 2},
            {"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": 2},
        ),
    ],
)
def test_stages(zero, expected):
    assert _plan({"zero_optimization": zero}).fsdp == expected


def test_the_documentations_example():
    plan = _plan({"train_batch_size": 2048, "fp16": {"enabled": True}}, batch_size=256, world_size=8)
    assert (plan.fsdp, plan.precision, plan.microbatch_size) == (None, "amp_fp16", None)
    assert _plan({}).told == ()
    assert "deepspeed" not in sys.modules


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"gradient_accumulation_steps": 4}, 2),
        ({"train_micro_batch_size_per_gpu": 4}, 4),
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, 4),
        ({"gradient_clipping": 1.0, "steps_per_print": 10}, None),
    ],
)
def test_sizes(given, expected):
    assert _plan(given).microbatch_size == expected


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"train_batch_size": 17}, ConfigError, r"expected 16 \(batches of 8 x 2 processes\), found 17"),
        ({"train_micro_batch_size_per_gpu": 3}, ConfigError, "expected a divisor of the batch of 8, found 3"),
        ({"gradient_accumulation_steps": 5}, ConfigError, "expected a divisor of the batch of 8, found 5"),
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4},
            ConfigError,
            r"expected 2 \(batch 8 / microbatch 4\), found 4",
        ),
        ({"optimizer": {"type": "Adam"}}, ConfigError, "optimizer: give it to the Trainer, as optimizers"),
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            ConfigError,
            "expected one of them enabled, found both",
        ),
        ({"zero_optimization": {"stage": 4}}, ConfigError, "stage: expected 0, 1, 2 or 3, found 4"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            ConfigUnsupportedError,
            "offload_optimizer is not",
        ),
        ({"amp": {"enabled": True}}, ConfigUnsupportedError, "amp is not supported"),
        (
            {"fp16": {"enabled": True, "loss_scale": "big"}},
            ConfigError,
            "fp16.loss_scale: expected a number of at least 0",
        ),
        ({"fp16": {"enabled": False, "scale": 2}}, ConfigError, "fp16.scale: unknown; known are enabled, loss_scale"),
        ({"gradient_clipping": "much"}, ConfigError, "expected a number of at least 0"),
        ({"gradient_clipping": float("nan")}, ConfigError, "expected a number of at least 0, found nan"),
        ({"bf16": {"enabled": "false"}}, ConfigError, "bf16.enabled: expected True or False, found .false."),
        (3, ConfigTypeError, "expected a dict, found 3"),
    ],
)
def test_what_cannot_be(given, error, says):
    with pytest.raises(error, match=says):
        _plan(given)


def test_agreement_with_the_precision():
    assert _plan({"bf16": {"enabled": True}}, precision="amp_bf16").precision == "amp_bf16"
    with pytest.raises(
        ConfigError, match="fp16: expected it to agree with precision, found enabled and precision 'fp32'"
    ):
        _plan({"fp16": {"enabled": True}}, precision="fp32")
    with pytest.raises(ConfigError, match="bf16: expected it to agree with precision, found not enabled"):
        _plan({"bf16": {"enabled": False}}, precision="amp_bf16")
    assert _plan({"fp16": {"enabled": False}}).precision == "fp32", "and not what is inferred"
    assert _plan({"fp16": {"enabled": False}}, precision="amp_bf16").precision == "amp_bf16"


def test_a_number_of_steps_needs_a_batch():
    with pytest.raises(ConfigError, match="gradient_accumulation_steps: expected a data loader with a batch_size"):
        _plan({"gradient_accumulation_steps": 4}, batch_size=None)
    assert _plan({"train_micro_batch_size_per_gpu": 4}, batch_size=None).microbatch_size == 4
