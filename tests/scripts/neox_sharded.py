"""GPT-NeoX of Hugging Face's under sharded data parallelism, with tensor parallelism or without, by the names that such scripts read."""

import argparse
import math

import data
import smdistributed.modelparallel.torch as smp
import torch
import torch.distributed as dist
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM


@smp.step
def forward_backward(model, ids, mask):
    loss = model(input_ids=ids, attention_mask=mask, labels=ids)["loss"]
    model.backward(loss)
    return loss


@smp.step
def evaluate(model, ids, mask):
    return model(input_ids=ids, attention_mask=mask, labels=ids)["loss"]


def count(model):
    """Elements of the whole model: parameters in parts know their whole shape."""
    seen, total = set(), 0
    for parameter in model.parameters():
        if parameter not in seen:
            seen.add(parameter)
            total += math.prod(parameter.ds_shape) if hasattr(parameter, "ds_shape") else parameter.numel()
    return total


def held(model):
    """What this rank holds, padding included."""
    return sum(p.ds_tensor.ds_numel if hasattr(p, "ds_tensor") else p.numel() for p in model.parameters())


def weight_norm(optimizer):
    """Of all that is updated, over the ranks that have the other parts."""
    squares = sum(flat.float().square().sum() for flat in optimizer.fp32_partitioned_groups_flat)
    dist.all_reduce(squares, group=optimizer.fp16_groups[0][0].ds_param_shard_group)
    return squares.sqrt().item()


def groups_of(model):
    decays = [p for name, p in model.named_parameters() if p.dim() > 1 and "bias" not in name]
    others = [p for name, p in model.named_parameters() if not (p.dim() > 1 and "bias" not in name)]
    return [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def make(args):
    torch.manual_seed(args.seed)
    config = GPTNeoXConfig(
        vocab_size=61, hidden_size=16, num_hidden_layers=3, num_attention_heads=4, intermediate_size=32, use_cache=False,
        max_position_embeddings=16, bos_token_id=0, eos_token_id=0, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    with smp.model_creation(tensor_parallelism=smp.tp_size() > 1, dtype=torch.get_default_dtype()):
        model = GPTNeoXForCausalLM(config)
    model = smp.DistributedModel(model, trace_device="gpu", backward_passes_per_step=1)
    if args.activation_checkpointing:
        inner = model.get_module().gpt_neox
        for layer in inner.layers if smp.tp_size() == 1 else inner.seq_layers:
            smp.set_activation_checkpointing(layer)
    return model


def main(args):
    smp.init(
        {
            "ddp": True,
            "tensor_parallel_degree": args.tensor_parallel_degree,
            "pipeline_parallel_degree": 1,
            "microbatches": 2,
            "prescaled_batch": args.prescaled_batch > 0,
            "sharded_data_parallel_degree": args.sharded_data_parallel_degree,
            "sdp_reduce_bucket_size": int(5e8),
            "sdp_param_persistence_threshold": args.threshold,
            "sdp_max_live_parameters": args.live,
            "sdp_hierarchical_allgather": False,
            "sdp_gradient_clipping": args.clip,
            "bf16": args.bf16 > 0,
        }
    )
    model = make(args)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(groups_of(model), lr=0.01, betas=(0.9, 0.95)))
    start = 0
    if args.load:
        start = smp.resume_from_checkpoint(args.checkpoints, partial=True)["steps"]
    data.report("parameters", count(model))
    data.report("held", held(model))
    rank, size = (smp.rdp_rank(), smp.rdp_size()) if args.prescaled_batch else (smp.dp_rank(), smp.dp_size())
    for step, (ids, mask) in enumerate(data.tokens(args.steps, 4, rank, size)):
        if step < start:
            continue
        optimizer.zero_grad(set_to_none=True)
        loss = forward_backward(model, ids, mask).reduce_mean()
        optimizer.step()
        everybody = smp.allgather(loss.item(), smp.CommGroup.DP_GROUP)
        data.report("loss", sum(everybody) / len(everybody))
        data.report("norm", float(optimizer._global_grad_norm))
        data.report("weights", weight_norm(optimizer))
        if args.checkpoints and step == 1 and not args.load:
            smp.save_checkpoint(
                args.checkpoints, tag="two", model=model, optimizer=optimizer, user_content={"steps": 2}
            )
    model.eval()
    with torch.no_grad():
        for ids, mask in data.tokens(1, 4, 0, 1, seed=77):
            data.report("test loss", evaluate(model, ids, mask).reduce_mean().item())


def parse_args():
    parser = argparse.ArgumentParser()
    numbers = {
        "steps": 4,
        "seed": 12345,
        "tensor_parallel_degree": 1,
        "sharded_data_parallel_degree": 2,
        "prescaled_batch": 0,
    }
    flags = {"activation_checkpointing": 1, "load": 0, "bf16": 0, "threshold": 1000, "live": 1000}
    for name, default in (numbers | flags).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--checkpoints", default="")
    return parser.parse_known_args()[0]


if __name__ == "__main__":
    main(parse_args())
