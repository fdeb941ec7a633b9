"""Other families of Hugging Face's with distributed layers, and a layer of one's own that is registered; in the shape of their scripts."""

import argparse

import data
import smdistributed.modelparallel.torch as smp
import torch
from models import MODELS, Mine, MineConfig

SAVED_AFTER = 1  # step


@smp.step
def train_step(model, input_ids, attention_mask):
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    model.backward(loss)
    return loss


def register_mine():
    """A block of a model that nobody knows, as the transformer layer that does the same."""

    def init_hook(config, index):
        return (), {
            "num_attention_heads": config.heads,
            "attention_head_size": config.width // config.heads,
            "hidden_size": config.width,
            "intermediate_size": 4 * config.width,
            "attention_dropout_prob": 0.0,
            "hidden_dropout_prob": 0.0,
            "activation": "relu",
            "pre_layernorm": True,
            "post_layernorm": False,
            "causal_mask_size": config.positions,
        }

    def forward_hook(hidden, mask):
        return ((hidden, mask),), {}

    smp.tp_register_with_module(
        Mine.Block,
        smp.nn.DistributedTransformerLayer,
        init_hook,
        forward_hook,
        lambda found: found[0],
        Mine.Block.names,
    )


def layers_of(model, name):
    inner = model.get_module()
    if name == "t5":
        return [inner.encoder.seq_layers, inner.decoder.seq_layers]
    return [inner.blocks if name == "mine" else inner.transformer.seq_layers]


def save(args, model, optimizer):
    """A partial checkpoint with the optimizer, then the full model alone."""
    both = {"path": args.checkpoints, "model": model, "user_content": {"steps": SAVED_AFTER}}
    smp.save_checkpoint(tag="steps", optimizer=optimizer, num_kept_partial_checkpoints=1, **both)
    smp.save_checkpoint(tag="fullmodel.pt", partial=False, **both)


def resume(args):
    """The number of steps that are done; of a full model it is a new beginning."""
    if args.load == "full":
        smp.resume_from_checkpoint(args.checkpoints, tag="fullmodel.pt", partial=False)
    elif args.load:
        return smp.resume_from_checkpoint(args.checkpoints, partial=True)["steps"]
    return 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_type", type=str, default="gptneox")
    parser.add_argument("--tensor_parallel_degree", type=int, default=1)
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--num_microbatches", type=int, default=2)
    parser.add_argument("--checkpoints", type=str, default="")
    parser.add_argument("--load", type=str, default="")
    args, _ = parser.parse_known_args()
    smp.init(
        {
            "partitions": args.partitions,
            "tensor_parallel_degree": args.tensor_parallel_degree,
            "microbatches": args.num_microbatches,
            "ddp": 1,
            "optimize": "memory",
        }
    )
    torch.manual_seed(3)
    if args.model_type == "mine":
        register_mine()
    with smp.model_creation(tensor_parallelism=True):
        module = Mine(MineConfig()) if args.model_type == "mine" else MODELS[args.model_type]()
    model = smp.DistributedModel(module)
    for layers in layers_of(model, args.model_type):
        smp.set_activation_checkpointing(layers, strategy="each")
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5))
    model.train()
    axes = {smp.utils.get_distribution_axis(p) for p in model.parameters()}
    data.report("axes", sorted(axis for axis in axes if axis is not None))
    data.report("translations", len(smp.state_mod.state.module_manager.translate_functions))
    done = resume(args)
    for step, (ids, mask) in enumerate(data.tokens(3, 4, smp.dp_rank(), smp.dp_size())):
        if step < done:
            continue
        optimizer.zero_grad()
        loss = train_step(model, ids, mask).reduce_mean()
        optimizer.step()
        losses = smp.allgather(loss.item(), smp.DP_GROUP)
        data.report("loss", sum(losses) / len(losses))
        if args.checkpoints and not args.load and step + 1 == SAVED_AFTER:
            save(args, model, optimizer)
    if smp.rank() == 0:
        print(smp.utils.rmsg("done"))


if __name__ == "__main__":
    main()
