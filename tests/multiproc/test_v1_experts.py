"""Expert parallelism in training scripts: no annotation, any arrangement of ranks, one process's results."""

import functools
import math

import expert_models
import pytest
import torch
from executor_harness import run_workers
from mixtures import BALANCED, MB, ByHand, Experts, batch_of, made, train_step
from torch import nn

import smpc.v1 as smp
from smpc.errors import CheckpointError, ConfigError, ConfigUnsupportedError, StepError
from smpc.expert_parallel import register_experts
from smpc.sharding.dtensors import whole as gathered

STEPS, HALF = 4, 2
SWITCH = "SwitchTransformersForConditionalGeneration"


@smp.step
def evaluate(model, batch):
    return model(**batch).loss


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def clipped(parameters):
    return torch.nn.utils.clip_grad_norm_(parameters, 0.2)


@functools.cache
def eager(name, parts):
    """One process: the losses, norms, gradients of the first batch, and the parameters at the end."""
    model = made(name)
    optimizer, losses, norms, gradients = optimizer_of(model.parameters()), [], [], None
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for part in range(parts):
            whole = batch_of(step, part)
            for index in range(MB):
                loss = model(**{key: value.chunk(MB)[index] for key, value in whole.items()}).loss
                (loss / MB / parts).backward()
                total += loss.item() / MB / parts
        gradients = gradients or {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        norms.append(clipped(model.parameters()).item())
        optimizer.step()
        losses.append(total)
    return losses, norms, gradients, {key: p.detach().clone() for key, p in model.named_parameters()}


FOUND = {"tensor_parallel_degree": 2, "tensor_parallel_plan": "auto", "prescaled_batch": True}


def parts_of(world, pp, config):
    """Batches of a step: ranks of a pipeline, a sequence and a tensor-parallel group share one."""
    return world // pp // config.get("context_parallel_degree", 1) // config.get("tensor_parallel_degree", 1)


def mean_loss(model, batch):
    """Of the microbatches of a batch."""
    parts = [{key: value.chunk(MB)[index] for key, value in batch.items()} for index in range(MB)]
    return sum(model(**part).loss.item() for part in parts) / MB


def init(pp, ep, **config):
    degrees = {"pipeline_parallel_degree": pp, "expert_parallel_degree": ep, "microbatches": MB, "ddp": True}
    smp.init(degrees | config)


def wrapped(name, seed=0.0):
    replaces = smp.tp_size() > 1 and smp.state.cfg.tensor_parallel_plan == "modules"  # modules, and their parameters
    with smp.tensor_parallelism(replaces):
        model = made(name)
    if seed:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(seed)
    optimizer = optimizer_of(model.parameters())  # its parameters stay the ones that train
    model = smp.DistributedModel(model)
    return model, smp.DistributedOptimizer(optimizer_of(model.parameters()) if replaces else optimizer)


def steps(model, optimizer, some):
    """Losses over all data, norms, and this rank's gradients of the first batch."""
    losses, norms, gradients = [], [], None
    for step in some:
        optimizer.zero_grad()
        loss = train_step(model, batch_of(step, smp.data_rank())).reduce_mean()
        gradients = gradients or {
            key: (gathered(p.grad).clone(), model.slices.get(key))
            for key, p in model.local_named_parameters()
            if p.grad is not None
        }
        norms.append(clipped(model.parameters()).item())
        optimizer.step()
        losses.append(torch.stack(smp.allgather(loss, smp.WORLD)).mean().item())
    return losses, norms, gradients


def train(rank, folder, name, pp, ep, config):
    init(pp, ep, **config)
    model, optimizer = wrapped(name, seed=0.3 * smp.rdp_rank())  # replica 0's values count
    losses, norms, gradients = steps(model, optimizer, range(HALF))
    smp.save_checkpoint(str(folder), "half", model=model, optimizer=optimizer)
    smp.save_checkpoint(str(folder), "whole", partial=False, model=model, optimizer=optimizer)
    more = steps(model, optimizer, range(HALF, STEPS))
    model.eval()
    evaluated = [evaluate(model, batch_of(*which)).reduce_mean().item() for which in evaluations(smp.data_rank())]
    state, of_optimizer = model.state_dict(), optimizer.state_dict()["state"]
    smp.shutdown()
    return losses + more[0], norms + more[1], gradients, state, of_optimizer, evaluated


def evaluations(part):
    """Batches by (step, part): at the second one some ranks have lengths that they know, and others new ones."""
    return [(0, part), (part, part), (0, part)]


def resume(rank, folder, name, pp, ep, config, saved, tag):
    init(pp, ep, **config)
    model, optimizer = wrapped(name, seed=0.1)
    smp.resume_from_checkpoint(str(saved), tag, partial=tag == "half")
    losses, norms, _ = steps(model, optimizer, range(HALF, STEPS))
    smp.shutdown()
    return losses, norms


def check(tmp_path, name, pp, ep, world, config=None):
    folder = tmp_path / "saved"
    folder.mkdir()
    config = config or {}
    found = run_workers(train, world, folder, name, pp, ep, config)
    losses, norms, gradients, state = eager(name, parts_of(world, pp, config))
    seen, of_one = (
        {},
        ep * (2 if config.get("tensor_parallel_plan") and name != "listed" else 1),
    )  # ranks that have them once
    values, model = set(), made(name).eval()
    for own_losses, own_norms, own_gradients, whole, of_optimizer, evaluated in found:
        assert own_losses == pytest.approx(losses, rel=1e-6)
        assert own_norms == pytest.approx(norms, rel=1e-5)
        for key, (gradient, shard) in own_gradients.items():
            expected = gradients[key]
            limit = 1e-5 * expected.abs().max().item()
            if shard is not None:
                runs = shard.runs_of(gradient.shape[shard.dim])
                expected = torch.cat([expected.narrow(shard.dim, at, length) for _, at, length in runs], shard.dim)
                if "mixture" not in key and "expert_" not in key:  # not in lists
                    assert gradient.shape[shard.dim] == shard.size // (of_one if "experts." in key else 2)
            torch.testing.assert_close(gradient, expected, rtol=0, atol=max(limit, 1e-8))
            seen.setdefault(key, set()).add(0 if shard is None else shard.start)
        assert list(whole) == list(made(name).state_dict())
        for key, value in state.items():
            torch.testing.assert_close(whole[key], value, rtol=1e-4, atol=2e-5)
            if key in gradients:
                assert of_optimizer[key]["exp_avg"].shape == value.shape
        model.load_state_dict(whole)
        values.add(tuple(evaluated))
    parts = parts_of(world, pp, config)
    with torch.no_grad():
        expected = [[mean_loss(model, batch_of(*which)) for which in evaluations(part)] for part in range(parts)]
    assert sorted(values) == [pytest.approx(each, rel=1e-6) for each in sorted(expected)]
    assert seen.keys() == gradients.keys()
    assert all(len(starts) == of_one for key, starts in seen.items() if "experts." in key)
    return folder


def check_resumed(tmp_path, folder, name, pp, ep, world, parts, tag, config=None):
    losses, norms, *_ = eager(name, parts)
    own = tmp_path / f"{pp}-{ep}-{world}-{tag}"
    own.mkdir()
    for own_losses, own_norms in run_workers(resume, world, own, name, pp, ep, config or {}, folder, tag):
        assert own_losses == pytest.approx(losses[HALF:], rel=1e-5)
        assert own_norms == pytest.approx(norms[HALF:], rel=1e-4)


def test_two_ranks_train_as_one_process_and_others_go_on(tmp_path):
    folder = check(tmp_path, "by hand", 1, 2, 2)
    check_resumed(tmp_path, folder, "by hand", 1, 1, 2, 2, "half")


@pytest.mark.long
@pytest.mark.parametrize("name", [f"MixtralForCausalLM{BALANCED}", "counting"])
def test_a_pipeline_of_routers_whose_logits_count_and_of_blocks_called_whole(name, tmp_path):
    """The hooks that collect logits were lost between two recordings; a block that is called whole sent tokens while it was recorded."""
    check(tmp_path, name, 2, 2, 4)


@pytest.mark.slow
def test_a_pipeline_goes_on_from_two_ranks(tmp_path):
    folder = check(tmp_path, "by hand", 1, 2, 2)
    check_resumed(tmp_path, folder, "by hand", 2, 2, 4, 2, "whole")


@pytest.mark.slow
def test_others_go_on_from_experts_of_tensor_parallel_ranks(tmp_path):
    """Each of four ranks has a fourth of the experts, as one run of rows; others have half, or all."""
    folder = check(tmp_path, "by hand", 1, 2, 4, FOUND)
    check_resumed(tmp_path, folder, "by hand", 1, 2, 2, 2, "half")
    check_resumed(tmp_path, folder, "by hand", 1, 2, 4, 2, "whole", FOUND)


def test_experts_that_are_modules_of_their_own(tmp_path):
    """One rank has all of an expert, and the other none of its rows."""
    check(tmp_path, "listed", 1, 2, 2)


@pytest.mark.slow
def test_others_go_on_from_experts_that_are_modules_of_their_own(tmp_path):
    folder = check(tmp_path, "listed", 1, 2, 2)
    check_resumed(tmp_path, folder, "listed", 1, 1, 2, 2, "half")
    check_resumed(tmp_path, folder, "listed", 2, 1, 4, 2, "whole")


@pytest.mark.long
@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"fully_shard": True},
        {"fully_shard": True, "context_parallel_degree": 2},
    ],
    ids=str,
)
def test_parameters_that_no_expert_uses_have_no_gradients_and_ranks_may_serve_nothing(tmp_path, config):
    """A gradient of zero would let weight decay change the parameter. Beside slices of sequences, a rank without rows got none for them:
    `TypeError` in the backward pass.
    """
    check(tmp_path, "lopsided", 1, 2, 2, config)


@pytest.mark.long
def test_experts_that_are_modules_of_their_own_in_a_pipeline_and_in_parts(tmp_path):
    """No token ever chooses one of them, which is called without rows: it has a gradient of zero, as in one process, and decays."""
    folder = check(tmp_path, "sorted", 2, 2, 4, {"fully_shard": True})
    check_resumed(tmp_path, folder, "sorted", 1, 2, 2, 2, "half")


@pytest.mark.slow
def test_beside_a_pipeline(tmp_path):
    check(tmp_path, "by hand", 2, 2, 4)


@pytest.mark.long
def test_an_encoder_and_a_decoder_with_experts(tmp_path):
    """Its routers convert a linear layer to what it is already; a recording refused that."""
    check(tmp_path, SWITCH, 1, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pp", "ep", "world", "config"),
    [
        ("MixtralForCausalLM", 1, 2, 2, {}),
        ("MixtralForCausalLM", 2, 2, 4, {}),
        ("MixtralForCausalLM", 1, 4, 4, {}),
        ("Qwen2MoeForCausalLM", 2, 2, 4, {}),
        ("by hand", 2, 2, 4, {"schedule": "interleaved-1f1b"}),
        ("Qwen2MoeForCausalLM", 1, 2, 4, {}),
        ("by hand", 1, 2, 4, {"placement_strategy": "spread"}),
        ("MixtralForCausalLM", 1, 2, 2, {"context_parallel_degree": 2}),
        ("Qwen2MoeForCausalLM", 1, 2, 4, {"context_parallel_degree": 2}),
        ("MixtralForCausalLM", 1, 4, 4, {"context_parallel_degree": 2}),
        ("MixtralForCausalLM", 2, 2, 4, {"context_parallel_degree": 2}),
        ("by hand", 1, 2, 4, {"shard_optimizer_state": True}),
        ("MixtralForCausalLM", 1, 2, 4, {"shard_optimizer_state": True}),
        ("MixtralForCausalLM", 2, 2, 4, {"shard_optimizer_state": True}),
        (SWITCH, 2, 2, 4, {}),
        (SWITCH, 1, 2, 4, {"fully_shard": True}),
        (SWITCH, 2, 2, 4, {"shard_optimizer_state": True}),
        ("NllbMoeForConditionalGeneration", 2, 2, 4, {}),
        ("listed", 1, 2, 4, {}),
        ("listed", 2, 2, 4, {}),
        ("listed", 2, 2, 4, {"shard_optimizer_state": True}),
        ("listed", 1, 2, 4, {"context_parallel_degree": 2}),
        ("listed", 1, 2, 4, {"context_parallel_degree": 2, "fully_shard": True}),
        ("listed", 1, 2, 4, {"fully_shard": True}),
        ("listed", 2, 2, 4, {"fully_shard": True}),
        ("listed", 1, 2, 4, FOUND),
        ("sorted", 1, 2, 4, {}),
        ("sorted", 1, 2, 4, {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0}),
        ("by hand", 1, 2, 2, {"fully_shard": True}),
        ("MixtralForCausalLM", 1, 2, 4, {"fully_shard": True}),
        ("by hand", 2, 2, 4, {"fully_shard": True}),
        ("Qwen2MoeForCausalLM", 1, 2, 4, {"fully_shard": True, "context_parallel_degree": 2}),
        ("by hand", 1, 2, 4, {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0}),
        ("MixtralForCausalLM", 1, 2, 4, {"sharded_data_parallel_degree": 4, "sdp_gradient_clipping": 0}),
        ("MixtralForCausalLM", 2, 2, 4, {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0}),
        ("by hand", 1, 2, 4, {"tensor_parallel_degree": 2, "prescaled_batch": True}),
        ("by hand", 1, 2, 4, FOUND),
        ("by hand", 1, 2, 4, FOUND | {"shard_optimizer_state": True}),
        ("MixtralForCausalLM", 1, 2, 4, FOUND),
        ("Qwen2MoeForCausalLM", 1, 2, 4, FOUND | {"fully_shard": True}),
    ],
)
def test_other_arrangements(tmp_path, name, pp, ep, world, config):
    """And other ranks, as many as there are parts of the data, go on from the checkpoint."""
    folder = check(tmp_path, name, pp, ep, world, config)
    parts = parts_of(world, pp, config)
    check_resumed(tmp_path, folder, name, 1, min(parts, 2), parts, parts, "half")


def in_half(ep, config):
    """Losses and norms in half precision, whose masters are clipped."""
    init(1, ep, **config)
    model, optimizer = smp.DistributedModel(made("by hand")), None
    scale = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 256.0}} if "fp16" in config else {}
    optimizer = smp.DistributedOptimizer(optimizer_of(model.parameters()), **scale)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        found.append(train_step(model, batch_of(step, smp.data_rank())).reduce_mean().item())
        found.append(optimizer.clip_master_grads(0.2).item())
        optimizer.step()
    smp.shutdown()
    return found


def added_up(ep):
    """Gradients of two steps, averaged at the second; of a third that adds to them; of a call outside of steps."""
    init(1, ep)
    model = smp.DistributedModel(made("by hand"), backward_passes_per_step=2)
    for step in range(2):
        train_step(model, batch_of(step, smp.data_rank()))
    found = [norm_of(model)]
    smp.shutdown()
    init(1, ep)
    model = smp.DistributedModel(made("MixtralForCausalLM"), overlapping_allreduce=False)
    for step in range(2):
        train_step(model, batch_of(step, smp.data_rank()))
    found.append(norm_of(model))
    model.zero_grad()
    model(**batch_of(3, smp.data_rank())).loss.backward()
    found.append(norm_of(model))
    smp.shutdown()
    return found


def norm_of(model):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()


def drawn_late(ep, **config):
    """The first loss and norm of a model whose parameters have no memory before it is distributed; seeds of ranks differ."""
    init(1, ep, **config)
    torch.manual_seed(11 + smp.rank())
    with smp.delay_param_initialization():
        model = late()
    model = smp.DistributedModel(model)
    found = [train_step(model, batch_of(0, smp.data_rank())).reduce_mean().item(), norm_of(model)]
    smp.shutdown()
    return found


def late():
    import transformers

    config = transformers.MixtralConfig(**expert_models.SETTINGS["MixtralForCausalLM"])
    config._experts_implementation = config._attn_implementation = "eager"
    return transformers.MixtralForCausalLM(config)


def recomputed(ep, **config):
    """The first loss and norm, with blocks computed again in the backward pass."""
    init(1, ep, **config)
    model = smp.DistributedModel(made("MixtralForCausalLM"))
    for layer in model.get_module().model.layers:
        smp.set_activation_checkpointing(layer)
    found = [train_step(model, batch_of(0, smp.data_rank())).reduce_mean().item(), norm_of(model)]
    smp.shutdown()
    return found


VARIANTS = {
    "recomputed, in parts": lambda ep: recomputed(ep, fully_shard=True),
    "bf16": lambda ep: in_half(ep, {"bf16": True}),
    "fp16, in parts": lambda ep: in_half(ep, {"fp16": True, "fully_shard": True}),
    "fp16, state sharded": lambda ep: in_half(ep, {"fp16": True, "shard_optimizer_state": True}),
    "added up": lambda ep: added_up(ep),
    "drawn late, in parts": lambda ep: drawn_late(ep, fully_shard=True),
    "recomputed": lambda ep: recomputed(ep),
    "bf16, in parts": lambda ep: in_half(ep, {"bf16": True, "fully_shard": True}),
    "fp16": lambda ep: in_half(ep, {"fp16": True}),
    "drawn late": lambda ep: drawn_late(ep),
}
FIRST = tuple(VARIANTS)[:6]  # with each precision, and each of the other words, once or twice


def variants(rank, folder, ep, names):
    return {name: VARIANTS[name](ep) for name in names}


@pytest.mark.long
@pytest.mark.parametrize("names", [FIRST, pytest.param(tuple(VARIANTS)[6:], marks=pytest.mark.slow)])
def test_precisions_and_sums_of_several_steps_are_those_of_replicas(tmp_path, names):
    found = []
    for ep in (1, 2):
        folder = tmp_path / str(ep)
        folder.mkdir()
        found.append(run_workers(variants, 2, folder, ep, names))
    for whole, divided in zip(*found, strict=True):
        for what, expected in whole.items():
            assert all(map(math.isfinite, expected)), what  # a scale that no step survives trains nothing
            assert divided[what] == pytest.approx(expected, rel=2e-2 if "16" in what else 1e-5), what


class Whole(nn.Module):
    """No experts."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)


class Apart(nn.Module):
    """Experts that are modules of their own, with buffers."""

    def __init__(self):
        super().__init__()
        self.block = expert_models.LoopBlock()
        for expert in self.block.experts:
            expert.register_buffer("calls", torch.zeros(()))


class Both(nn.Module):
    """A container of experts with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.block = expert_models.LoopBlock()
        self.block.experts.register_parameter("scale", nn.Parameter(torch.ones(1)))


def hooked():
    model = ByHand()
    model.blocks[0].experts.up.register_hook(lambda grad: grad)
    return model


def tied():
    model = ByHand()
    model.blocks[1].experts = model.blocks[0].experts
    model.blocks[1].experts = Experts(4, 16, 24)
    model.blocks[1].experts.up = model.blocks[0].experts.up
    return model


class Sharing(Experts):
    """Experts with a parameter that all of them share."""


def sharing():
    register_experts(Sharing, ["up", "bias", "down"])
    model = ByHand()
    model.blocks[0].experts.__class__ = Sharing
    model.blocks[0].experts.scale = nn.Parameter(torch.ones(16))
    return model


def refuse(rank, folder):
    for degree, config, said in (
        (2, {"ddp": False}, "expert_parallel_degree: 2 requires ddp: true, found ddp: false"),
        (4, {}, r"expected a divisor of 2 \(data-parallel replicas 2 x context_parallel_degree 1"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            init(1, degree, **config)
    init(1, 2)
    for make, said in (
        (Whole, "found none: no module looks like experts"),
        (Apart, "found none: block.experts: there are buffers in its experts"),
        (lambda: ByHand(3), "blocks.0.experts: expected a number of experts that 2 divides, found 3"),
        (hooked, "blocks.0.experts: there are hooks on its gradients"),
        (tied, "blocks.0.experts: other modules share its parameters"),
        (sharing, "blocks.0.experts: all experts share scale; freeze it"),
        (lambda: ByHand(2 + 2 * smp.rank()), "expected the same experts on all replicas"),
    ):
        with pytest.raises(ConfigError, match=said):
            smp.DistributedModel(make())
    smp.shutdown()
    init(1, 2, fully_shard=True)
    with pytest.raises(
        ConfigError, match=r"found none: block\.experts: beside its experts their container has parameters"
    ):
        smp.DistributedModel(Both())
    smp.shutdown()
    init(1, 2)
    with pytest.raises(ConfigError, match="trace_execution_times: not with expert_parallel_degree above 1"):
        smp.DistributedModel(ByHand(), trace_execution_times=True)
    model = smp.DistributedModel(made("by hand"))
    with pytest.raises(ConfigError, match="found Adafactor, which may look at the whole of a parameter"):
        smp.DistributedOptimizer(torch.optim.Adafactor(model.parameters()))
    with pytest.raises(ConfigUnsupportedError, match="cpu: with expert_parallel_degree"):
        model.cpu()
    batch = batch_of(0, rank)
    with pytest.raises(StepError, match=r"found on ranks \[0, 1\]: .*train_step, with gradients; .*evaluate, with"):
        (evaluate if rank else train_step)(model, batch)
    with (
        pytest.raises(StepError, match=r"evaluate, with gradients; .*evaluate, without gradients"),
        torch.set_grad_enabled(rank == 0),
    ):
        evaluate(model, batch)
    loss = train_step(model, batch).reduce_mean().item()  # and it goes on
    smp.shutdown()
    return loss


def test_what_cannot_be_is_refused_by_name(tmp_path):
    found = run_workers(refuse, 2, tmp_path)
    assert sum(found) / 2 == pytest.approx(eager("by hand", 2)[0][0], rel=1e-6)


def miss(rank, folder):
    """State dicts are asked for by one rank alone."""
    init(1, 2, checkpoint_timeout=2)
    model = smp.DistributedModel(made("by hand"))
    said = ""
    if rank == 0:
        with pytest.raises(CheckpointError) as caught:
            model.state_dict()
        said = str(caught.value)
    smp.barrier(smp.WORLD)
    smp.shutdown()
    return said


@pytest.mark.long
def test_a_rank_that_does_not_come_is_named(tmp_path):
    said, _ = run_workers(miss, 2, tmp_path)
    assert "1" in said
