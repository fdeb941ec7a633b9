"""The training of trainer.py in plain PyTorch: the losses of its steps, then of its evaluation, one a line.

The only argument: on how many shards of the data.
"""

import sys

import data
import torch
from models import MODELS

STEPS, BATCH = 4, 4


def order_of(ids, num_shards):
    """The indices of samples as the Trainer's samplers draw them: a shard has every num_shards-th."""
    generator = torch.Generator().manual_seed(7)
    if num_shards == 1:
        return [list(torch.utils.data.RandomSampler(ids, generator=generator))]
    drawn = torch.randperm(len(ids), generator=generator).tolist()
    return [drawn[shard::num_shards] for shard in range(num_shards)]


def main(num_shards):
    torch.manual_seed(3)
    model = MODELS["gpt2"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    [(ids, _)] = data.tokens(1, 32, 0, 1)
    shards = order_of(ids, num_shards)
    for step in range(STEPS):
        batch = ids[[index for order in shards for index in order[BATCH * step : BATCH * (step + 1)]]]
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch)["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(loss.item())
    [(ids, _)] = data.tokens(1, 8, 0, 1, seed=2)
    print(model(input_ids=ids, labels=ids)["loss"].item())


if __name__ == "__main__":
    main(int(sys.argv[1]))
