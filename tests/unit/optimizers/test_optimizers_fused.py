"""The fused optimizers are torch optimizers: groups, states, closures, schedulers, what they refuse."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from smpc.errors import CheckpointError, ConfigError, ConfigUnsupportedError, UsageError
from smpc.optimizers import FusedAdamW, FusedLamb, FusedNovoGrad

KINDS = (FusedAdamW, FusedLamb, FusedNovoGrad)
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def leaves(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(params, seed):
    generator = torch.Generator().manual_seed(100 + seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def run(optimizer, params, first, last):
    for step in range(first, last):
        give_gradients(params, step)
        optimizer.step()


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masters", [False, True], ids=["plain", "masters"])
def test_a_saved_state_continues_bit_by_bit(kind, dtype, masters):
    params = leaves((5, 3), (7,), (), dtype=dtype)
    options = {"lr": 1e-2, "master_weights": masters}
    optimizer = kind(params, **options)
    run(optimizer, params, 0, 3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others = [nn.Parameter(p.detach().clone()) for p in params]
    loaded = kind(others, **options)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert all(value.dtype == torch.float32 for state in loaded.state.values() for value in state.values())
    run(optimizer, params, 3, 6)
    run(loaded, others, 3, 6)
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))
    assert [float(loaded.state[p]["step"]) for p in others] == [6.0, 6.0, 6.0]


@every_kind
def test_copies_and_pickles_go_on_alike(kind):
    params = leaves((4, 4))
    optimizer = kind(params, lr=1e-2)
    run(optimizer, params, 0, 2)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        own = other.param_groups[0]["params"]
        run(other, own, 2, 4)
        kept = copy.deepcopy(optimizer)
        run(kept, kept.param_groups[0]["params"], 2, 4)
        assert torch.equal(own[0], kept.param_groups[0]["params"][0])


@every_kind
def test_state_hooks_see_and_change_the_state(kind):
    params = leaves((3,), dtype=torch.float16)
    optimizer = kind(params)
    run(optimizer, params, 0, 1)
    seen = []

    def double(_, state_dict):
        state = {key: {**items, "exp_avg": items["exp_avg"] * 2} for key, items in state_dict["state"].items()}
        return {**state_dict, "state": state}

    other = kind(params)
    other.register_load_state_dict_pre_hook(double)
    other.register_load_state_dict_post_hook(lambda given: seen.append(given.state[params[0]]["exp_avg"].clone()))
    other.load_state_dict(optimizer.state_dict())
    assert torch.equal(seen[0], optimizer.state[params[0]]["exp_avg"] * 2)
    assert seen[0].dtype == torch.float32


def test_apex_states_count_steps_in_groups():
    params = leaves((3,), (4,))
    ours = FusedLamb(params)
    run(ours, params, 0, 4)
    state = ours.state_dict()
    apex = {
        "state": {key: {k: v for k, v in items.items() if k != "step"} for key, items in state["state"].items()},
        "param_groups": [{"step": 4, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "params": [0, 1]}],
    }
    loaded = FusedLamb(params)
    loaded.load_state_dict(apex)
    assert [float(loaded.state[p]["step"]) for p in params] == [4.0, 4.0]
    assert "step" not in loaded.param_groups[0]
    assert loaded.param_groups[0]["max_grad_norm"] == 1.0  # what the state lacks


@every_kind
def test_states_that_do_not_fit_change_nothing(kind):
    params = leaves((3,), (4,))
    optimizer = kind(params)
    run(optimizer, params, 0, 1)
    state = optimizer.state_dict()
    fresh = kind(params)
    lacking = {key: {k: v for k, v in items.items() if k != "exp_avg"} for key, items in state["state"].items()}
    with pytest.raises(CheckpointError, match="expected exp_avg in the state of parameter 0, found"):
        fresh.load_state_dict({**state, "state": lacking})
    with pytest.raises(CheckpointError, match=r"expected exp_avg of parameter 0 with shape \(3,\), found \(4,\)"):
        fresh.load_state_dict({**state, "state": {0: state["state"][1]}})
    with pytest.raises(ValueError, match="doesn't match the size"):
        kind(params[:1]).load_state_dict(state)
    assert not fresh.state


@every_kind
def test_missing_gradients_are_skipped_and_their_steps_not_counted(kind):
    first, second = leaves((3,), (4,))
    optimizer = kind([first, second], lr=0.1)
    before = second.detach().clone()
    give_gradients([first], 0)
    optimizer.step()
    assert torch.equal(second, before)
    assert second not in optimizer.state
    give_gradients([first, second], 1)
    optimizer.step()
    assert float(optimizer.state[first]["step"]) == 2.0
    assert float(optimizer.state[second]["step"]) == 1.0
    alone = nn.Parameter(before.clone())
    other = kind([alone], lr=0.1, **({"max_grad_norm": None} if kind is FusedLamb else {}))
    if kind is not FusedLamb:  # whose clipping depends on the other gradient
        alone.grad = second.grad
        other.step()
        torch.testing.assert_close(alone, second)


@every_kind
def test_groups_have_options_of_their_own(kind):
    a, b = leaves((3,), (3,))
    b.data.copy_(a.data)
    optimizer = kind([a], lr=0.1)
    optimizer.add_param_group({"params": b, "lr": 0.0})
    before = b.detach().clone()
    give_gradients([a, b], 0)
    optimizer.step()
    assert torch.equal(b, before)
    assert not torch.equal(a, before)
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        optimizer.add_param_group({"params": [a]})
    named = kind([("a", a), ("b", b)])
    assert named.param_groups[0]["param_names"] == ["a", "b"]


@every_kind
def test_closures_compute_with_gradients(kind):
    (p,) = leaves((3,))
    optimizer = kind([p], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]


@every_kind
def test_schedulers_and_rates_that_are_tensors(kind):
    first, second = leaves((5,)), leaves((5,))
    ours, other = kind(first, lr=0.1), kind(second, lr=torch.tensor(0.1))
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in (ours, other)]
    for step in range(3):
        for optimizer, params, scheduler in zip((ours, other), (first, second), schedulers, strict=True):
            run(optimizer, params, step, step + 1)
            scheduler.step()
    torch.testing.assert_close(first[0], second[0])
    assert ours.param_groups[0]["lr"] == pytest.approx(0.0125)


@every_kind
def test_zero_grad_does_as_the_optimizer_was_told(kind):
    (p,) = leaves((3,))
    for choice in (True, False):
        optimizer = kind([p], set_grad_none=choice)
        give_gradients([p], 0)
        optimizer.zero_grad()
        assert (p.grad is None) is choice
        give_gradients([p], 0)
        optimizer.zero_grad(not choice)
        assert (p.grad is None) is not choice


@every_kind
def test_layouts_and_empty_tensors(kind):
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(6, 8, generator=generator)
    rows = [whole.t(), whole[:, ::2], torch.empty(0, 3), torch.tensor(2.0)]
    params = [nn.Parameter(x.detach()) for x in rows]
    plain = [nn.Parameter(x.detach().clone(memory_format=torch.contiguous_format)) for x in rows]
    params[1] = nn.Parameter(whole.clone()[:, ::2].detach())
    optimizer, other = kind(params, lr=0.1), kind(plain, lr=0.1)
    for step in range(3):
        give_gradients(plain, step)
        for p, q in zip(params, plain, strict=True):
            p.grad = q.grad.clone()
        optimizer.step()
        other.step()
    for p, q in zip(params, plain, strict=True):
        torch.testing.assert_close(p, q)


@every_kind
def test_sparse_gradients_are_refused_before_anything_changes(kind):
    embedding = nn.Embedding(4, 3, sparse=True)
    linear = nn.Linear(3, 1)
    params = [*linear.parameters(), *embedding.parameters()]
    optimizer = kind(params)
    before = [p.detach().clone() for p in params]
    linear(embedding(torch.tensor([1, 2]))).sum().backward()
    with pytest.raises(UsageError, match=r"expected dense gradients, found one of layout torch.sparse_coo .*\(4, 3\)"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    assert not optimizer.state


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (FusedAdamW, {"lr": -1.0}, "expected lr >= 0, found -1.0"),
        (FusedAdamW, {"lr": float("nan")}, "expected lr >= 0, found nan"),
        (FusedAdamW, {"lr": torch.ones(2)}, r"one element, found shape \(2,\)"),
        (FusedAdamW, {"lr": torch.tensor(-1.0)}, "expected lr >= 0, found tensor"),
        (FusedLamb, {"betas": (0.9, 1.0)}, r"expected betas to be two numbers from 0 to below 1, found \(0.9, 1.0\)"),
        (FusedLamb, {"betas": 0.9}, "expected betas to be two numbers"),
        (FusedLamb, {"eps": -1.0}, "expected eps >= 0, found -1.0"),
        (FusedLamb, {"weight_decay": "no"}, "expected weight_decay >= 0, found 'no'"),
        (FusedLamb, {"max_grad_norm": -1.0}, "expected max_grad_norm to be None or at least 0, found -1.0"),
        (FusedLamb, {"shard_group": 3}, "expected shard_group to be a function .* found int"),
        (FusedLamb, {"norm_group": 3}, "expected norm_group to be a torch.distributed.ProcessGroup, found int"),
        (FusedNovoGrad, {"norm_type": 1}, "expected norm_type 2, or 0 for the largest magnitude, found 1"),
        (FusedNovoGrad, {"kernel": "fast"}, "expected kernel to be None, True or False, found 'fast'"),
    ],
)
def test_bad_options(kind, options, text):
    with pytest.raises(ConfigError, match=text):
        kind(leaves((3,)), **options)


@every_kind
def test_bad_parameters(kind):
    with pytest.raises(ConfigError, match=r"found torch.complex64 with shape \(2,\)"):
        kind([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    with pytest.raises(ConfigError, match="expected parameters to be tensors, found int"):
        kind([3])
    with pytest.raises(ConfigError, match="fixed order"):
        kind([{"params": set(leaves((2,)))}])
    with pytest.raises(ValueError, match="empty parameter list"):
        kind([])
    optimizer = kind(leaves((2,)))
    with pytest.raises(ConfigError, match=r"eps.*\n.*expected parameters of dtype"):  # all faults at once
        optimizer.add_param_group({"params": [torch.zeros(2, dtype=torch.int64)], "eps": -1})
    assert len(optimizer.param_groups) == 1


def test_options_that_apex_refuses_or_reads_otherwise():
    for kind in (FusedLamb, FusedNovoGrad):
        with pytest.raises(ConfigUnsupportedError, match="expected amsgrad False, found True"):
            kind(leaves((3,)), amsgrad=True)
    with pytest.warns(UserWarning, match="max_grad_norm=0 means no clipping"):
        optimizer = FusedLamb(leaves((3,)), max_grad_norm=0)
    params = optimizer.param_groups[0]["params"]
    unlimited = [nn.Parameter(p.detach().clone()) for p in params]
    run(optimizer, params, 0, 2)
    run(FusedLamb(unlimited, max_grad_norm=None), unlimited, 0, 2)
    assert torch.equal(params[0], unlimited[0])
