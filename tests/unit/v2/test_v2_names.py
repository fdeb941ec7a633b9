"""Every name of the reference, with the order and the defaults of its arguments, under both import names."""

import importlib
import inspect
import pathlib
import sys

import pytest

import smpc
from smpc.aliasing import VARIABLE

# Module, name, arguments with their defaults as the reference has them; None: only that the name is there.
SAVE = {
    "checkpoint_id": None,
    "storage_writer": None,
    "planner": None,
    "process_group": None,
    "coordinator_rank": 0,
}
ERRORS = {"wait_error_handling": True, "force_check_all_plans": True}
S3 = {"s3_region": None, "s3client_config": None}
EMPTY = inspect.Parameter.empty
GUIDE = pathlib.Path(__file__).parents[3] / "docs" / "smp_v2.md"
CHECKPOINT = "distributed.checkpoint"
TABLE = [
    ("", "init", {"config": None}),
    ("", "is_initialized", {}),
    (
        "",
        "transform",
        {
            "model": EMPTY,
            "device": None,
            "dtype": None,
            "config": None,
            "load_state_dict_from_rank0": False,
            "cp_comm_type": "p2p",
        },
    ),
    ("", "state", None),
    ("state_handler", "state", None),
    ("moe.moe_layer", "MoELayer", None),
    ("distributed.fsdp.fully_sharded_data_parallel", "register_tp_processing_pre_comm_hook", {"model": EMPTY}),
    ("delayed_param", "DelayedParamIniter", {"model": EMPTY, "init_method_using_config": None, "verbose": False}),
    ("delayed_param", "DelayedParamIniter.get_param_init_fn", {"self": EMPTY}),
    ("delayed_param", "DelayedParamIniter.get_post_param_init_fn", {"self": EMPTY}),
    ("delayed_param", "DelayedParamIniter.count_num_params", {"self": EMPTY, "module": EMPTY, "args": EMPTY}),
    ("delayed_param", "DelayedParamIniter.validate_params_and_buffers_inited", {"self": EMPTY, "enabled": True}),
    ("utils.module_utils", "empty_module_params", {"module": EMPTY, "device": None, "recurse": False}),
    ("utils.module_utils", "move_buffers_to_device", {"module": EMPTY, "device": EMPTY, "recurse": False}),
    (
        f"{CHECKPOINT}.state_dict_saver",
        "async_save",
        {"state_dict": EMPTY, **SAVE, "queue": None, "sharded_strategy": None, **ERRORS, **S3},
    ),
    (f"{CHECKPOINT}.state_dict_saver", "save", {"state_dict": EMPTY, **SAVE, **ERRORS, **S3}),
    (f"{CHECKPOINT}.state_dict_saver", "maybe_finalize_async_calls", {"blocking": True, "process_group": None}),
    (f"{CHECKPOINT}.state_dict_saver", "PyTorchDistSaveShardedStrategy", None),
    (f"{CHECKPOINT}.state_dict_saver", "SaveShardedStrategy", None),
    (f"{CHECKPOINT}.state_dict_saver", "DEFAULT_ASYNC_REQUEST_QUEUE", None),
    (
        f"{CHECKPOINT}.state_dict_loader",
        "load",
        {
            "state_dict": EMPTY,
            "checkpoint_id": None,
            "storage_reader": None,
            "planner": None,
            "process_group": None,
            "check_keys_matched": True,
            "coordinator_rank": 0,
            **S3,
        },
    ),
    (f"{CHECKPOINT}.async_utils", "AsyncCallsQueue", {}),
    (f"{CHECKPOINT}.async_utils", "AsyncRequestQueue", {}),
    (f"{CHECKPOINT}.filesystem", "DistributedFileSystemWriter", None),
    (f"{CHECKPOINT}.filesystem", "DistributedFileSystemReader", None),
    (f"{CHECKPOINT}.filesystem", "path_to_file_system", None),
    *(
        (f"{CHECKPOINT}.s3_filesystem", name, None)
        for name in (
            "is_s3_uri",
            "parse_s3_uri",
            "format_s3_path",
            "get_s3_region_from_uri",
            "retry_with_jitter",
            "S3FileSystem",
        )
    ),
    (f"{CHECKPOINT}.state_dict_utils", "sm_state_dict_type", None),
    (f"{CHECKPOINT}.state_dict_utils", "SMStateDictType.SM_LOCAL_STATE_DICT", None),
    (f"{CHECKPOINT}.state_dict_utils", "init_optim_state", {"optimizer": EMPTY, "skip_empty_param": False}),
    ("checkpoint.utils", "limit_num_subdirs", None),
    ("checkpoint.utils", "SORT_BY_LAST_INT", None),
    ("checkpoint.constants", "SMP_IS_PARTIAL_KEY", None),
    ("checkpoint.constants", "SMP_IS_LOAD_INFO_KEY", None),
    (
        "moe.moe_config",
        "MoEConfig",
        {
            "smp_moe": True,
            "random_seed": 12345,
            "moe_load_balancing": "sinkhorn",
            "global_token_shuffle": False,
            "moe_all_to_all_dispatcher": True,
            "moe_aux_loss_coeff": 0.001,
            "moe_z_loss_coeff": 0.001,
            "use_cpu_initialization": False,
        },
    ),
    (
        "nn.attn",
        "FlashSelfAttention",
        {"attention_dropout_prob": 0.0, "scale": None, "triton_flash_attention": False, "use_alibi": False},
    ),
    (
        "nn.attn",
        "FlashSelfAttention.forward",
        {"self": EMPTY, "qkv": EMPTY, "attn_mask": None, "causal": False, "cast_dtype": None, "layout": "b h s d"},
    ),
    ("nn.attn", "FlashGroupedQueryAttention", {"attention_dropout_prob": 0.0, "scale": None}),
    (
        "nn.attn",
        "FlashGroupedQueryAttention.forward",
        {"self": EMPTY, "q": EMPTY, "kv": EMPTY, "causal": False, "cast_dtype": None, "layout": "b s h d"},
    ),
    ("nn.huggingface.llama_flashattn", "LlamaFlashAttention", {"config": EMPTY}),
    ("grad_norm", "clip_grad_norm_", {"model": EMPTY, "max_norm": EMPTY}),
    ("logger", "get_logger", None),
    ("utils.utils", "timeit", None),
    ("utils.process_group_utils", "get_global_ranks", None),
    ("context_parallel.utils", "setup_transformer_engine_cp_groups", {"model": EMPTY, "ranks": EMPTY, "group": EMPTY}),
    ("tensor_parallel.transformer", "TransformerLayer", None),
    ("tensor_parallel.transformer", "TETransformerLayer", None),
]
STATE = (
    *("hybrid_shard_degree", "tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree"),
    *(
        "sm_activation_offloading",
        "rank",
        "world_size",
        "tp_size",
        "tp_rank",
        "tp_process_group",
        "rep_rank_process_group",
    ),
    *("cp_size", "cp_rank", "cp_process_group", "ep_size", "ep_rank", "world_process_group", "ranker"),
    *("get_rng_state_tracker", "reset"),
)


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setenv(VARIABLE, "")


@pytest.mark.parametrize("package", ["smpc.v2", "torch.sagemaker"])
@pytest.mark.parametrize(("module", "name", "arguments"), TABLE)
def test_names_and_signatures(package, module, name, arguments):
    smpc.alias()
    found = importlib.import_module(f"{package}.{module}" if module else package)
    for part in name.split("."):
        found = getattr(found, part)
    if arguments is not None:
        assert {each.name: each.default for each in inspect.signature(found).parameters.values()} == arguments
        assert list(inspect.signature(found).parameters) == list(arguments)


def test_state_has_every_property():
    import smpc.v2 as tsm

    tsm.init()
    try:
        assert [name for name in STATE if not hasattr(tsm.state, name)] == []
    finally:
        tsm.state.reset()


@pytest.mark.parametrize(
    ("module", "name"),
    [("distributed.fsdp", "checkpoint"), (f"{CHECKPOINT}.state_dict_utils", "compute_auto_checkpoint_interval")],
)
def test_what_is_absent_is_documented(module, name):
    smpc.alias()
    found = importlib.import_module(f"torch.sagemaker.{module}")
    with pytest.raises(AttributeError, match=rf"which has no '{name}'; docs/smp_v2\.md says what there is"):
        getattr(found, name)
    (row,) = [line for line in GUIDE.read_text().splitlines() if line.startswith("| not there |")]
    assert name in row
