"""A training script for SMP v2: one Hugging Face model, FSDP around it, checkpoints; what `torch.sagemaker` has is used by its own names.

    python v2_train.py --family llama --fsdp 1 --kind sharded --is-async --delayed --offload --folder /tmp/run --steps 4
    python v2_train.py --family mixtral --expert-parallel-degree 2 --hybrid-shard-degree 2 --balancing aux_loss

Ranks that share a model have the same batch of every step, the others one of their own; losses are averaged over all ranks. Of sequences
that several ranks share the script cuts each rank's part.
"""

import argparse
import contextlib
import functools

import torch
import torch.distributed as dist
import transformers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
FAMILIES = {
    "llama": ("Llama", {"intermediate_size": 32, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "gpt_neox": ("GPTNeoX", {"intermediate_size": 32, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "mixtral": ("Mixtral", {"intermediate_size": 32, "num_key_value_heads": 2, "num_local_experts": 4}),
}
DEGREES = {
    "hybrid_shard_degree": 0,
    "tensor_parallel_degree": 1,
    "context_parallel_degree": 1,
    "expert_parallel_degree": 1,
}
BATCH, LENGTH = 2, 12


def build(family):
    """The model, and the class of its layers."""
    name, options = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**SMALL, **options)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    layer = next(
        type(module) for module in model.modules() if type(module).__name__.endswith(("DecoderLayer", f"{name}Layer"))
    )
    return model, layer


def experts_of(arguments):
    """What `transform` is told of experts."""
    from torch.sagemaker.moe.moe_config import MoEConfig

    if not arguments.balancing:
        return None
    return MoEConfig(moe_load_balancing=arguments.balancing, moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.01)


def make(arguments, tsm):
    """The model as it is trained: delayed, transformed, wrapped, checkpointed and offloaded."""
    from torch.sagemaker.delayed_param import DelayedParamIniter

    torch.manual_seed(3)
    with torch.device("meta") if arguments.delayed else contextlib.nullcontext():
        model, layer = build(arguments.family)
    model.config.use_cache = False
    model = tsm.transform(model, config=experts_of(arguments))
    initer = DelayedParamIniter(model)
    functions = {}
    if arguments.delayed and arguments.fsdp == 1:
        functions = {"param_init_fn": initer.get_param_init_fn(), "post_param_init_fn": initer.get_post_param_init_fn()}
    with initer.validate_params_and_buffers_inited(enabled=arguments.delayed):
        if arguments.delayed and arguments.fsdp != 1:
            for module in model.modules():
                initer.get_param_init_fn()(module)
            initer.get_post_param_init_fn()()
        model = wrap(arguments, model, layer, functions)
    if arguments.offload:
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda module: isinstance(module, layer)
        )
    return model


def wrap(arguments, model, layer, functions):
    if arguments.fsdp == 1:
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={layer})
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=policy,
            device_id=torch.device("cpu"),
            use_orig_params=arguments.kind == "full",
            **functions,
        )
    if arguments.fsdp == 2:
        for module in model.modules():
            if isinstance(module, layer):
                fully_shard(module)
        fully_shard(model)
    return model


def batch(step, number):
    """The tokens of a group of ranks that share a model, of this number."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    return torch.randint(0, SMALL["vocab_size"], (BATCH, LENGTH), generator=generator)


def own_batch(tsm, step):
    """This rank's tokens: of a sequence that several ranks share a chunk from the front and one from the back."""
    ids = batch(step, tsm.state.rank // (tsm.state.tp_size * tsm.state.cp_size))
    if tsm.state.cp_size == 1:
        return ids
    chunks = ids.chunk(2 * tsm.state.cp_size, dim=1)
    return torch.cat([chunks[tsm.state.cp_rank], chunks[2 * tsm.state.cp_size - 1 - tsm.state.cp_rank]], dim=1)


def train(arguments, tsm, model, optimizer, first, last):
    """Losses of the steps, averaged over ranks."""
    from torch.sagemaker.grad_norm import clip_grad_norm_

    runs = offload_wrapper(model) if arguments.offload else model
    losses = []
    for step in range(first, last):
        optimizer.zero_grad()
        ids = own_batch(tsm, step)
        loss = runs(input_ids=ids, labels=ids, attention_mask=None).loss
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=tsm.state.world_process_group)
        losses.append(mean.item() / tsm.state.world_size)
    return losses


def options(kind, loading):
    return StateDictOptions(full_state_dict=True, cpu_offload=not loading) if kind == "full" else StateDictOptions()


def place_of(arguments, tsm):
    own = f"tp{tsm.state.tp_rank}_ep{tsm.state.ep_rank}_fsdp{tsm.state.rank}"
    return f"{arguments.folder}/{own}" if arguments.kind == "local" else arguments.folder


def local_state(model):
    from torch.sagemaker.distributed.checkpoint.state_dict_utils import SMStateDictType, sm_state_dict_type

    return sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT)


def save(arguments, tsm, model, optimizer, step):
    from torch.sagemaker.distributed.checkpoint import state_dict_saver as saver

    with local_state(model) if arguments.kind == "local" else contextlib.nullcontext():
        if arguments.kind == "local":
            found = model.state_dict(), optimizer.state_dict()
        else:
            found = get_state_dict(model, optimizer, options=options(arguments.kind, False))
    state = {"model": found[0], "optimizer": found[1], "step": step}
    if not arguments.is_async:
        saver.save(state, checkpoint_id=place_of(arguments, tsm))
        return
    saver.async_save(state, checkpoint_id=place_of(arguments, tsm))


def resume(arguments, tsm, model, optimizer):
    """The step that the checkpoint was saved at."""
    from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
    from torch.sagemaker.distributed.checkpoint.state_dict_utils import init_optim_state

    if arguments.kind == "local":
        init_optim_state(optimizer, skip_empty_param=True)
        with local_state(model):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
            load(state, checkpoint_id=place_of(arguments, tsm))
            model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return state["step"]
    found = get_state_dict(model, optimizer, options=options(arguments.kind, True))
    state = {"model": found[0], "optimizer": found[1], "step": 0}
    load(state, checkpoint_id=place_of(arguments, tsm))
    chosen = options(arguments.kind, True)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=chosen
    )
    return state["step"]


def main(given=None):
    import torch.sagemaker as tsm
    from torch.sagemaker.distributed.checkpoint.state_dict_saver import maybe_finalize_async_calls

    parser = argparse.ArgumentParser()
    parser.add_argument("--family", choices=FAMILIES, default="llama")
    parser.add_argument("--fsdp", type=int, default=1)
    parser.add_argument("--kind", choices=("full", "sharded", "local"), default="sharded")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--balancing", choices=("aux_loss", "sinkhorn", "balanced", "none"))
    for name, default in DEGREES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--folder", default="")
    for flag in ("--is-async", "--delayed", "--offload", "--resume"):
        parser.add_argument(flag, action="store_true")
    arguments = parser.parse_args(given)
    if not dist.is_initialized() and arguments.fsdp:
        dist.init_process_group("gloo")
    tsm.init({name: getattr(arguments, name) for name in DEGREES} | {"activation_loading_horizon": 1})
    model = make(arguments, tsm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = resume(arguments, tsm, model, optimizer) if arguments.resume else 0
    losses = train(arguments, tsm, model, optimizer, first, arguments.steps)
    if arguments.folder and not arguments.resume:
        save(arguments, tsm, model, optimizer, arguments.steps)
        for parameter in model.parameters():
            parameter.data.zero_()  # what is saved is what was there when it was called
        maybe_finalize_async_calls(blocking=True)
    if tsm.state.rank == 0:
        print("losses", *losses, flush=True)
    return losses


if __name__ == "__main__":
    main()
