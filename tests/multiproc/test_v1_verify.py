"""`verify: true` in training scripts: nothing changes where the programs are right, all ranks stop before any update where they are not."""

import dataclasses
import warnings

import pytest
import torch
from executor_harness import Launch, run_workers
from torch import nn
from v1_harness import MB, batches, feed, make_model, reference, start, train_step

import smpc.v1 as smp
from smpc.errors import VerificationError
from smpc.v1.steps.programs import compiler, signature


def train(rank, folder, name, config):
    _, model, optimizer, kwargs = start(name, config=config)
    losses = []
    for ids in batches(kwargs):
        optimizer.zero_grad()
        losses.append(train_step(model, feed(ids), 1.0)["loss"].outputs)
        optimizer.step()
    return losses, model.state_dict()


@pytest.mark.long
@pytest.mark.parametrize("config", [{}, {"schedule": "zb-h1"}], ids=["1f1b", "zb-h1"])
def test_training_is_that_of_plain_pytorch(tmp_path, config):
    losses, state, _ = reference("gpt2")
    for found, merged in run_workers(train, 2, tmp_path, "gpt2", {"verify": True, **config}):
        for ours, theirs in zip(found, losses[0], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        for key, value in state.items():
            assert torch.equal(merged[key], value), key


class Restless(nn.Module):
    """Dropout, batch statistics, a generator of its own, and a counter in Python, which is called whole."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.generator = torch.Generator().manual_seed(1)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        noise = torch.randn(6, generator=self.generator)
        return nn.functional.dropout(self.norm(self.linear(x)), 0.3) * self.calls + noise


@smp.step
def restless_step(model, x):
    output = model(x)
    model.backward(output.square().mean())
    return output


def restless(rank, folder, verify):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "verify": verify})
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), Restless(), nn.Dropout(0.2), nn.Linear(6, 6), nn.Dropout(0.2), nn.BatchNorm1d(6)]
    module = nn.Sequential(*layers)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    outputs = []
    for _ in range(3):
        optimizer.zero_grad()
        outputs += restless_step(model, torch.linspace(-1, 1, 48).reshape(8, 6)).outputs
        optimizer.step()
    own = {name: parameter.detach() for name, parameter in model.local_named_parameters()}
    return outputs, own, model.state_dict(), torch.get_rng_state(), module[1].calls, module[1].generator.get_state()


@pytest.mark.long
def test_no_bit_of_training_depends_on_it(tmp_path):
    """Buffers, attributes, generators and what is drawn afterwards."""
    runs = []
    for verify in (False, True):
        folder = tmp_path / str(verify)
        folder.mkdir()
        runs.append(run_workers(restless, 2, folder, verify))
    for without, with_it in zip(*runs, strict=True):
        for a, b in zip(without[0], with_it[0], strict=True):
            assert torch.equal(a, b)
        for before, after in zip(without[1:3], with_it[1:3], strict=True):
            assert list(before) == list(after)
            assert all(torch.equal(before[key], after[key]) for key in before)
        assert torch.equal(without[3], with_it[3])
        assert without[4] == with_it[4]
        assert torch.equal(without[5], with_it[5])


def break_recordings():
    """Positions are subtracted in place of added in every recording of this process: in code of a module that is cut."""
    original = compiler.record_guarded

    def record(*args, **kwargs):
        recording = original(*args, **kwargs)
        trace = recording.trace
        added = [n for n in trace.nodes if trace.calls[n.call].fqn == "transformer" and n.target == "torch.Tensor.add"]
        (broken,) = [node for node in added if node.spec.dtype == "float32"]
        wrong = dataclasses.replace(broken, target="torch.Tensor.sub")
        nodes = tuple(wrong if node is broken else node for node in trace.nodes)
        return dataclasses.replace(recording, trace=dataclasses.replace(trace, nodes=nodes))

    compiler.record_guarded = record


def refused(rank, folder):
    break_recordings()
    module, model, _, kwargs = start("gpt2", config={"verify": True})
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    texts = []
    for _ in range(2):
        with pytest.raises(VerificationError) as caught:
            train_step(model, feed(batches(kwargs)[0]), 1.0)
        texts.append(str(caught.value))
    unchanged = all(torch.equal(p, before[name]) and p.grad is None for name, p in module.named_parameters())
    return texts, unchanged, model.partitioned


@pytest.mark.long
def test_all_ranks_stop_with_one_error_and_nothing_trained(tmp_path):
    first, second = run_workers(refused, 2, tmp_path)
    assert first == second
    texts, unchanged, partitioned = first
    assert unchanged
    assert not partitioned
    assert texts[0] == texts[1], "the next step looks again"
    assert (
        "the first difference in forward order: module transformer (GPT2Model), in its own code before it calls transformer.drop"
        in texts[0]
    )
    assert "(in the recording)" in texts[0]
    assert "nothing has been trained" in texts[0]


def one_replica_is_wrong(rank, folder):
    if rank >= 2:
        break_recordings()
    _, model, _, kwargs = start("gpt2", 4, config={"verify": True})
    train_step(model, feed(batches(kwargs)[0]), 1.0)


@pytest.mark.long
def test_other_replicas_do_not_wait(tmp_path):
    for status, log in Launch(one_replica_is_wrong, 4, tmp_path).wait():
        assert status not in (0, "hung")
        assert "module transformer (GPT2Model), in its own code before it calls transformer.drop" in log


def evaluates(rank, folder):
    _, model, _, kwargs = start("gpt2", config={"verify": True})
    model.eval()

    @smp.step
    def evaluate(model, ids):
        with torch.no_grad():
            return model(input_ids=ids, labels=ids).loss

    return evaluate(model, feed(batches(kwargs)[0])).outputs


@pytest.mark.long
def test_a_first_step_without_gradients(tmp_path):
    model, _, kwargs = make_model()
    expected = [model(input_ids=ids, labels=ids).loss for ids in batches(kwargs)[0].chunk(MB)]
    for found in run_workers(evaluates, 2, tmp_path):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def in_half(rank, folder, config, autocast):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "verify": True, **config})
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(4))))

    @smp.step
    def step(model, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x).square().mean()
        model.backward(loss)
        return loss

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(model, torch.linspace(-1, 1, 24).reshape(4, 6))
    return [str(w.message) for w in caught if "verify" in str(w.message)]


@pytest.mark.parametrize(
    ("config", "autocast"), [({"bf16": True}, False), ({}, True), ({"offload_activations": True}, False)]
)
def test_half_precision_and_autocast_pass(tmp_path, config, autocast):
    assert run_workers(in_half, 2, tmp_path, config, autocast) == [[], []]


def delayed(rank, folder):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "verify": True})
    with smp.delay_param_initialization():
        module = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    model = smp.DistributedModel(module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        restless_step(model, torch.ones(4, 6))
    return [str(w.message) for w in caught if "verify" in str(w.message)]


def test_delayed_parameters_are_said_not_to_be_verified(tmp_path):
    first, second = run_workers(delayed, 2, tmp_path)
    assert second == []
    assert len(first) == 1
    assert first[0].startswith(
        "verify: the programs have not been compared with the model: its initialization is delayed"
    )
    assert "smpc compile --verify" in first[0]


def too_large(rank, folder):
    def verify_compilation(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory")

    signature.verify_compilation = verify_compilation
    return in_half(rank, folder, {}, False)


def test_a_model_that_does_not_fit_is_said_not_to_be_verified(tmp_path):
    first, second = run_workers(too_large, 2, tmp_path)
    assert second == []
    (text,) = first
    assert "the whole model does not fit on cpu, with two sets of gradients; smpc compile --verify" in text
