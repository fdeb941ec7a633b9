"""A script in half precision on two real ranks: losses, norms and loss scales of plain PyTorch, and a resumed run that repeats."""

import data
import pytest
import torch
from models import MODELS
from test_scripts import run

STEPS, SCALE, CLIP = 6, 2.0**19, 0.5
COMMON = {"microbatches": 2, "ddp": True, "fp16": True}
# What the job is configured with, and how many shards of the data there are.
CASES = {
    "pp 2": ({"partitions": 2}, 1),
    "tp 2": ({"tensor_parallel_degree": 2}, 2),
    "ddp 2": ({"shard_optimizer_state": True}, 2),
    "sdp 2": ({"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 100}, 2),
}


def half_gpt2():
    torch.set_default_dtype(torch.float16)
    try:
        torch.manual_seed(3)
        return MODELS["gpt2"]()
    finally:
        torch.set_default_dtype(torch.float32)


def in_plain_pytorch(num_shards, are_added_in_half):
    """(loss, norm, overflow, scale) of each step: fp32 masters, gradients of the scaled loss in half precision.

    `are_added_in_half`: the gradients of a shard's two microbatches, too.
    """
    model, scale, found = half_gpt2(), SCALE, []
    masters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=0.01, eps=1e-4)
    for ids, _ in data.tokens(STEPS, 4 * num_shards, 0, 1):
        losses, grads = [], [torch.zeros_like(master) for master in masters]
        for shard in ids.chunk(num_shards):
            added = [torch.zeros_like(p if are_added_in_half else p.float()) for p in model.parameters()]
            for batch in shard.chunk(2):
                model.zero_grad()
                loss = model(input_ids=batch, labels=batch)["loss"]
                (loss.float() * scale / 2).backward()
                losses.append(loss.item())
                for total, parameter in zip(added, model.parameters(), strict=True):
                    total += parameter.grad
            for total, part in zip(grads, added, strict=True):
                total += part.float() / num_shards
        overflow = not all(grad.isfinite().all() for grad in grads)
        norm = -1.0
        if overflow:
            scale /= 2
        else:
            for master, grad in zip(masters, grads, strict=True):
                master.grad = grad / scale
            norm = torch.nn.utils.clip_grad_norm_(masters, CLIP).item()
            optimizer.step()
            with torch.no_grad():
                for parameter, master in zip(model.parameters(), masters, strict=True):
                    parameter.copy_(master)
        found.append((sum(losses) / len(losses), norm, overflow, scale))
    return found


def rows(report):
    return list(zip(report["loss"], report["norm"], report["overflow"], report["scale"], strict=True))


@pytest.mark.parametrize("case", ["pp 2", *(pytest.param(case, marks=pytest.mark.slow) for case in list(CASES)[1:])])
def test_it_trains_as_plain_pytorch_and_goes_on(tmp_path, case):
    degrees, num_shards = CASES[case]
    parameters = {**COMMON, **degrees}
    expected = in_plain_pytorch(num_shards, are_added_in_half=case != "sdp 2")
    assert {row[2] for row in expected} == {True, False}
    whole, _ = run("half.py", **parameters)
    for report in whole:
        for found, wanted in zip(rows(report), expected, strict=True):
            assert found[:2] == pytest.approx(wanted[:2], rel=2e-3 if found[1] > 0 else 1e-4)
            assert found[2:] == wanted[2:]
        assert report["loss"] == pytest.approx([row[0] for row in expected], rel=1e-4)
    first, _ = run("half.py", "--last_step", 4, "--save", tmp_path, **parameters)
    rest, _ = run("half.py", "--first_step", 4, "--load", tmp_path, **parameters)
    for all_rows, ours, others in zip(whole, first, rest, strict=True):
        assert rows(ours) + rows(others) == rows(all_rows)
