"""Scripts under sharded data parallelism on real ranks: losses, norms and weights of plain PyTorch, and resumed runs that repeat."""

import math

import data
import pytest
import torch
from test_scripts import CLOSE, run
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM


def plain(num_parts, steps=4, clip=1.0):
    """Losses, norms before clipping, norms of the weights, and the loss after all."""
    torch.manual_seed(12345)
    config = GPTNeoXConfig(
        vocab_size=61, hidden_size=16, num_hidden_layers=3, num_attention_heads=4, intermediate_size=32, use_cache=False,
        max_position_embeddings=16, bos_token_id=0, eos_token_id=0, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    model = GPTNeoXForCausalLM(config)
    decays = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    losses, norms, weights = [], [], []
    for ids, _ in data.tokens(steps, 4 * num_parts, 0, 1):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        losses.append(loss.item())
        weights.append(math.sqrt(sum(p.detach().square().sum().item() for p in model.parameters())))
    with torch.no_grad():
        [(ids, _)] = data.tokens(1, 4, 0, 1, seed=77)
        test = model(input_ids=ids, labels=ids).loss.item()
    return losses, norms, weights, test, sum(p.numel() for p in model.parameters())


def check(reports, num_parts, first=0, clip=1.0):
    losses, norms, weights, test, size = plain(num_parts, clip=clip)
    for report in reports:
        assert report["loss"] == pytest.approx(losses[first:], **CLOSE)
        assert report["norm"] == pytest.approx(norms[first:], **CLOSE)
        assert report["test loss"] == pytest.approx([test], **CLOSE)
    return weights[first:], size


@pytest.mark.long
def test_gpt_neox_in_parts_saved_and_resumed(tmp_path):
    reports, errors = run("neox_sharded.py", "--checkpoints", tmp_path)
    weights, size = check(reports, 2)
    for report in reports:
        assert report["weights"] == pytest.approx(weights, **CLOSE)
        assert report["parameters"] == [size]
        assert size / 2 <= report["held"][0] <= size / 2 + 61 * 16
    assert "sdp_reduce_bucket_size" not in errors  # it is the default
    again, _ = run("neox_sharded.py", "--checkpoints", tmp_path, "--load", 1, "--threshold", 0, "--live", 10**9)
    for report, first in zip(again, reports, strict=True):
        assert report["loss"] == first["loss"][2:]
        assert report["weights"] == first["weights"][2:]


@pytest.mark.slow
@pytest.mark.parametrize("prescaled", [0, 1])
def test_gpt_neox_in_parts_of_slices(tmp_path, prescaled):
    both = ("--tensor_parallel_degree", 2, "--prescaled_batch", prescaled, "--checkpoints", tmp_path)
    reports, _ = run("neox_sharded.py", *both, ranks=4)
    check(reports, 2 if prescaled else 4)
    again, _ = run("neox_sharded.py", *both, "--load", 1, ranks=4)
    for report, first in zip(again, reports, strict=True):
        assert report["loss"] == first["loss"][2:]


@pytest.mark.slow
def test_gpt_neox_in_parts_with_replicas_and_without_clipping():
    reports, _ = run("neox_sharded.py", "--clip", 1e6, ranks=4)
    check(reports, 4, clip=1e6)
    sums = [report["weights"] for report in reports]
    assert all(each == sums[0] for each in sums)


@pytest.mark.slow
def test_gpt_neox_in_parts_in_bfloat16(tmp_path):
    reports, _ = run("neox_sharded.py", "--bf16", 1, "--checkpoints", tmp_path)
    losses, *_ = plain(2)
    for report in reports:
        assert report["loss"] == pytest.approx(losses, rel=2e-2)
    again, _ = run("neox_sharded.py", "--bf16", 1, "--checkpoints", tmp_path, "--load", 1)
    assert again[0]["loss"] == reports[0]["loss"][2:]
