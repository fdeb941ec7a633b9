"""Transformed models whose experts are divided over real ranks: losses, norms and weights are those of one process."""

import functools
import warnings

import pytest
import torch
from checkpoint_harness import run_ranks, values_of
from transformed import (
    EXPERTS,
    STEPS,
    WITH_CONTEXT,
    WITH_TENSOR,
    batch,
    build,
    loss_of_model,
    own_chunks,
    sample_of,
    slow,
    train,
    wrapped,
)

import smpc.v2 as tsm
from smpc.v2.grad_norm import clip_grad_norm_
from smpc.v2.moe.moe_config import MoEConfig
from smpc.v2.moe.moe_layer import MoELayer
from smpc.v2.transforming.transformed_slices import slices_of


def experts_from_rank0(rank, channel):
    tsm.init(WITH_TENSOR)
    with torch.device("cpu" if rank == 0 else "meta"):
        model = build("mixtral")
    model = tsm.transform(model, load_state_dict_from_rank0=True)
    parts = slices_of(model)
    return {name: parts[name].whole(p.detach()).numpy() for name, p in model.named_parameters() if ".experts." in name}


@pytest.mark.slow
def test_experts_of_all_ranks_come_from_rank_0(tmp_path):
    """Each rank of rank 0's expert-parallel group gives its own experts to its tensor-parallel group."""
    wanted = {name: p.detach() for name, p in build("mixtral").named_parameters() if ".experts." in name}
    for found in values_of(run_ranks(4, experts_from_rank0, tmp_path)):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(torch.from_numpy(found[name]), value) for name, value in wanted.items())


BALANCING = {
    mode: {"moe_load_balancing": mode, "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}
    for mode in ("aux_loss", "sinkhorn", "balanced", "none")
}


def mixtral_with(settings):
    """A session's Mixtral with experts used as settings say."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sinkhorn tells what it changes
        return tsm.transform(build("mixtral"), config=MoEConfig(**settings))


def trains_experts(rank, channel, degrees, fsdp, settings):
    tsm.init(degrees)
    model = mixtral_with(settings)
    assert sum(isinstance(module, MoELayer) for module in model.modules()) == 2
    held = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    model = wrapped(model, fsdp)
    loss_of_model(model, own_chunks(batch(0, sample_of()))).backward()
    norm = clip_grad_norm_(model, 1e9).item()
    return train(model, loss_of_model), held, norm


@functools.cache
def experts_reference(mode, num_samples):
    """Losses of one process with the same routers, each sample by itself, as ranks have them; and the first step's norm of gradients."""
    tsm.init()
    try:
        model = mixtral_with(BALANCING[mode])
    finally:
        tsm.state.reset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        found = []
        for sample in range(num_samples):
            loss = loss_of_model(model, batch(step, sample)) / num_samples
            found.append(loss.item())
            (loss * num_samples).backward()  # losses that join have the scale of one rank's
        for parameter in model.parameters():
            parameter.grad /= num_samples
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        optimizer.step()
        losses.append(sum(found))
    return losses, norms[0]


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("size", "degrees", "fsdp", "mode", "more"),
    [
        (2, EXPERTS, 1, "sinkhorn", {}),
        (2, EXPERTS, 2, "aux_loss", {"moe_all_to_all_dispatcher": False}),
        slow(2, EXPERTS, 1, "aux_loss", {}),
        slow(2, EXPERTS, 2, "balanced", {}),
        slow(2, EXPERTS, 2, "none", {"global_token_shuffle": True}),
        (4, {"expert_parallel_degree": 2, "hybrid_shard_degree": 4}, 1, "none", {}),
        slow(4, {"expert_parallel_degree": 2, "hybrid_shard_degree": 4}, 2, "sinkhorn", {}),
        slow(4, EXPERTS, 1, "aux_loss", {}),
        slow(4, EXPERTS, 2, "none", {}),
        slow(4, {"expert_parallel_degree": 4}, 2, "aux_loss", {}),
    ],
)
def test_experts_on_several_ranks(size, degrees, fsdp, mode, more, tmp_path):
    check_experts(size, degrees, fsdp, mode, more, tmp_path)


def check_experts(size, degrees, fsdp, mode, more, folder):
    settings = {**BALANCING[mode], **more}
    tensor, context = (degrees.get(f"{name}_parallel_degree", 1) for name in ("tensor", "context"))
    wanted, norm = experts_reference(mode, size // (tensor * context))
    whole = sum(p.numel() for n, p in build("mixtral").named_parameters() if ".experts." in n)
    for losses, held, found in values_of(run_ranks(size, trains_experts, folder, degrees, fsdp, settings)):
        torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=0)
        assert held == whole // (degrees["expert_parallel_degree"] * tensor)
        assert found == pytest.approx(norm, rel=1e-5)


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("size", "degrees", "fsdp", "mode"),
    [
        (4, WITH_TENSOR, 1, "aux_loss"),
        (2, WITH_CONTEXT, 2, "sinkhorn"),
        slow(4, WITH_TENSOR, 2, "none"),
        slow(4, {**WITH_TENSOR, "context_parallel_degree": 2}, 2, "balanced"),
        slow(2, WITH_CONTEXT, 1, "none"),
        slow(4, WITH_CONTEXT, 1, "aux_loss"),
        slow(4, {**WITH_CONTEXT, "hybrid_shard_degree": 2}, 2, "aux_loss"),
        slow(4, {**WITH_CONTEXT, "expert_parallel_degree": 4}, 2, "none"),
        slow(4, {"context_parallel_degree": 4, "expert_parallel_degree": 2}, 1, "none"),
    ],
)
def test_experts_beside_slices_of_weights_and_sequences(size, degrees, fsdp, mode, tmp_path):
    check_experts(size, degrees, fsdp, mode, {}, tmp_path)


def test_what_balancing_changes():
    model = build("mixtral").eval()
    ids = batch(0, 0)
    with torch.no_grad():
        own = model(input_ids=ids).logits
        tsm.init()
        try:
            with pytest.warns(UserWarning, match="not normalized"):
                sinkhorn = tsm.transform(build("mixtral").eval(), config=MoEConfig())
            kept = [mixtral_with(BALANCING[mode]).eval() for mode in ("aux_loss", "none")]
        finally:
            tsm.state.reset()
        assert all(torch.equal(each(input_ids=ids).logits, own) for each in kept)
        assert not torch.allclose(sinkhorn(input_ids=ids).logits, own)


def halves_gradients(rank, channel):
    tsm.init(EXPERTS)
    model = wrapped(tsm.transform(build("mixtral")), 1, use_orig_params=True)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.2), []
    for step in range(STEPS):
        loss = loss_of_model(model, batch(step, sample_of()))
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_what_scripts_write_into_elements_that_fsdp_gives_ranks(tmp_path):
    """Ranks that divide experts have other elements of all else, and so write into gradients of other parameters: that was refused."""
    found = values_of(run_ranks(2, halves_gradients, tmp_path))
    model = build("mixtral")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        losses = [loss_of_model(model, batch(step, sample)) for sample in range(2)]
        (sum(losses) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert [of_rank[step] for of_rank in found] == pytest.approx([loss.item() for loss in losses], rel=1e-5)
