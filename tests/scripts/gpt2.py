"""GPT-2 of Hugging Face's with tensor parallelism or a pipeline, in the shape of the long example scripts: everything by arguments."""

import argparse
import os

import data
import smdistributed.modelparallel
import smdistributed.modelparallel.torch as smp
import torch
from smdistributed.modelparallel.torch.nn import FusedLayerNorm
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import (
    translate_hf_state_dict_to_smdistributed,
    translate_state_dict_to_hf_gpt2,
)
from transformers import GPT2Config, GPT2LMHeadModel


def smp_options(args):
    options = {
        "ddp": True,
        "tensor_parallel_degree": args.tensor_parallel_degree,
        "pipeline_parallel_degree": args.pipeline_parallel_degree,
        "microbatches": args.num_microbatches,
        "shard_optimizer_state": args.shard_optimizer_state > 0,
        "prescaled_batch": args.prescaled_batch > 0,
        "_match_weights": args.match_weights > 0,
        "offload_activations": args.offload_activations > 0,
        "optimize": args.optimize,
        "auto_partition": True,
        "default_partition": 0,
        "static_mode": args.static_mode > 0,
        "fast_mode": args.fast_mode > 0,
        "fp16": args.fp16 > 0,
        "sharded_data_parallel_degree": args.sharded_data_parallel_degree,
        "sdp_reduce_bucket_size": int(5e8),
        "sdp_param_persistence_threshold": int(1e6),
        "sdp_max_live_parameters": int(1e9),
        "sdp_hierarchical_allgather": args.sdp_hierarchical_allgather > 0,
        "sdp_gradient_clipping": args.grad_clip,
    }
    if args.active_microbatches is not None:
        options["active_microbatches"] = args.active_microbatches
    return options


@smp.step
def train_step(model, optimizer, input_ids, attention_mask, args):
    if args.fp16 > 0:
        with torch.autocast("cpu", enabled=False):
            loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    else:
        loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    model.backward(loss)
    return loss


@smp.step
def test_step(model, input_ids, attention_mask):
    return model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]


def param_groups(model):
    """Norms and biases do not decay; norms are known by their classes."""
    norms = (torch.nn.LayerNorm, FusedLayerNorm, smp.nn.FusedLayerNorm)
    with_decay, without = {"params": []}, {"params": [], "weight_decay": 0.0}
    seen = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            is_exempt = isinstance(module, norms) or name.endswith("bias") or parameter.dim() < 2
            (without if is_exempt else with_decay)["params"].append(parameter)
    return with_decay, without


def make_model(args):
    config = GPT2Config(
        vocab_size=61,
        n_positions=16,
        n_embd=16,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    with smp.model_creation(
        tensor_parallelism=smp.tp_size() > 1 or args.use_distributed_transformer > 0,
        dtype=torch.float16 if args.fp16 > 0 else torch.get_default_dtype(),
    ):
        model = GPT2LMHeadModel(config)
    return config, smp.DistributedModel(model, trace_device="gpu", gradient_as_bucket_view=True)


def learning_rate(args):
    return lambda step: min(1.0, (step + 1) / (args.warmup + 1))


def save(args, name, model, optimizer, scheduler, config, losses):
    content = {
        "cli_args": args.__dict__,
        "num_params": sum(p.numel() for p in model.parameters()),
        "total_steps": len(losses),
        "model_config": config,
        "lr_scheduler": scheduler.state_dict(),
    }
    smp.save_checkpoint(
        args.checkpoint_dir,
        tag=name,
        partial=args.save_full == 0,
        model=model,
        optimizer=optimizer if args.save_full == 0 else None,
        user_content=content,
        num_kept_partial_checkpoints=2 if args.save_full == 0 else None,
    )


def resume(args, scheduler):
    """The number of steps that are done."""
    start = 0
    if args.load_full:
        smp.resume_from_checkpoint(
            args.checkpoint_dir,
            tag=args.load_full,
            partial=False,
            load_optimizer=False,
            translate_function=translate_hf_state_dict_to_smdistributed,
        )
    elif args.load_partial:
        content = smp.resume_from_checkpoint(args.checkpoint_dir, partial=True)
        start = content["total_steps"]
        scheduler.load_state_dict(content["lr_scheduler"])
        assert content["cli_args"]["lr"] == args.lr
    return start


def finish(args, model, device):
    model.eval()
    with torch.no_grad():
        for ids, mask in data.tokens(1, args.train_batch_size, 0, 1, seed=77):
            data.report("test loss", test_step(model, ids.to(device), mask.to(device)).reduce_mean().item())
    if args.export:
        full = model.state_dict(gather_to_rank0=True) if smp.rdp_rank() == 0 else None
        if smp.rank() == 0:
            names = translate_state_dict_to_hf_gpt2(full, max_seq_len=None)
            smp.save(names, os.path.join(args.export, "pytorch_model.bin"), partial=False)
    smp.barrier()
    if smp.rank() == 0:
        print("SMP training finished successfully")


def main(args):
    assert [int(part) for part in smdistributed.modelparallel.__version__.split(".")] >= [1, 10]
    smp.init(smp_options(args))
    assert args.micro_batch == 0 or smp.state.cfg.microbatches == args.num_microbatches
    if smp.rank() == 0:
        data.report("sizes", [smp.size(), smp.dp_size(), smp.pp_size(), smp.tp_size(), smp.rdp_size()])
    torch.manual_seed(args.seed)
    device = torch.device("cuda", smp.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    config, model = make_model(args)
    inner = model.get_module()
    if args.activation_checkpointing:
        layers = (
            inner.transformer.seq_layers
            if args.use_distributed_transformer or smp.tp_size() > 1
            else inner.transformer.h
        )
        smp.set_activation_checkpointing(layers, pack_args_as_tuple=True, strategy=args.activation_strategy)

    base = torch.optim.AdamW(param_groups(inner), lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay)
    optimizer = smp.DistributedOptimizer(base, static_loss_scale=None, dynamic_loss_scale=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, learning_rate(args))
    start = resume(args, scheduler)
    losses = []
    model.train()
    rank, size = (smp.rdp_rank(), smp.rdp_size()) if args.prescaled_batch else (smp.dp_rank(), smp.dp_size())
    for step, (ids, mask) in enumerate(data.tokens(args.max_steps, args.train_batch_size, rank, size)):
        if step < start:
            losses.append(None)
            continue
        optimizer.zero_grad(set_to_none=True)
        loss_mb = train_step(model, optimizer, ids.to(device), mask.to(device), args)
        loss = loss_mb.reduce_mean()
        optimizer.update_master_grads() if args.fp16 > 0 else None
        if args.fp16 > 0:
            optimizer.clip_master_grads(args.grad_clip)
        elif args.grad_clip > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        optimizer.step()
        if not (args.fp16 > 0 and optimizer.overflow):
            scheduler.step()
        group = smp.CommGroup.RDP_GROUP if args.prescaled_batch else smp.CommGroup.DP_GROUP
        gathered = smp.allgather(loss.item(), group)
        losses.append(sum(gathered) / len(gathered))
        data.report("loss", losses[-1])
        if args.checkpoint_dir and (step + 1) % args.checkpoint_freq == 0:
            save(args, f"trained_gpt-{step + 1}steps", model, optimizer, scheduler, config, losses)

    finish(args, model, device)


def parse_args():
    parser = argparse.ArgumentParser()
    for name, default in (
        ("max_steps", 4),
        ("train_batch_size", 4),
        ("num_microbatches", 2),
        ("micro_batch", 1),
        ("active_microbatches", None),
        ("tensor_parallel_degree", 1),
        ("pipeline_parallel_degree", 1),
        ("sharded_data_parallel_degree", 1),
        ("sdp_hierarchical_allgather", 0),
        ("shard_optimizer_state", 0),
        ("prescaled_batch", 0),
        ("offload_activations", 0),
        ("activation_checkpointing", 1),
        ("use_distributed_transformer", 1),
        ("match_weights", 0),
        ("static_mode", 0),
        ("fast_mode", 0),
        ("fp16", 0),
        ("seed", 12345),
        ("warmup", 2),
        ("checkpoint_freq", 2),
        ("save_full", 0),
        ("load_partial", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, number in (("lr", 0.01), ("weight_decay", 0.1), ("grad_clip", 1.0)):
        parser.add_argument(f"--{name}", type=float, default=number)
    for name, text in (
        ("optimize", "speed"),
        ("activation_strategy", "each"),
        ("checkpoint_dir", ""),
        ("load_full", ""),
        ("export", ""),
    ):
        parser.add_argument(f"--{name}", type=str, default=text)
    return parser.parse_known_args()[0]


if __name__ == "__main__":
    main(parse_args())
