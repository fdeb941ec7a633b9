"""The fields of `fsdp_config`: what cannot be, all at once; degrees; precisions."""

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from smpc.errors import ConfigError, ConfigTypeError, ConfigUnsupportedError
from smpc.fsdp import FSDPConfig, MixedPrecision

SEED = {
    "activation_checkpointing": True, "activation_checkpointing_reentrant": True, "activation_cpu_offload": False,
    "backward_prefetch": "BACKWARD_POST", "cpu_offload": False, "flatten_parameters": True, "forward_prefetch": False,
    "ignored_modules": None, "keep_low_precision_grads": False, "limit_all_gathers": False, "load_monolith_rank0_only": False,
    "load_planner": None, "mixed_precision": "DEFAULT", "save_planner": None, "sharded_ckpt_prefix_dir": "ep{epoch}-ba{batch}",
    "sharding_strategy": "FULL_SHARD", "state_dict_type": "full", "sync_module_states": False, "use_orig_params": True, "verbose": False,
}  # fmt: skip


def test_all_fields_of_the_documentation():
    config = FSDPConfig.read(SEED)
    assert config.activation_checkpointing
    assert len(config.told) == 5, "four fields mean nothing, and BACKWARD_POST is done as PRE"
    assert FSDPConfig.read({}) == FSDPConfig()


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (
            {"shard_strategy": "FULL_SHARD"},
            ConfigError,
            "unknown field 'shard_strategy'; did you mean sharding_strategy?",
        ),
        ({"device_mesh": 1}, ConfigError, "give data_parallel_shard_degree"),
        ({"sharding_strategy": "HALF"}, ConfigError, "expected one of FULL_SHARD, SHARD_GRAD_OP"),
        ({"sharding_strategy": 1}, ConfigTypeError, "sharding_strategy: expected str, found 1"),
        ({"ignored_modules": 5}, ConfigTypeError, "ignored_modules: expected a list of modules, found 5"),
        (
            {"ignored_modules": ["head"]},
            ConfigTypeError,
            r"ignored_modules: expected a list of modules, found \['head'\]",
        ),
        ({"verbose": 1}, ConfigTypeError, "verbose: expected bool, found 1"),
        ({"keep_low_precision_grads": True}, ConfigUnsupportedError, "gradients stay fp32"),
        ({"state_dict_type": "local"}, ConfigError, "local is deprecated, use sharded"),
        ({"backward_prefetch_limit": 0}, ConfigError, "expected at least 1, found 0"),
        ({"data_parallel_shard_degree": True}, ConfigTypeError, "expected int"),
        ({"mixed_precision": "SOME"}, ConfigError, "expected FULL, DEFAULT, PURE or a dict"),
        ({"mixed_precision": {"param_dtype": "fp8"}}, ConfigError, "param_dtype: expected fp32, fp16, bf16"),
        (
            {"process_group": "node", "data_parallel_shard_degree": 2},
            ConfigError,
            "process_group: expected none beside",
        ),
        ({"load_monolith_rank0_only": True}, ConfigError, "expected state_dict_type full and sync_module_states True"),
        (
            {"save_planner": object()},
            ConfigTypeError,
            "save_planner: expected a torch.distributed.checkpoint.SavePlanner",
        ),
        ({"load_planner": DefaultLoadPlanner()}, ConfigError, "load_planner: expected state_dict_type sharded"),
        ({"auto_wrap": False, "activation_checkpointing": True}, ConfigError, "expected auto_wrap True"),
        ({"auto_wrap": False, "mixed_precision": "PURE"}, ConfigError, "mixed_precision: expected auto_wrap True"),
        ({"auto_wrap": False, "cpu_offload": True}, ConfigError, "cpu_offload: expected auto_wrap True"),
        ([], ConfigTypeError, "expected a dict"),
    ],
)
def test_fields_that_cannot_be(given, error, says):
    with pytest.raises(error, match=says):
        FSDPConfig.read(given)


def test_all_mistakes_in_one_error():
    with pytest.raises(ConfigError) as caught:
        FSDPConfig.read(
            {"verbos": True, "te_checkpoint_wrapper": True, "sharding_strategy": "x", "forward_prefetch": "yes"}
        )
    assert len(str(caught.value).splitlines()) == 4


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (1, 8)),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, (1, 8)),
        ({"sharding_strategy": "NO_SHARD"}, (8, 1)),
        ({"sharding_strategy": "HYBRID_SHARD"}, (2, 4)),
        ({"sharding_strategy": "hybrid_shard", "data_parallel_shard_degree": 2}, (4, 2)),
        ({"data_parallel_replicate_degree": 2}, (2, 4)),
        ({"data_parallel_replicate_degree": -1, "data_parallel_shard_degree": 2}, (4, 2)),
        ({"data_parallel_replicate_degree": 4, "data_parallel_shard_degree": 2}, (4, 2)),
    ],
)
def test_degrees(given, expected):
    assert FSDPConfig.read(given).degrees(8, 4) == expected


@pytest.mark.parametrize(
    "given",
    [
        {"data_parallel_shard_degree": 3},
        {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2},
        {"data_parallel_replicate_degree": 16},
    ],
)
def test_degrees_that_do_not_fit(given):
    with pytest.raises(ConfigError, match="= 8 processes, found"):
        FSDPConfig.read(given).degrees(8, 4)


def test_precisions():
    low, full = torch.bfloat16, torch.float32
    assert MixedPrecision.of("FULL", "amp_bf16") == MixedPrecision(full, full, full)
    assert MixedPrecision.of("default", "amp_bf16") == MixedPrecision(low, full, low)
    assert MixedPrecision.of("PURE", "amp_bf16") == MixedPrecision(low, low, low)
    assert MixedPrecision.of("DEFAULT", "fp32") == MixedPrecision.of("FULL", "fp32") == MixedPrecision(full, full, None)
    assert MixedPrecision.of({"param_dtype": "fp16"}, "fp32") == MixedPrecision(torch.float16, full, None)
    assert MixedPrecision.of({"buffer_dtype": "bf16"}, "fp32") == MixedPrecision(full, full, low)
