"""What goes wrong in a training script is one clear error on every rank."""

import pytest
import torch
from executor_harness import Launch, run_workers
from torch import nn
from v1_harness import LAST_FIRST, MB, batches, feed, make_model, start, train_step

import smpc.v1 as smp
from smpc.errors import ConfigError, StepError, TraceError, UsageError


@smp.step
def forgets_the_model(model, ids):
    return ids.sum()


@smp.step
def calls_twice(model, ids):
    return model(input_ids=ids).logits.sum() + model(input_ids=ids).logits.sum()


@smp.step
def backward_twice(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    model.backward(loss)


@smp.step
def not_scalar(model, ids):
    model.backward(model(input_ids=ids).logits)


@smp.step(non_split_inputs=["flags"])
def sometimes_trains(model, ids, flags):
    loss = model(input_ids=ids, labels=ids).loss
    if flags["train"]:
        model.backward(loss)
    return loss


@smp.step
def returns_a_set(model, ids):
    return {"loss": model(input_ids=ids, labels=ids).loss, "sizes": {len(ids), 0}}


@smp.step
def returns_a_generator(model, ids):
    return model(input_ids=ids, labels=ids).loss, (n for n in range(3))


@smp.step
def wants_gradients(model, embeddings):
    return model(inputs_embeds=embeddings).logits


def misuse(rank, folder, by_hand):
    module, model, optimizer, kwargs = start(by_hand=by_hand)
    ids = batches(kwargs)[0]
    with pytest.raises(StepError, match="outside a step"):
        model(input_ids=ids)
    with pytest.raises(StepError, match="outside a step"):
        model.backward(torch.ones(1))
    with pytest.raises(UsageError, match="shares parameters with another DistributedModel"):
        smp.DistributedModel(module)
    with pytest.raises(ConfigError, match="trace_execution_times: must be False if trace_device is 'cpu'"):
        smp.DistributedModel(nn.Linear(1, 1), trace_execution_times=True, trace_device="cpu")
    errors = [
        (lambda: train_step(model, feed(ids[:6]), 1.0), r"argument ids: size 6 of axis 0"),
        (lambda: forgets_the_model(model, feed(ids)), "without calling the model"),
        (lambda: calls_twice(model, feed(ids)), "calls the model twice"),
        (lambda: backward_twice(model, feed(ids)), "backward twice"),
        (lambda: not_scalar(model, feed(ids)), "reduce it to one"),
        (lambda: wants_gradients(model, feed(torch.randn(8, 4, 32, requires_grad=True))), "requires grad"),
        (lambda: returns_a_set(model, feed(ids)), r"found as \['sizes'\] a set"),
        (lambda: returns_a_generator(model, feed(ids)), r"cannot be sent .*, as \[1\] a generator"),
    ]
    for call, message in errors:
        with pytest.raises(StepError, match=message):  # the same on every rank, and the next step goes on
            call()
    optimizer.zero_grad()
    for _ in range(2):
        sometimes_trains(model, feed(ids), {"train": False})
    with pytest.raises(StepError, match="its earlier calls did not"):
        sometimes_trains(model, feed(ids), {"train": True})
    assert all(parameter.grad is None for parameter in model.parameters())
    return train_step(model, feed(ids), 1.0)["loss"].outputs


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize("by_hand", [None, LAST_FIRST], ids=["auto", "by hand"])
def test_misuse_is_one_clear_error_on_every_rank(tmp_path, by_hand):
    first, second = run_workers(misuse, 2, tmp_path, by_hand)
    model, _, kwargs = make_model()
    for i, part in enumerate(batches(kwargs)[0].chunk(MB)):
        loss = model(input_ids=part, labels=part).loss.detach()
        assert torch.equal(first[i], loss)
        assert torch.equal(second[i], loss)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x = -x if x.sum() > 0 else x
        return x


@smp.step
def forward_only(model, x):
    return model(x)


def untraceable(rank, folder):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = smp.DistributedModel(Branches())
    with pytest.raises(TraceError, match="test_v1_misuse"):
        forward_only(model, torch.randn(4, 4))
    return True


def test_a_model_that_cannot_be_recorded_is_an_error_everywhere(tmp_path):
    assert run_workers(untraceable, 2, tmp_path) == [True, True]


class LossError(ArithmeticError):
    pass


def failing(rank, folder, place, by_hand):
    _module, model, _optimizer, kwargs = start(by_hand=by_hand)
    ids = batches(kwargs)[0]

    @smp.step
    def explode(model, ids):
        if place == "before the model" and smp.pp_rank() == 0:
            raise LossError("bomb")
        loss = model(input_ids=ids, labels=ids).loss
        if place == "after the model":
            raise LossError("bomb")
        model.backward(loss)
        return loss

    train_step(model, feed(ids), 1.0)
    explode(model, feed(ids))


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("place", "by_hand", "culprit"),
    [("before the model", None, 0), ("after the model", None, 1), ("after the model", LAST_FIRST, 0)],
    ids=["before", "after", "after by hand"],
)
def test_an_exception_ends_all_ranks_with_its_traceback(tmp_path, place, by_hand, culprit):
    results = Launch(failing, 2, tmp_path, place, by_hand).wait()
    for rank, (status, log) in enumerate(results):
        assert status == 1, f"rank {rank}: {status}\n{log}"
        assert 'raise LossError("bomb")' in log, log
    assert "another rank failed first" in results[1 - culprit][1]


def unequal_modes(rank, folder):
    _module, model, _optimizer, kwargs = start()
    ids = batches(kwargs)[0]
    if rank == 1:
        model.eval()
    with pytest.raises(StepError, match="same mode on all ranks"):
        train_step(model, feed(ids), 1.0)
    model.train()
    train_step(model, feed(ids), 1.0)
    return True


@pytest.mark.long
def test_modes_that_differ_between_ranks_are_an_error(tmp_path):
    assert run_workers(unequal_modes, 2, tmp_path) == [True, True]
