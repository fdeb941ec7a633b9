"""Half precision with fp32 masters and a dynamic loss scale, in the shape of scripts with helpers for fp16: clipped, saved, resumed."""

import argparse
import os

import data
import smdistributed.modelparallel.torch as smp
import torch
from models import MODELS


@smp.step
def train_step(model, input_ids, attention_mask):
    with torch.autocast("cpu", enabled=False):
        loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    model.backward(loss)
    return loss


def load(folder, model, optimizer):
    model.load_state_dict(smp.load(os.path.join(folder, "model.pt"), partial=True))
    saved = smp.load(os.path.join(folder, "optimizer.pt"), partial=True)
    optimizer.load_optimizer_backcompat(saved, gather_if_shard=False)


def save(folder, model, optimizer):
    weights = model.local_state_dict()
    states = optimizer.save_optimizer_backcompat(gather_if_shard=False)
    if smp.rdp_rank() == 0:
        smp.save(weights, os.path.join(folder, "model.pt"), partial=True)
    if smp.rdp_rank() == 0 or smp.state.cfg.shard_optimizer_state:
        smp.save(states, os.path.join(folder, "optimizer.pt"), partial=True, v3=smp.state.cfg.shard_optimizer_state)
    smp.barrier()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--first_step", type=int, default=0)
    parser.add_argument("--last_step", type=int, default=6)
    parser.add_argument("--save", type=str, default="")
    parser.add_argument("--load", type=str, default="")
    args, _ = parser.parse_known_args()
    smp.init()
    torch.manual_seed(3)
    with smp.model_creation(tensor_parallelism=smp.tp_size() > 1, dtype=torch.float16):
        module = MODELS["gpt2"]()
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4),
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 2.0**19, "scale_window": 1000, "min_scale": 1, "delayed_shift": 1},
    )
    model.train()
    if args.load:
        load(args.load, model, optimizer)
    for step, (ids, mask) in enumerate(data.tokens(args.last_step, 4, smp.dp_rank(), smp.dp_size())):
        if step < args.first_step:
            continue
        optimizer.zero_grad()
        loss = train_step(model, ids, mask).reduce_mean()
        optimizer.update_master_grads()
        norm = optimizer.clip_master_grads(0.5)
        optimizer.step()
        losses = smp.allgather(loss.item(), smp.DP_GROUP)
        data.report("loss", sum(losses) / len(losses))
        data.report("norm", float(norm))
        data.report("overflow", bool(optimizer.overflow))
        data.report("scale", float(optimizer.loss_scale))
    if args.save:
        save(args.save, model, optimizer)


if __name__ == "__main__":
    main()
