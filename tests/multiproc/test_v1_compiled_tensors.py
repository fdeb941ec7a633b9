"""Tensor parallelism by the compiler in training scripts: no annotation, any arrangement of ranks, one process's results."""

import functools

import mixtures
import pytest
import torch
import transformers
from executor_harness import run_workers
from torch import nn

import smpc.v1 as smp
from smpc.errors import ConfigError, SmpcError

STEPS, HALF, SAMPLES, MB, LENGTH, VOCABULARY, HIDDEN = 20, 10, 8, 2, 6, 32, 32


def gpt2():
    """Fused projections are sliced in blocks, and the head is the embedding."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=2, n_embd=HIDDEN, n_head=4, vocab_size=VOCABULARY, n_positions=LENGTH,
            resid_pdrop=0, attn_pdrop=0, embd_pdrop=0, use_cache=False, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


@smp.step
def train_step(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


@smp.step
def evaluate(model, ids):
    return model(input_ids=ids).logits


def init(tp, pp, **config):
    settings = {"tensor_parallel_degree": tp, "pipeline_parallel_degree": pp, "microbatches": MB, "ddp": True}
    smp.init(settings | {"prescaled_batch": True, "tensor_parallel_plan": "auto"} | config)


def make(seed=1):
    """Every rank's own weights: the first rank's of a group count."""
    torch.manual_seed(seed + 10 * smp.tp_rank())
    model = smp.DistributedModel(gpt2())
    return model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))


def batches():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator) for _ in range(STEPS)]


def own_samples(batch):
    return batch.view(smp.rdp_size(), -1, LENGTH)[smp.rdp_rank()]


def steps(model, optimizer, some):
    losses = []
    for batch in some:
        optimizer.zero_grad()
        loss = train_step(model, own_samples(batch)).reduce_mean()
        optimizer.step()
        losses.append(torch.stack(smp.allgather(loss, smp.WORLD)).mean().item())
    return losses


def train(rank, folder, tp, pp, config):
    init(tp, pp, **config)
    model, optimizer = make()
    losses = steps(model, optimizer, batches()[:HALF])
    smp.save_checkpoint(str(folder), "half", model=model, optimizer=optimizer)
    losses += steps(model, optimizer, batches()[HALF:])
    norm = smp.optimizers.clip_grad_norm_(model.local_parameters(), 1e9)
    held = {name: p.numel() for name, p in model.local_named_parameters() if model.is_distributed_parameter(p)}
    logits = evaluate(model.eval(), own_samples(batches()[0])).concat()
    whole = model.state_dict() if smp.rdp_rank() == 0 else {}
    torch.save((losses, norm, held, logits, whole), folder / f"found{rank}.pt")
    smp.shutdown()


def resume(rank, folder, tp, pp, early, saved):
    """From the checkpoint of other ranks, before the first step or once slices are made."""
    init(tp, pp)
    model, optimizer = make(seed=5)
    if not early:
        steps(model, optimizer, batches()[:1])
    smp.resume_from_checkpoint(str(saved), "half")
    torch.save(steps(model, optimizer, batches()[HALF:]), folder / f"losses{rank}.pt")
    smp.shutdown()


def run(tmp_path, name, work, world, *args):
    folder = tmp_path / name
    folder.mkdir()
    run_workers(work, world, folder, *args)
    return folder


def found_by(tmp_path, name, tp, pp, rdp, config):
    world = tp * pp * rdp
    folder = run(tmp_path, name, train, world, tp, pp, config)
    return [torch.load(folder / f"found{rank}.pt") for rank in range(world)]


def without_keys_bias(name, tensor):
    """Scores do not depend on it: its gradient is rounding errors, of which AdamW makes whole steps."""
    return torch.cat([tensor[:HIDDEN], tensor[2 * HIDDEN :]]) if name.endswith("c_attn.bias") else tensor


@functools.cache
def eager():
    """Losses, norm of the last gradients, logits and weights of the plain model."""
    torch.manual_seed(1)
    model, losses = gpt2(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches():
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    with torch.no_grad():
        return losses, norm, model.eval()(input_ids=batches()[0]).logits, model.state_dict()


def check(tmp_path, tp, pp, rdp, config):
    losses, norm, logits, state = eager()
    together = found_by(tmp_path, "together", tp, pp, rdp, config)
    assert losses[-1] < losses[0]
    for rank, (own_losses, own_norm, _, own_logits, own_state) in enumerate(together):
        assert own_losses == pytest.approx(losses, rel=1e-4)
        torch.testing.assert_close(own_norm, norm, rtol=1e-3, atol=0)
        share = logits.view(rdp, -1, *logits.shape[1:])
        assert any(torch.allclose(own_logits, part, rtol=1e-3, atol=1e-3) for part in share), rank
        for name, tensor in own_state.items():
            pair = (without_keys_bias(name, value) for value in (tensor, state[name]))
            torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
    assert [len(found[4]) for found in together].count(len(state)) == tp * pp
    return together


def check_resumed(tmp_path, tp, pp, early):
    world = tp * pp
    folder = run(tmp_path, f"resumed{tp}{pp}", resume, world, tp, pp, early, tmp_path / "together")
    for rank in range(world):
        assert torch.load(folder / f"losses{rank}.pt") == pytest.approx(eager()[0][HALF:], rel=1e-4)


@pytest.mark.long
def test_twenty_steps_follow_one_process_and_go_on_as_one(tmp_path):
    together = check(tmp_path, 2, 2, 1, {})
    check_resumed(tmp_path, 1, 1, early=True)
    sizes = {name: parameter.numel() for name, parameter in gpt2().named_parameters()}
    for _, _, held, _, _ in together:
        assert sum(held.values()) == sum(sizes[name] for name in held) / 2
    names = {name for found in together for name in found[2]}
    assert names >= {name for name, parameter in gpt2().named_parameters() if parameter.dim() > 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "pp", "rdp", "config"),
    [
        (2, 1, 1, {"kernels": "cross_entropy"}),
        (4, 1, 1, {}),
        (2, 1, 2, {"tensor_parallel_outputs": "loss"}),
        (2, 1, 2, {"shard_optimizer_state": True}),
        (2, 2, 2, {}),
        (4, 2, 1, {}),
    ],
)
def test_other_arrangements_follow_one_process(tmp_path, tp, pp, rdp, config):
    check(tmp_path, tp, pp, rdp, config)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp", "early"), [(4, 1, True), (2, 1, False), (2, 2, False)])
def test_checkpoints_go_on_with_other_degrees(tmp_path, tp, pp, early):
    check(tmp_path, 2, 1, 1, {})
    check_resumed(tmp_path, tp, pp, early)


class Dropping(nn.Module):
    """Dropout of what is split, then of what is whole."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        inner = nn.functional.dropout(torch.relu(self.up(x)), 0.5)
        return nn.functional.dropout(self.down(inner), 0.5), inner


@smp.step
def drop(model, x):
    whole, inner = model(x)
    model.backward(whole.square().mean())
    return whole, inner


def record_another_model(rank, folder):
    init(2, 1, microbatches=1)
    width = 64 * (rank + 1)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64)))
    with pytest.raises(
        SmpcError, match=r"recorded different models, fingerprints by rank: .*build the same model on every rank"
    ):
        square(model, torch.ones(4, 64))
    smp.shutdown()


@smp.step
def square(model, x):
    model.backward(model(x).square().mean())


ADAGRAD = {"lr": 0.1, "initial_accumulator_value": 0.1}


def feed_forward():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).double()


@smp.step
def train_squares(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def squares():
    return torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def train_with_state_from_the_start(rank, folder, config):
    init(2, 1, **config)
    model = smp.DistributedModel(feed_forward())
    optimizer = smp.DistributedOptimizer(torch.optim.Adagrad(model.parameters(), **ADAGRAD))
    losses = []
    for x in squares():
        losses.append(train_squares(model, x).reduce_mean().item())
        optimizer.step()
        optimizer.zero_grad()
    torch.save((losses, model.state_dict(), optimizer.state_dict()["state"]), folder / f"adagrad{rank}.pt")
    smp.shutdown()


@pytest.mark.long
@pytest.mark.parametrize("config", [{}, {"shard_optimizer_state": True}])
def test_an_optimizer_that_has_state_before_the_first_step_keeps_a_slice_of_it(tmp_path, config):
    """torch's Adagrad makes sums of the shape of each parameter in its constructor, before there are slices."""
    plain = feed_forward()
    optimizer, losses = torch.optim.Adagrad(plain.parameters(), **ADAGRAD), []
    for x in squares():
        loss = plain(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    run_workers(train_with_state_from_the_start, 2, tmp_path, config)
    for rank in range(2):
        own_losses, own, state = torch.load(tmp_path / f"adagrad{rank}.pt")
        assert own_losses == pytest.approx(losses, rel=1e-12)
        torch.testing.assert_close(own, plain.state_dict(), rtol=1e-10, atol=1e-12)
    sums = [items["sum"] for items in optimizer.state_dict()["state"].values()]
    for items, whole in zip(state.values(), sums, strict=True):
        torch.testing.assert_close(items["sum"], whole, rtol=1e-10, atol=1e-12)


def test_different_models_in_one_group_are_refused(tmp_path):
    assert run_workers(record_another_model, 2, tmp_path) == [None] * 2


def draw_and_refuse(rank, folder):
    """Ranks come with other random states and with their own weights; then what cannot go together is refused."""
    with pytest.raises(ConfigError, match="prescaled_batch: true"):
        init(2, 1, prescaled_batch=False)
    init(2, 1, tensor_parallel_plan={"up": "colwise", "down": "rowwise"}, microbatches=1)
    with smp.tensor_parallelism():
        declared = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=r"found 0 and 0 more; leave out smp.tensor_parallelism"):
        smp.DistributedModel(declared)
    with pytest.raises(ConfigError, match=r"'down': expected the name of a module or parameter, found none that fits"):
        smp.DistributedModel(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(ConfigError, match="trace_execution_times: not with tensor_parallel_plan"):
        smp.DistributedModel(Dropping(), trace_execution_times=True)
    torch.manual_seed(rank)
    model = smp.DistributedModel(Dropping())
    whole, inner = (value.concat() for value in drop(model, torch.ones(4, 64)))
    everyones = smp.allgather((whole, inner), smp.WORLD)
    assert torch.equal(everyones[0][0], everyones[1][0])
    assert torch.equal(everyones[0][1], everyones[1][1])
    assert whole.any()
    kept = inner.bool()
    assert not torch.equal(kept[:, :32], kept[:, 32:])
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes == {"up.weight": (32, 64), "up.bias": (32,), "down.weight": (64, 32), "down.bias": (64,)}
    assert list(model.default_reducer_named_parameters()) == []
    optimizer = smp.DistributedOptimizer(torch.optim.Adafactor(model.parameters()))
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_degree: .*found Adafactor, which gives other values to the halves"
    ):
        optimizer.step()
    smp.shutdown()


def test_random_numbers_agree_and_what_does_not_go_together_is_refused(tmp_path):
    assert run_workers(draw_and_refuse, 2, tmp_path) == [None] * 2


@smp.step
def step_of_batches(model, batch):
    loss = model(**batch).loss
    model.backward(loss)
    return loss


def first_lengths(rank, folder):
    """Replicas whose first batches have other lengths, for which layouts of their own would be best."""
    init(2, 1)
    model = smp.DistributedModel(mixtures.made("MixtralForCausalLM"))
    found = []
    for step in range(2):
        found.append(step_of_batches(model, mixtures.batch_of(step, smp.rdp_rank())).reduce_mean().item())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
    smp.shutdown()
    return found, norm


@pytest.mark.long
def test_replicas_whose_first_batches_differ_run_what_the_first_program_has_decided(tmp_path):
    """The recording of a replica's own batch came before parameters were laid out, and was run after."""
    found = run_workers(first_lengths, 4, tmp_path)
    model, losses = mixtures.made("MixtralForCausalLM"), {}
    for step in range(2):
        for part in range(2):
            whole = mixtures.batch_of(step, part)
            for index in range(MB):
                loss = model(**{key: value.chunk(MB)[index] for key, value in whole.items()}).loss
                (loss / MB / 2).backward()
                losses[step, part] = losses.get((step, part), 0) + loss.item() / MB
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
    for rank, (own, own_norm) in enumerate(found):
        assert own == pytest.approx([losses[step, rank // 2] for step in range(2)], rel=1e-6)
        assert own_norm == pytest.approx(norm, rel=1e-5)
