"""Transformed models on real ranks, wrapped by FSDP: losses, and so gradients, of a few AdamW steps are those of one process."""

import functools

import pytest
import torch
from checkpoint_harness import run_ranks, values_of
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformed import (
    CONTEXT,
    EXPERTS,
    SHARED,
    batch,
    build,
    loss_of_model,
    loss_of_script,
    own_chunks,
    reference,
    sample_of,
    slow,
    train,
    wrapped,
)

import smpc.v2 as tsm
from smpc.errors import ConfigUnsupportedError
from smpc.v2.delayed_param import DelayedParamIniter
from smpc.v2.grad_norm import clip_grad_norm_
from smpc.v2.tensor_parallel.transformer import TransformerLayer


def trains(rank, channel, family, degrees, fsdp, checkpoints, loss_of):
    tsm.init(degrees)
    model = wrapped(tsm.transform(build(family)), fsdp, checkpoints=checkpoints, use_orig_params=checkpoints)
    return train(model, loss_of)


def check_losses(folder, size, family, degrees, fsdp, checkpoints=False, loss_of=loss_of_model):
    found = values_of(run_ranks(size, trains, folder, family, degrees, fsdp, checkpoints, loss_of))
    shared = degrees.get("tensor_parallel_degree", 1) * degrees.get("context_parallel_degree", 1)
    wanted = reference(family, size // shared, loss_of)
    for losses in found:
        torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=0)


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("family", "fsdp", "checkpoints", "loss_of"),
    [
        ("llama", 1, True, loss_of_model),
        ("gpt_neox", 2, True, loss_of_script),
        slow("mixtral", 2, False, loss_of_model),
    ],
)
def test_sequences_that_scripts_cut(family, fsdp, checkpoints, loss_of, tmp_path):
    check_losses(tmp_path, 2, family, CONTEXT, fsdp, checkpoints, loss_of)


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("size", "degrees", "fsdp", "checkpoints"),
    [
        (2, CONTEXT, 2, False),
        (2, {"tensor_parallel_degree": 2}, 1, True),
        slow(4, {"tensor_parallel_degree": 2, "context_parallel_degree": 2}, 2, True),
        slow(4, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}, 1, False),
    ],
)
def test_dropout_drops_what_it_does_on_one_process(size, degrees, fsdp, checkpoints, tmp_path):
    check_losses(tmp_path, size, "dropout", degrees, fsdp, checkpoints)


@pytest.mark.slow
def test_sequences_beside_replicas(tmp_path):
    check_losses(tmp_path, 4, "llama", CONTEXT, 2)


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("size", "family", "degrees", "fsdp", "checkpoints", "loss_of"),
    [
        (2, "llama", {"tensor_parallel_degree": 2}, 1, False, loss_of_script),
        (2, "gpt_neox", {"tensor_parallel_degree": 2}, 2, True, loss_of_model),
        slow(2, "mixtral", {"tensor_parallel_degree": 2}, 1, True, loss_of_model),
        slow(4, "llama", {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}, 2, True, loss_of_model),
        slow(4, "gpt_neox", {"tensor_parallel_degree": 2, "hybrid_shard_degree": 1}, 1, False, loss_of_model),
        (4, "llama", {"tensor_parallel_degree": 2, "context_parallel_degree": 2}, 1, True, loss_of_model),
        slow(4, "gpt_neox", {"tensor_parallel_degree": 2, "context_parallel_degree": 2}, 2, False, loss_of_script),
    ],
)
def test_slices_of_weights(size, family, degrees, fsdp, checkpoints, loss_of, tmp_path):
    check_losses(tmp_path, size, family, degrees, fsdp, checkpoints, loss_of)


@pytest.mark.long
@pytest.mark.parametrize("family", ["mixtral", "listed"])
def test_divided_experts_in_layers_that_run_again(family, tmp_path):
    """A backward that ran a layer again took what `fully_shard` had gathered for parameters between steps: the next step was refused."""
    check_losses(tmp_path, 2, family, EXPERTS, 2, checkpoints=True)


@pytest.mark.long
@pytest.mark.parametrize("fsdp", [1, 2])
def test_experts_with_a_bias_that_is_added_once(fsdp, tmp_path):
    """The program passed what stands for the module on to torch, whose TypeError said that it is none."""
    check_losses(tmp_path, 2, "gpt_oss", {"tensor_parallel_degree": 2}, fsdp)


def shards_experts(rank, channel):
    tsm.init({"tensor_parallel_degree": 2})
    model = tsm.transform(build("gpt_oss"))
    fully_shard(model.model.layers[0].mlp.experts)
    with pytest.raises(
        ConfigUnsupportedError, match=r"GptOssExperts: expected nothing around a module whose down_proj_bias"
    ):
        loss_of_model(model, batch(0, 0))
    return True


@pytest.mark.long
def test_nothing_is_around_experts_with_such_a_bias(tmp_path):
    assert all(values_of(run_ranks(2, shards_experts, tmp_path)))


def in_bf16(model, fsdp):
    """The model as a script wraps it that computes in bf16: layers first, then what is around them."""
    if fsdp == 1:
        types = (torch.bfloat16, torch.float32, torch.bfloat16)
        return wrapped(model, fsdp, mixed_precision=MixedPrecision(*types))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in model.modules():
        if isinstance(module, TransformerLayer):
            fully_shard(module, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def trains_in_bf16(rank, channel, family, degrees, fsdp):
    tsm.init(degrees)
    model = in_bf16(tsm.transform(build(family)), fsdp)
    losses = train(model, loss_of_model)
    parameters = {str(parameter.dtype) for parameter in model.parameters()}
    return losses, str(model(input_ids=own_chunks(batch(0, 0))).logits.dtype), parameters


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("family", "degrees", "fsdp"),
    [
        ("llama", {"tensor_parallel_degree": 2}, 1),
        slow("mixtral", {"tensor_parallel_degree": 2}, 2),
        ("gpt_neox", CONTEXT, 2),
        slow("llama", CONTEXT, 1),
    ],
)
def test_mixed_precision(family, degrees, fsdp, tmp_path):
    """Of FSDP alone, in one process; sums of bf16 values in another order differ in their last bits."""
    (tmp_path / "one").mkdir()
    ((wanted, kind, _),) = values_of(run_ranks(1, trains_in_bf16, tmp_path / "one", family, {}, fsdp))
    for losses, own_kind, parameters in values_of(run_ranks(2, trains_in_bf16, tmp_path, family, degrees, fsdp)):
        assert (own_kind, parameters) == (kind, {"torch.float32"})
        assert own_kind == "torch.bfloat16"
        torch.testing.assert_close(losses, wanted, rtol=1e-3, atol=0)


def clips(rank, channel, fsdp, use_orig_params):
    tsm.init(SHARED)
    model = wrapped(tsm.transform(build("llama")), fsdp, use_orig_params=use_orig_params)
    loss_of_model(model, batch(0, sample_of())).backward()
    return clip_grad_norm_(model, 0.5).item(), clip_grad_norm_(model, 0.5).item()


@pytest.mark.long
@pytest.mark.parametrize(("fsdp", "use_orig_params"), [(1, False), slow(1, True), slow(2, False)])
def test_the_norm_counts_every_gradient_once(fsdp, use_orig_params, tmp_path):
    model = build("llama")
    (sum(loss_of_model(model, batch(0, sample)) for sample in range(2)) / 2).backward()
    wanted = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
    for before, after in values_of(run_ranks(4, clips, tmp_path, fsdp, use_orig_params)):
        assert before == pytest.approx(wanted, rel=1e-5)
        assert after == pytest.approx(0.5, rel=1e-5)


def draws(rank, channel, degrees):
    tsm.init(degrees)
    with torch.device("meta"):
        model = build("llama")
    model = tsm.transform(model)
    initer = DelayedParamIniter(model)
    with initer.validate_params_and_buffers_inited():
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerLayer}),
            device_id=torch.device("cpu"),
            param_init_fn=initer.get_param_init_fn(),
            post_param_init_fn=initer.get_post_param_init_fn(),
        )
    losses = train(model, loss_of_model)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return losses, {name: value.numpy() for name, value in model.state_dict().items()}


@pytest.mark.slow
def test_delayed_weights_are_the_same_whatever_the_degree(tmp_path):
    (one, alone), *_ = values_of(run_ranks(2, draws, tmp_path, {"hybrid_shard_degree": 2}))
    for losses, state in values_of(run_ranks(4, draws, tmp_path, SHARED)):
        torch.testing.assert_close(losses, one, rtol=1e-5, atol=0)
        assert state.keys() == alone.keys()
        for name, value in state.items():
            assert value.shape == alone[name].shape
            assert abs(value - alone[name]).max() < 1e-4, name


def starts_from_rank0(rank, channel):
    tsm.init(SHARED)
    if rank == 0:
        model = build("llama")
    else:
        with torch.device("meta"):
            model = build("llama")
    model = tsm.transform(model, load_state_dict_from_rank0=True)
    return {name: None if p.is_meta else p.detach().numpy() for name, p in model.named_parameters()}


@pytest.mark.long
def test_rank_0_has_the_weights_of_its_group(tmp_path):
    first, second, *others = values_of(run_ranks(4, starts_from_rank0, tmp_path))
    assert all(value is None for other in others for value in other.values())
    for name, value in build("llama").state_dict().items():
        parts = torch.from_numpy(first[name]), torch.from_numpy(second[name])
        whole = [torch.cat(parts, dim) for dim in range(value.dim())]
        assert any(torch.equal(value, each) for each in (*whole, parts[0])), name
    assert sum(value.size for value in first.values()) < 0.6 * sum(p.numel() for p in build("llama").parameters())


def passes_odd_chunks(rank, channel):
    tsm.init(CONTEXT)
    model = tsm.transform(build("llama"))
    said = []
    for ids in (torch.ones(1, 4 + 2 * rank, dtype=torch.long), torch.ones(1, 3, dtype=torch.long)):
        with pytest.raises(ValueError, match="context parallelism: expected") as caught:
            model(input_ids=ids)
        said.append(str(caught.value))
    return said


def test_chunks_that_do_not_fit_are_an_error_on_all_ranks(tmp_path):
    for lengths, odd in values_of(run_ranks(2, passes_odd_chunks, tmp_path)):
        assert "inputs of the same shapes on all 2 ranks" in lengths
        assert "two chunks of equal length" in odd
