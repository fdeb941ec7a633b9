"""Trains the GPT-2 of gpt2.py on Python's standard library over pipeline ranks.

smpc run -n 2 examples/train_gpt2.py --steps 100 --checkpoint /tmp/gpt2.pt
"""

from __future__ import annotations

import argparse
import time

import torch
from gpt2 import BATCH_SIZE, SEQUENCE_LENGTH, make_model
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from text import batches, load_text

import smpc.v1 as smp


@smp.step
def train_step(model: smp.DistributedModel, ids: torch.Tensor) -> torch.Tensor:
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", help="where to save the whole model after training")
    args = parser.parse_args()

    smp.init({"pipeline_parallel_degree": 2, "microbatches": args.microbatches})
    model = smp.DistributedModel(make_model(args.seed))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=args.learning_rate))
    data = batches(load_text(), BATCH_SIZE, SEQUENCE_LENGTH, args.seed)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[status]}"), disable=smp.rank() != 0) as progress:
        task = progress.add_task("training", total=args.steps, status="")
        start = time.perf_counter()
        for step in range(args.steps):
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate * min(1.0, (step + 1) / 20)
            optimizer.zero_grad(set_to_none=True)
            loss = train_step(model, next(data)).reduce_mean().item()
            optimizer.step()
            speed = (step + 1) * BATCH_SIZE * SEQUENCE_LENGTH / (time.perf_counter() - start)
            progress.update(task, advance=1, status=f"loss {loss:.3f}  {speed:,.0f} tokens/s")
    if smp.rank() == 0:
        print(f"final loss {loss:.4f} nats per byte")
    if args.checkpoint:
        smp.save({"model": model.state_dict()}, args.checkpoint, partial=False)


if __name__ == "__main__":
    main()
