"""Proof that the pipeline changes no bit: 3 steps on 2 ranks against 3 steps of one process over the same microbatches.

smpc run -n 2 examples/parity.py
"""

from __future__ import annotations

import torch
from gpt2 import BATCH_SIZE, SEQUENCE_LENGTH, VOCABULARY_SIZE, make_model
from text import batches, load_words
from train_gpt2 import train_step

import smpc.v1 as smp

STEPS, MICROBATCHES, SEED = 3, 4, 1


def reference(batch_list: list[torch.Tensor]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of plain PyTorch with gradient accumulation."""
    model = make_model(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batch_list:
        optimizer.zero_grad(set_to_none=True)
        parts = []
        for ids in batch.chunk(MICROBATCHES):
            loss = model(input_ids=ids, labels=ids).loss
            (loss / MICROBATCHES).backward()
            parts.append(loss.detach())
        optimizer.step()
        losses.append(torch.stack(parts).mean().item())
    return losses, model.state_dict()


def main() -> None:
    torch.set_num_threads(1)
    smp.init({"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES})
    data = batches(load_words(VOCABULARY_SIZE).ids, BATCH_SIZE, SEQUENCE_LENGTH, SEED)
    batch_list = [next(data) for _ in range(STEPS)]
    model = smp.DistributedModel(make_model(SEED))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for batch in batch_list:
        optimizer.zero_grad(set_to_none=True)
        # Only the first pipeline rank's data counts.
        ids = batch if smp.pp_rank() == 0 else torch.empty(0, dtype=torch.int64)
        losses.append(train_step(model, ids).reduce_mean().item())
        optimizer.step()
    weights = model.state_dict()
    if smp.rank() == 0:
        expected_losses, expected = reference(batch_list)
        different = [name for name in expected if not torch.equal(expected[name], weights[name])]
        assert losses == expected_losses, f"losses differ: {losses} on 2 ranks, {expected_losses} on one"
        assert not different, f"{len(different)} of {len(expected)} tensors differ, {different[0]} first"
        print(
            f"{STEPS} steps on 2 ranks equal {STEPS} single-process steps bitwise: {len(expected)} tensors, losses {losses}"
        )


if __name__ == "__main__":
    main()
