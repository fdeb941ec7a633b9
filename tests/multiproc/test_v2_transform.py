"""Transformed models on real ranks, wrapped by FSDP: losses, and so gradients, of a few AdamW steps are those of one process."""

import copy
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from checkpoint_harness import run_ranks, values_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

import smpc.v2 as tsm
from smpc.errors import CheckpointError
from smpc.v2.delayed_param import DelayedParamIniter
from smpc.v2.distributed.checkpoint.state_dict_loader import load
from smpc.v2.distributed.checkpoint.state_dict_saver import save
from smpc.v2.distributed.checkpoint.state_dict_utils import SMStateDictType, init_optim_state, sm_state_dict_type
from smpc.v2.grad_norm import clip_grad_norm_
from smpc.v2.moe.moe_config import MoEConfig
from smpc.v2.moe.moe_layer import MoELayer
from smpc.v2.tensor_parallel.transformer import TransformerLayer
from smpc.v2.transforming.slices import slices_of

STEPS, BATCH, LENGTH, VOCABULARY = 3, 2, 16, 64
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "use_cache": False,
}
FAMILIES = {
    "llama": ("Llama", {"num_key_value_heads": 2}),
    "gpt_neox": ("GPTNeoX", {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "mixtral": ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 4}),
    "dropout": ("GPTNeoX", {"hidden_dropout": 0.2, "attention_dropout": 0.2}),
}


def build(family, seed=0, **more):
    torch.manual_seed(seed)
    name, options = FAMILIES[family]
    return getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**SMALL, **options, **more)
    )


def wrapped(model, fsdp, *, checkpoints=False, use_orig_params=False, **options):
    """The model as a script wraps it."""
    if fsdp == 1:
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerLayer})
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=use_orig_params, **options
        )
    elif fsdp == 2:
        for module in model.modules():
            if isinstance(module, TransformerLayer):
                fully_shard(module)
        fully_shard(model)
    if checkpoints:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, TransformerLayer))
    return model


def batch(step, sample):
    generator = torch.Generator().manual_seed(100 * step + sample)
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)


def own_chunks(ids):
    """What a script passes of a sequence that context-parallel ranks share."""
    size, rank = tsm.state.cp_size, tsm.state.cp_rank
    if size == 1:
        return ids
    chunks = ids.chunk(2 * size, 1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], 1)


def sample_of():
    """The number of the samples that this rank has; ranks of a tensor- or context-parallel group have the same."""
    return tsm.state.rank // (tsm.state.tp_size * tsm.state.cp_size)


def train(model, loss_of, steps=range(STEPS), optimizer=None):
    """Losses averaged over the ranks."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        first = tsm.state.tp_rank == tsm.state.cp_rank == 0
        torch.manual_seed(
            seed_of(step, sample_of()) if first else tsm.state.rank
        )  # ranks that share a model draw as the first one
        loss = loss_of(model, own_chunks(batch(step, sample_of())))
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / tsm.state.world_size)
    return losses


def seed_of(step, sample):
    return 1000 * step + sample


def loss_of_model(model, ids):
    return model(input_ids=ids, labels=ids, attention_mask=None).loss


def loss_of_script(model, ids):
    """A loss that the script computes from this rank's logits: each position predicts its own token."""
    logits = model(input_ids=ids).logits
    assert logits.shape == (*ids.shape, VOCABULARY)
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def trains(rank, channel, family, degrees, fsdp, checkpoints, loss_of):
    tsm.init(degrees)
    model = wrapped(tsm.transform(build(family)), fsdp, checkpoints=checkpoints, use_orig_params=checkpoints)
    return train(model, loss_of)


@functools.cache
def reference(family, num_samples, loss_of, num_last=0):
    """Losses of one process on all samples; on `num_last` of them in the last step."""
    model = build(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        count = num_last if num_last and step == STEPS - 1 else num_samples
        total = 0.0
        for sample in range(count):
            torch.manual_seed(seed_of(step, sample))
            loss = loss_of(model, batch(step, sample)) / count
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


def check_losses(folder, size, family, degrees, fsdp, checkpoints=False, loss_of=loss_of_model):
    found = values_of(run_ranks(size, trains, folder, family, degrees, fsdp, checkpoints, loss_of, timeout=200))
    shared = degrees.get("tensor_parallel_degree", 1) * degrees.get("context_parallel_degree", 1)
    wanted = reference(family, size // shared, loss_of)
    for losses in found:
        torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=0)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


CONTEXT = {"context_parallel_degree": 2, "hybrid_shard_degree": 2}


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
    ((wanted, kind, _),) = values_of(run_ranks(1, trains_in_bf16, tmp_path / "one", family, {}, fsdp, timeout=200))
    for losses, own_kind, parameters in values_of(
        run_ranks(2, trains_in_bf16, tmp_path, family, degrees, fsdp, timeout=200)
    ):
        assert (own_kind, parameters) == (kind, {"torch.float32"})
        assert own_kind == "torch.bfloat16"
        torch.testing.assert_close(losses, wanted, rtol=1e-3, atol=0)


SHARED = {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}


def clips(rank, channel, fsdp, use_orig_params):
    tsm.init(SHARED)
    model = wrapped(tsm.transform(build("llama")), fsdp, use_orig_params=use_orig_params)
    loss_of_model(model, batch(0, sample_of())).backward()
    return clip_grad_norm_(model, 0.5).item(), clip_grad_norm_(model, 0.5).item()


@pytest.mark.parametrize(("fsdp", "use_orig_params"), [(1, False), slow(1, True), slow(2, False)])
def test_the_norm_counts_every_gradient_once(fsdp, use_orig_params, tmp_path):
    model = build("llama")
    (sum(loss_of_model(model, batch(0, sample)) for sample in range(2)) / 2).backward()
    wanted = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
    for before, after in values_of(run_ranks(4, clips, tmp_path, fsdp, use_orig_params, timeout=200)):
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
    (one, alone), *_ = values_of(run_ranks(2, draws, tmp_path, {"hybrid_shard_degree": 2}, timeout=200))
    for losses, state in values_of(run_ranks(4, draws, tmp_path, SHARED, timeout=200)):
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


def test_rank_0_has_the_weights_of_its_group(tmp_path):
    first, second, *others = values_of(run_ranks(4, starts_from_rank0, tmp_path))
    assert all(value is None for other in others for value in other.values())
    for name, value in build("llama").state_dict().items():
        parts = torch.from_numpy(first[name]), torch.from_numpy(second[name])
        whole = [torch.cat(parts, dim) for dim in range(value.dim())]
        assert any(torch.equal(value, each) for each in (*whole, parts[0])), name
    assert sum(value.size for value in first.values()) < 0.6 * sum(p.numel() for p in build("llama").parameters())


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


def options(kind, loading):
    return StateDictOptions(full_state_dict=True, cpu_offload=not loading) if kind == "full" else StateDictOptions()


def trains_and_saves(rank, channel, family, degrees, fsdp, kind, path):
    tsm.init(degrees)
    model = wrapped(tsm.transform(build(family)), fsdp, use_orig_params=kind == "full")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = train(model, loss_of_model, range(2), optimizer)
    if kind == "local":
        with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
            found = model.state_dict(), optimizer.state_dict()
    else:
        found = get_state_dict(model, optimizer, options=options(kind, False))
    save({"model": found[0], "optimizer": found[1], "step": 2}, checkpoint_id=place(path, kind))
    return losses


def place(path, kind):
    return (
        f"{path}/{tsm.state.rank}" if kind == "local" else f"{path}/tp{tsm.state.tp_rank}" if kind == "apart" else path
    )


def resumes(rank, channel, family, degrees, fsdp, kind, path):
    tsm.init(degrees)
    torch.manual_seed(5)
    model = wrapped(tsm.transform(build(family, seed=5)), fsdp, use_orig_params=kind == "full")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if kind == "local":
        init_optim_state(optimizer, skip_empty_param=True)
        with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
            load(state, checkpoint_id=place(path, kind))
            model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    else:
        found = get_state_dict(model, optimizer, options=options(kind, True))
        state = {"model": found[0], "optimizer": found[1], "step": 0}
        load(state, checkpoint_id=place(path, kind))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=options(kind, True),
        )
    return train(model, loss_of_model, range(state["step"], STEPS), optimizer)


EXPERTS = {"expert_parallel_degree": 2, "hybrid_shard_degree": 2}
WHOLE = {"hybrid_shard_degree": 2}
BOTH = {"tensor_parallel_degree": 2, "context_parallel_degree": 2}
WITH_TENSOR = {"expert_parallel_degree": 2, "tensor_parallel_degree": 2}
WITH_CONTEXT = {"expert_parallel_degree": 2, "context_parallel_degree": 2}


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("kind", "family", "first", "second", "num_last"),
    [
        ("sharded", "mixtral", (2, EXPERTS, 1), (2, WHOLE, 1), 2),
        ("full", "llama", (2, WHOLE, 1), (2, WHOLE, 1), 2),
        slow("sharded", "mixtral", (2, WHOLE, 2), (2, EXPERTS, 2), 2),
        ("sharded", "llama", (4, SHARED, 1), (2, WHOLE, 1), 2),
        slow("sharded", "gpt_neox", (2, WHOLE, 1), (4, SHARED, 1), 2),
        slow("sharded", "llama", (4, SHARED, 2), (4, BOTH, 2), 1),
        slow("full", "gpt_neox", (4, SHARED, 2), (2, WHOLE, 2), 2),
        slow("sharded", "mixtral", (4, SHARED, 2), (2, WHOLE, 2), 2),
        slow("full", "mixtral", (4, SHARED, 2), (2, WHOLE, 2), 2),
        slow("full", "mixtral", (2, WHOLE, 2), (4, SHARED, 2), 2),
        slow("full", "mixtral", (4, SHARED, 1), (4, BOTH, 2), 1),
        slow("full", "mixtral", (2, EXPERTS, 2), (2, EXPERTS, 1), 2),
        slow("full", "mixtral", (2, EXPERTS, 1), (2, WHOLE, 1), 2),
        slow("sharded", "mixtral", (4, WITH_TENSOR, 1), (2, WITH_CONTEXT, 2), 1),
        slow("sharded", "mixtral", (4, WITH_TENSOR, 2), (4, {**WITH_TENSOR, "context_parallel_degree": 2}, 1), 1),
        slow("apart", "llama", (4, SHARED, 1), (4, SHARED, 1), 2),
        slow("local", "llama", (4, SHARED, 1), (4, SHARED, 1), 2),
    ],
)
def test_checkpoints_of_slices_are_resumed(kind, family, first, second, num_last, tmp_path):
    path = str(tmp_path / "c")
    size, *how = first
    trained = values_of(run_ranks(size, trains_and_saves, tmp_path, family, *how, kind, path, timeout=200))[0]
    size, *how = second
    resumed = values_of(run_ranks(size, resumes, tmp_path, family, *how, kind, path, timeout=200))[0]
    torch.testing.assert_close(trained + resumed, reference(family, 2, loss_of_model, num_last), rtol=1e-5, atol=0)


def train_plainly(model, optimizer, steps):
    """Losses of one process in plain PyTorch."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        found = [loss_of_model(model, batch(step, sample)) for sample in range(2)]
        (sum(found) / 2).backward()
        optimizer.step()
        losses.append(sum(loss.item() for loss in found) / 2)
    return losses


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize("how", [(4, SHARED, 1), (4, SHARED, 2), (2, EXPERTS, 1), (2, EXPERTS, 2)])
def test_plain_torch_goes_on_from_checkpoints_and_is_gone_on_from(how, kind, tmp_path):
    size, *how = how
    path, other, wanted = str(tmp_path / "c"), str(tmp_path / "d"), reference("mixtral", 2, loss_of_model)

    trained = values_of(run_ranks(size, trains_and_saves, tmp_path, "mixtral", *how, kind, path, timeout=200))[0]
    model = build("mixtral", seed=7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    torch.testing.assert_close(trained + train_plainly(model, optimizer, range(2, STEPS)), wanted, rtol=1e-5, atol=0)

    model = build("mixtral")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trained = train_plainly(model, optimizer, range(2))
    found = get_state_dict(model, optimizer)
    dcp.save({"model": found[0], "optimizer": found[1], "step": 2}, checkpoint_id=other)
    resumed = values_of(run_ranks(size, resumes, tmp_path, "mixtral", *how, kind, other, timeout=200))[0]
    torch.testing.assert_close(trained + resumed, wanted, rtol=1e-5, atol=0)


def full_state(model, optimizer):
    """The full state dict of rank 0, flat; the others have nothing."""
    found = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert tsm.state.rank == 0 or found == ({}, {})
    return copy.deepcopy(found)


def passes_rank_0s_state_on(rank, channel, degrees, fsdp):
    """Of rank 0's state after a step: shapes, and what is another in a model that all ranks have loaded it into."""
    tsm.init(degrees)
    states = []
    for seed in (0, 5):
        model = wrapped(tsm.transform(build("mixtral", seed)), fsdp, use_orig_params=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train(model, loss_of_model, range(1), optimizer)
        if seed:
            chosen = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(model, copy.copy(states[0][0]), options=chosen)
            set_optimizer_state_dict(model, optimizer, copy.copy(states[0][1]), options=chosen)
        states.append(full_state(model, optimizer))
    dist.barrier()
    if rank:
        return None
    (model, optimizer), (again, optimizer_again) = states
    moments, moments_again = (
        {n: s["exp_avg"] for n, s in each["state"].items()} for each in (optimizer, optimizer_again)
    )
    return [
        (
            {name: list(value.shape) for name, value in first.items()},
            [n for n in first if not torch.equal(first[n], second[n])],
        )
        for first, second in ((model, again), (moments, moments_again))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [0, 1, 2])
@pytest.mark.parametrize("degrees", [SHARED, EXPERTS])
def test_a_full_state_dict_of_rank_0_is_loaded_on_all_ranks(degrees, fsdp, tmp_path):
    found, *_ = values_of(run_ranks(4, passes_rank_0s_state_on, tmp_path, degrees, fsdp, timeout=200))
    wanted = {name: list(value.shape) for name, value in build("mixtral").state_dict().items()}
    assert found == [(wanted, [])] * 2


def loads_a_part(rank, channel, path):
    tsm.init(WHOLE)
    model = wrapped(tsm.transform(build("llama")), 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = get_state_dict(model, optimizer)
    with pytest.raises(CheckpointError, match="Size mismatch"):
        load({"model": found[0]}, checkpoint_id=f"{path}/tp0")
    return True


@pytest.mark.slow
def test_a_part_of_the_slices_is_not_loaded_as_the_whole(tmp_path):
    path = str(tmp_path / "c")
    values_of(run_ranks(4, trains_and_saves, tmp_path, "llama", SHARED, 1, "apart", path, timeout=200))
    assert all(values_of(run_ranks(2, loads_a_part, tmp_path, path, timeout=200)))


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
    for losses, held, found in values_of(run_ranks(size, trains_experts, folder, degrees, fsdp, settings, timeout=200)):
        torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=0)
        assert held == whole // (degrees["expert_parallel_degree"] * tensor)
        assert found == pytest.approx(norm, rel=1e-5)


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
