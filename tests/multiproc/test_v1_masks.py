"""Masks of ones are left out of attention's kernels, as Hugging Face does it; others run a program that holds for all of them. Bitwise."""

import pytest
import torch
from executor_harness import run_workers
from v1_harness import MB, feed, make_model, start

import smpc.v1 as smp

# How many tokens are padded, by row: none, some in each microbatch, none again, some in one microbatch alone.
PADDED = [(0,) * 8, (1, 0, 2, 0, 0, 3, 1, 1), (0,) * 8, (0,) * 7 + (2,)]


@smp.step
def train_step(model, ids, mask):
    output = model(input_ids=ids, attention_mask=mask, labels=ids)
    model.backward(output.loss)
    return output.loss


def batch(index):
    ids = torch.randint(3, 60, (8, 12), generator=torch.Generator().manual_seed(index))
    return ids, (torch.arange(12) < 12 - torch.tensor(PADDED[index])[:, None]).long()


def train(rank, folder):
    _, model, optimizer, _ = start("llama")
    losses, programs = [], []
    for index in range(len(PADDED)):
        losses.append(train_step(model, *map(feed, batch(index))).outputs)
        optimizer.step()
        optimizer.zero_grad()
        programs.append(
            {signature.ones: left_out(recording.trace) for signature, recording in model._pipeline.programs.entries}
        )
    return losses, programs


def left_out(trace):
    """Of each attention, whether it has no mask but the causal one."""
    return {dict(node.kwargs)["is_causal"] for node in trace.nodes if node.target.endswith("dot_product_attention")}


@pytest.mark.long
def test_every_step_is_that_of_one_process(tmp_path):
    results = run_workers(train, 2, tmp_path)
    model, _, _ = make_model("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(len(PADDED)):
        expected = []
        for ids, mask in zip(*(tensor.chunk(MB) for tensor in batch(index)), strict=True):
            expected.append(model(input_ids=ids, attention_mask=mask, labels=ids).loss)
            (expected[-1] / MB).backward()
        optimizer.step()
        optimizer.zero_grad()
        for losses, _ in results:
            assert len(losses[index]) == MB
            if index < 3:
                assert all(torch.equal(a, b) for a, b in zip(losses[index], expected, strict=True)), index
            else:  # eager takes one way for this microbatch and another for the rest
                torch.testing.assert_close(losses[index], [loss.detach() for loss in expected], rtol=1e-6, atol=1e-7)
    ones, others = {("[1]['attention_mask']",): {True}}, {(): {False}}
    for _, programs in results:
        assert programs == [ones, ones | others, ones | others, ones | others]
