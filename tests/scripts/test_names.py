"""Every name that public scripts for SMP use, with the arguments that they pass: under the alias all of them are there."""

import json
import os
import subprocess
import sys

import pytest

LIMIT = 240
SMP = "smdistributed.modelparallel.torch"
CONFIG = ["initializer_range", "layernorm_epsilon", "use_normal_initialization", "pre_layernorm", "post_layernorm"]
HEADS = ["num_attention_heads", "attention_head_size", "hidden_size", "attention_dropout_prob", "hidden_dropout_prob"]
LAYER = [*CONFIG, *HEADS]
WHOLE = [*LAYER, "num_layers", "intermediate_size", "activation", "causal_mask_size", "add_cross_attention"]
RANKS = [f"{axis}{kind}" for axis in ("", "mp_", "dp_", "pp_", "tp_", "rdp_", "local_") for kind in ("rank", "size")]
AXES = ("mp", "dp", "pp", "tp", "rdp")
GROUPS = ("WORLD", *(f"{axis.upper()}_GROUP" for axis in AXES))
SHARDED = ("fp32_partitioned_groups_flat", "_global_grad_norm", "fp16_groups", "ds_param_shard_group")
FAMILIES = ("bert", "gpt2", "gptj", "gptneo", "gptneox", "roberta", "t5", "vit")

# What is looked up below the alias, and the arguments that it takes by name; None: no function.
NAMES = {
    "init": ["config"],
    "is_initialized": [],
    "is_tracing": [],
    "step": ["non_split_inputs", "input_split_axes", "detach_outputs"],
    **{name: [] for name in RANKS},
    **{f"get_{axis}_process_group": [] for axis in (*AXES, "world")},
    **{f"get_{axis}_group": [] for axis in AXES},
    "broadcast": ["obj", "group"],
    "recv_from": ["src_rank", "rank_type"],
    "send": ["obj", "dest_rank", "rank_type"],
    "allgather": ["obj", "group"],
    "barrier": ["group"],
    **{f"{axis}_barrier": [] for axis in AXES},
    **dict.fromkeys(GROUPS),
    **{f"CommGroup.{group}": None for group in GROUPS},
    **{f"RankType.{axis}_RANK": None for axis in ("WORLD", *(axis.upper() for axis in AXES))},
    **{f"StepOutput.{name}": [] for name in ("reduce_mean", "reduce_sum", "concat", "stack", "average", "detach")},
    "DistributedModel": [
        "module", "trace_device", "trace_execution_times", "overlapping_allreduce", "backward_passes_per_step",
        "average_grads_across_microbatches", "bucket_cap_mb", "trace_memory_usage", "broadcast_buffers", "gradient_as_bucket_view",
    ],
    "DistributedModel.partitioned": None,
    "DistributedModel.backward": ["tensors", "grad_tensors"],
    **{
        f"DistributedModel.{name}": []
        for name in (
            "local_buffers", "local_named_buffers", "local_parameters", "local_named_parameters", "local_modules", "local_named_modules",
            "local_state_dict", "cpu", "join", "get_module", "distributed_modules", "default_reducer_named_parameters",
            "scaled_batch_reducer_named_parameters",
        )
    },
    "DistributedModel.state_dict": ["gather_to_rank0"],
    "DistributedModel.load_state_dict": ["strict", "same_partition_load"],
    "DistributedModel.register_post_partition_hook": ["hook"],
    "DistributedModel.register_post_step_hook": ["hook"],
    "DistributedModel.register_comm_hook": ["state", "callable"],
    **{f"DistributedModel.is_{kind}_parameter": ["param"] for kind in ("distributed", "scaled_batch")},
    **{f"DistributedModel.is_{kind}_buffer": ["buf"] for kind in ("distributed", "scaled_batch")},
    "DistributedOptimizer": ["optimizer", "static_loss_scale", "dynamic_loss_scale", "dynamic_loss_args"],
    "DistributedOptimizer.state_dict": [],
    "DistributedOptimizer.load_state_dict": [],
    "DistributedOptimizer.local_state_dict": ["gather_if_shard"],
    "DistributedOptimizer.save_optimizer_backcompat": ["gather_if_shard"],
    "DistributedOptimizer.load_optimizer_backcompat": ["state_dict", "gather_if_shard"],
    "DistributedOptimizer.clip_master_grads": ["max_norm"],
    "DistributedOptimizer.update_master_grads": [],
    "DistributedOptimizer.overflow": None,
    "DistributedOptimizer.loss_scale": None,
    **dict.fromkeys(
        f"DistributedOptimizer.{name}" for name in SHARDED
    ),
    "model.DistributedModel": [],
    "state_mod.state": None,
    "state.module_manager.translate_functions": None,
    "utils.get_distribution_axis": ["param"],
    "utils.rmsg": ["msg"],
    "amp.GradScaler": [],
    **{f"optimizers.{name}": [] for name in ("FusedNovoGrad", "FusedLamb", "FusedLAMB")},
    "model_creation": ["tensor_parallelism", "dtype", "distribute_embedding"],
    "partition": ["index"],
    "set_partition": ["module", "index"],
    "delay_param_initialization": ["enabled"],
    "delayed_parameter_initialization": ["enabled"],
    "tensor_parallelism": ["enabled", "attention_dropout_prob"],
    "set_tensor_parallelism": ["module", "enabled", "attention_dropout_prob"],
    "tp_register": ["dist_module", "init_hook", "forward_hook", "return_hook"],
    "tp_register_with_module": ["module_cls", "dist_module", "init_hook", "forward_hook", "return_hook"],
    "set_activation_checkpointing": ["module", "preserve_rng_state", "pack_args_as_tuple", "strategy"],
    "patches.checkpoint.checkpoint": ["module", "preserve_rng_state"],
    "patches.checkpoint.checkpoint_sequential": ["sequential_module", "input", "strategy", "preserve_rng_state", "pack_args_as_tuple"],
    "save": ["obj", "f", "partial", "v3", "pickle_module", "pickle_protocol"],
    "load": ["f", "map_location", "partial", "back_compat", "pickle_module"],
    "save_checkpoint": [
        "path", "tag", "partial", "model", "optimizer", "user_content", "translate_if_full", "num_kept_partial_checkpoints",
    ],
    "resume_from_checkpoint": [
        "path", "tag", "partial", "strict", "load_optimizer", "load_sharded_optimizer_state", "translate_function",
    ],
    "nn.DistributedModule": [],
    "nn.DistributedLinear": ["in_features", "out_features"],
    "nn.DistributedEmbedding": [
        "num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse", "_weight",
        "initializer_range", "_skip_allgather", "_skip_scatter_and_merge",
    ],
    "nn.DistributedTransformerLMHead": [*WHOLE, "vocab_size", "num_positions", "num_token_types", "add_lm_head"],
    "nn.DistributedTransformer": WHOLE,
    "nn.DistributedTransformerLayer": [name for name in WHOLE if name != "num_layers"],
    "nn.DistributedAttentionLayer": [*LAYER, "cross_attention", "causal_mask_size"],
    "nn.DistributedTransformerOutputLayer": [*CONFIG, "hidden_size", "intermediate_size", "hidden_dropout_prob", "activation"],
    "nn.FlashAttentionLayer": [
        "attention_dropout_prob", "attention_head_size", "scale_attention_scores", "scale_attn_by_layer_idx", "layer_idx", "scale",
        "triton_flash_attention", "use_alibi",
    ],
    "nn.FlashAttentionLayer.forward": ["qkv", "attn_mask", "causal"],
    "nn.FusedLayerNorm": ["normalized_shape", "eps", "elementwise_affine"],
    **{f"nn.huggingface.{family}.translate_hf_state_dict_to_smdistributed": ["state_dict"] for family in FAMILIES},
    **{f"nn.huggingface.{family}.translate_hf_state_dict_to_smdistributed_{family}": ["state_dict"] for family in FAMILIES},
    **{f"nn.huggingface.{family}.translate_hf_{family}_state_dict_to_smdistributed": ["state_dict"] for family in FAMILIES},
    **{f"nn.huggingface.{family}.translate_state_dict_to_hf": ["state_dict", "max_seq_len"] for family in FAMILIES},
    **{f"nn.huggingface.{family}.translate_state_dict_to_hf_{family}": ["state_dict", "max_seq_len"] for family in FAMILIES},
    **{f"nn.huggingface.{family}.get_hf_{family}_transformer_layer_hooks": [] for family in FAMILIES},
    "nn.huggingface.gpt2.translate_hf_block_state_dict_to_smdistributed": ["state_dict"],
    "nn.huggingface.gpt2.translate_layer_state_dict_to_hf_gpt2_block": ["state_dict"],
}  # fmt: skip

LOOK = f"""
import functools, importlib, inspect, json, sys
def find(name):
    "The object, by import of the longest module of its name; as `from x import y` finds it."
    parts = name.split(".")
    for count in range(len(parts), -1, -1):
        try:
            module = importlib.import_module(".".join(["{SMP}", *parts[:count]]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[count:], module)
def arguments(found):
    parameters = inspect.signature(found).parameters.values()
    return [p.name for p in parameters] + ["*"] * any(p.kind is p.VAR_KEYWORD for p in parameters)
wrong = []
for name, wanted in json.loads(sys.argv[1]):
    try:
        found = find(name)
        known = [] if wanted is None else arguments(found)
    except AttributeError as error:
        wrong.append(str(error))
        continue
    missing = [each for each in wanted or () if each not in known and "*" not in known]
    wrong += [f"{{name}}({{', '.join(missing)}})"] if missing else []
print(json.dumps(wrong))
"""


@pytest.fixture(scope="module")
def missing():
    """What one process misses under the alias: first of the names above, then of two that are not there."""
    names = [*NAMES.items(), ("nn.DistributedConv", None), ("save", ["object", "f"])]
    environ = {**os.environ, "SMPC_ALIAS": "1", "OMP_NUM_THREADS": "1"}
    start = "import smpc; smpc.alias()\n"
    command = [sys.executable, "-P", "-c", start + LOOK, json.dumps(names)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environ, check=False)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def test_every_name_and_argument_of_public_scripts_is_there(missing):
    assert missing[:-2] == []


def test_what_is_missing_is_named(missing):
    layer, argument = missing[-2:]
    assert "DistributedConv" in layer
    assert "save(object)" in argument
