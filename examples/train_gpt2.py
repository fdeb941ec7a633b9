"""Trains the GPT-2 of gpt2.py on sentences of Python's documentation over pipeline ranks.

smpc run -n 2 examples/train_gpt2.py --steps 800 --checkpoint /tmp/gpt2.pt
"""

from __future__ import annotations

import argparse
import time

import torch
from gpt2 import BATCH_SIZE, SEQUENCE_LENGTH, VOCABULARY_SIZE, make_model
from text import batches, load_words

import smpc.v1 as smp

SHOWN_EVERY = 5.0  # seconds


@smp.step
def train_step(model: smp.DistributedModel, ids: torch.Tensor) -> torch.Tensor:
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--measure",
        action="store_true",
        help="plan by times that are measured here, not by those of a described device",
    )
    parser.add_argument("--checkpoint", help="where to save the whole model after training")
    args = parser.parse_args()

    smp.init({"pipeline_parallel_degree": 2, "microbatches": args.microbatches})
    model = smp.DistributedModel(make_model(args.seed), trace_execution_times=args.measure)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=args.learning_rate))
    data = batches(load_words(VOCABULARY_SIZE).ids, BATCH_SIZE, SEQUENCE_LENGTH, args.seed)

    start = shown = time.perf_counter()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * min(1.0, (step + 1) / 20)
        optimizer.zero_grad(set_to_none=True)
        loss = train_step(model, next(data)).reduce_mean().item()
        optimizer.step()
        now = time.perf_counter()
        if smp.rank() == 0 and (now - shown > SHOWN_EVERY or step + 1 == args.steps):
            speed = (step + 1) * BATCH_SIZE * SEQUENCE_LENGTH / (now - start)
            print(f"step {step + 1} of {args.steps}: loss {loss:.3f} nats per word, {speed:,.0f} words/s", flush=True)
            shown = now
    if args.checkpoint:
        smp.save({"model": model.state_dict()}, args.checkpoint, partial=False)


if __name__ == "__main__":
    main()
