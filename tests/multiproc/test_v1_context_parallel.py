"""Context parallelism in training scripts: no annotation, any arrangement of ranks, one process's results."""

import functools

import pytest
import torch
from context_models import MODELS, made
from executor_harness import run_workers

import smpc.v1 as smp
from smpc.errors import ConfigError, ConfigUnsupportedError, StepError

STEPS, HALF, MB, REPLICAS = 4, 2, 2, 2
SAMPLES = 4  # in a batch of all replicas
LENGTH, VOCABULARY = 16, 64


@smp.step
def train_step(model, batch):
    loss = model(**batch, use_cache=False).loss
    model.backward(loss)
    return loss


@smp.step
def logits_of(model, ids, mask):
    return model(input_ids=ids, attention_mask=mask, use_cache=False).logits


def batches():
    """Samples have padding of several lengths, and unequally many labels that count."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(STEPS):
        ids = torch.randint(3, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        mask = torch.ones_like(ids)
        for row, length in enumerate((16, 9, 13, 5)):
            mask[row, length:] = 0
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return found


def own(batch):
    """This rank's part of a batch."""
    return {name: value.view(smp.data_size(), -1, LENGTH)[smp.data_rank()] for name, value in batch.items()}


def model_and_optimizer(name):
    model, _ = made(MODELS[name])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


@functools.cache
def eager(name, replicas):
    """One process: the losses, the gradients of the first batch, and the parameters at the end, of all samples in the same microbatches."""
    model, optimizer = model_and_optimizer(name)
    losses, gradients = [], None
    for batch in batches():
        optimizer.zero_grad()
        parts = [{key: value.chunk(replicas * MB)[i] for key, value in batch.items()} for i in range(replicas * MB)]
        values = [model(**part, use_cache=False).loss for part in parts]
        loss = torch.stack(values).mean()
        loss.backward()
        gradients = gradients or {key: p.grad.clone() for key, p in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients, {key: p.detach().clone() for key, p in model.named_parameters()}


def init(pp, cp, **config):
    degrees = {"pipeline_parallel_degree": pp, "context_parallel_degree": cp, "microbatches": MB, "ddp": True}
    smp.init(degrees | config)


def wrapped(name, seed=0):
    model, _ = made(MODELS[name])
    if seed:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(seed)
    model = smp.DistributedModel(model)
    return model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))


def steps(model, optimizer, some):
    """Losses of the whole batches, and the gradients of the first one on this rank."""
    losses, gradients = [], None
    for batch in some:
        optimizer.zero_grad()
        loss = train_step(model, own(batch)).reduce_mean()
        gradients = gradients or {
            name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone()
            for name, p in model.local_named_parameters()
        }
        optimizer.step()
        losses.append(torch.stack(smp.allgather(loss, smp.WORLD)).mean().item())
    return losses, gradients


class Position:
    """Where a rank is in its data."""

    def __init__(self, place):
        self.place = place

    def state_dict(self):
        return self.place

    def load_state_dict(self, place):
        self.place = place


def train(rank, folder, name, pp, cp, config):
    init(pp, cp, **config)
    torch.manual_seed(rank)  # what a script does
    model, optimizer = wrapped(name)
    losses, gradients = steps(model, optimizer, batches()[:HALF])
    data = Position(-1 if smp.cp_rank() else 7)  # only the first one of a group counts
    smp.save_checkpoint(str(folder), "half", model=model, optimizer=optimizer, data=data)
    smp.save_checkpoint(str(folder), "whole", partial=False, model=model, optimizer=optimizer)
    losses += steps(model, optimizer, batches()[HALF:])[0]
    batch = own(batches()[0])
    logits = logits_of(model.eval(), batch["input_ids"], batch["attention_mask"]).concat()
    whole = model.state_dict()
    ranks = smp.data_rank(), smp.data_size(), smp.cp_rank(), smp.cp_size(), smp.get_cp_group()
    smp.shutdown()
    return losses, gradients, logits, whole, ranks


def resume(rank, folder, name, pp, cp, config, saved, tag, partial):
    init(pp, cp, **config)
    model, optimizer = wrapped(name, seed=0.1)
    data = Position(0)
    smp.resume_from_checkpoint(str(saved), tag, partial=partial, data=data if partial else None)
    assert data.place == (7 if partial else 0)
    losses = steps(model, optimizer, batches()[HALF:])[0]
    smp.shutdown()
    return losses


def near(own, expected, rel=1e-5):
    """Of what is all rounding errors (scores do not depend on the bias of keys) the size alone is the same."""
    torch.testing.assert_close(own, expected, rtol=0, atol=max(rel * expected.abs().max().item(), 1e-9))


def alike(whole, state, gradients):
    """Parameters after several updates, where AdamW does not make whole steps of rounding errors."""
    for name, value in state.items():
        counts = gradients[name].abs() > 1e-7
        torch.testing.assert_close(whole[name][counts], value[counts], rtol=1e-4, atol=1e-5)


def check(tmp_path, name, pp, cp, replicas=1, config=None):
    folder = tmp_path / "saved"
    folder.mkdir()
    found = run_workers(train, pp * cp * replicas, folder, name, pp, cp, config or {})
    losses, gradients, state = eager(name, replicas)
    seen = set()
    for own_losses, own_gradients, logits, whole, _ in found:
        assert own_losses == pytest.approx(losses, rel=1e-6)
        for key, gradient in own_gradients.items():
            near(gradient, gradients[key])
        alike(whole, state, gradients)
        seen.update(own_gradients)
        assert logits.shape == (SAMPLES // replicas, LENGTH, VOCABULARY)
    assert seen == set(gradients)
    return folder, found


def check_resumed(tmp_path, folder, name, pp, cp, tag, config=None):
    args = folder, tag, tag != "whole"
    for losses in run_workers(resume, pp * cp, tmp_path, name, pp, cp, config or {}, *args):
        assert losses == pytest.approx(eager(name, 1)[0][HALF:], rel=1e-5)


@pytest.mark.long
def test_two_ranks_train_as_one_process_and_others_go_on(tmp_path):
    folder, found = check(tmp_path, "llama_padded", 1, 2)
    assert [ranks for *_, ranks in found] == [(0, 1, place, 2, [0, 1]) for place in range(2)]
    assert torch.equal(found[0][2], found[1][2])
    check_resumed(tmp_path, folder, "llama_padded", 1, 1, "half")


@pytest.mark.long
def test_beside_a_pipeline(tmp_path):
    check(tmp_path, "llama_padded", 2, 2)


@pytest.mark.long
def test_beside_parameters_in_parts(tmp_path):
    check(tmp_path, "llama_padded", 1, 2, 2, {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.0})


@pytest.mark.slow
def test_others_go_on_from_a_pipeline(tmp_path):
    folder, _ = check(tmp_path, "llama_padded", 2, 2)
    check_resumed(tmp_path, folder, "llama_padded", 1, 2, "half")
    check_resumed(tmp_path, folder, "llama_padded", 2, 1, "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pp", "cp", "replicas", "config"),
    [
        ("gpt2", 1, 4, 1, {}),
        ("bert", 1, 2, 2, {"shard_optimizer_state": True}),
        ("llama", 1, 2, 2, {"fully_shard": True}),
        ("llama", 2, 2, 1, {"fully_shard": True}),
        ("qwen3", 1, 2, 2, {"placement_strategy": "spread"}),
        ("neox", 2, 2, 1, {"schedule": "interleaved-1f1b", "offload_activations": True}),
    ],
)
def test_other_arrangements(tmp_path, name, pp, cp, replicas, config):
    check(tmp_path, name, pp, cp, replicas, config)


@pytest.mark.slow
def test_beside_tensor_parallel_ranks(tmp_path):
    """Gradients are slices there; losses, and parameters after several updates, equal one process's."""
    config = {"tensor_parallel_degree": 2, "tensor_parallel_plan": "auto", "prescaled_batch": True}
    folder = tmp_path / "saved"
    folder.mkdir()
    losses, gradients, state = eager("llama_padded", 1)
    for own_losses, _, _, whole, ranks in run_workers(train, 4, folder, "llama_padded", 1, 2, config):
        assert own_losses == pytest.approx(losses, rel=1e-6)
        assert ranks[:2] == (0, 1)
        alike(whole, state, gradients)
    check_resumed(tmp_path, folder, "llama_padded", 1, 2, "half")


class Dropping(torch.nn.Module):
    """Dropout of slices, and of what every rank has whole."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, 8)

    def forward(self, ids):
        hidden = torch.nn.functional.dropout(self.embedding(ids), 0.5)
        return torch.nn.functional.dropout(self.head(hidden).mean(1), 0.5)


@smp.step
def drop(model, ids):
    found = model(ids)
    model.backward(found.square().mean())
    return found


@smp.step
def scaled(model, ids, factor):
    loss = (model(ids) * factor).sum()
    model.backward(loss)
    return loss


@smp.step
def masking(model, ids):
    loss = model(ids.masked_fill(torch.rand(ids.shape) < 0.5, 0)).sum()
    model.backward(loss)
    return loss


@smp.step
def judged(model, ids, criterion):
    loss = criterion(model(ids)).sum()
    model.backward(loss)
    return loss


def draw_and_refuse(rank, folder):
    """What a group must have alike, and what cannot be done with it."""
    for config, said in (
        ({"ddp": False}, "context_parallel_degree: 2 requires ddp: true, found ddp: false"),
        (
            {"tensor_parallel_degree": 2},
            "context_parallel_degree: 2 beside tensor_parallel_degree: 2 requires tensor_parallel_plan: auto",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            init(1, 2, **config)
    init(1, 2)
    torch.manual_seed(rank)
    for options in ({"trace_execution_times": True}, {"backward_passes_per_step": 2}):
        with pytest.raises(ConfigError, match=r"not with context_parallel|must be 1 with a degree above 1"):
            smp.DistributedModel(Dropping(), **options)
    model = smp.DistributedModel(Dropping())
    with pytest.raises(ConfigUnsupportedError, match="context_parallel_degree"):
        model.register_comm_hook(None, None)
    ids = torch.arange(4 * LENGTH).view(4, LENGTH) % VOCABULARY
    whole = []
    for step in range(3):
        torch.manual_seed(rank + step)  # a script that seeds its ranks apart
        whole.append(drop(model, ids).concat())
    gradient = model.get_module().head.weight.grad.clone()
    learned = torch.ones((), requires_grad=True)
    criterion = torch.nn.PReLU()
    for arguments, said in (
        (
            (scaled, ids.roll(rank), 1.0),
            r"found different values of ids on ranks \[0, 1\]; divide the data by smp.data_rank",
        ),
        ((scaled, ids[: 4 - 2 * rank], 1.0), "with arguments of the same shapes, and the model in the same modes"),
        ((scaled, ids, 1.0 + rank), "be given the same batch; found different values of factor"),
        ((masking, ids), "found different values of the model's arguments in microbatch 0"),
        ((scaled, ids, 1.0) if rank else (drop, ids), "call the same step function"),
        ((drop, ids[:, :-1]), "expected sequences of a length that"),
        ((scaled, ids, learned), "argument factor requires grad, but its gradient would not come back"),
        ((judged, ids, criterion), "expected a loss whose parameters belong to the model, found others"),
    ):
        torch.manual_seed(rank)
        function, *given = arguments
        with pytest.raises((StepError, ConfigError), match=said):
            function(model, *given)
    whole.append(drop(model, ids).concat())  # and it goes on
    smp.shutdown()
    return whole, gradient


def test_what_ranks_of_a_group_must_have_alike(tmp_path):
    (first, gradient), (second, other) = run_workers(draw_and_refuse, 2, tmp_path)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert torch.equal(gradient, other)
    assert not torch.equal(first[0], first[1])
