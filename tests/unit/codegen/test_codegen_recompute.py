"""Running checkpointed regions: the same values, gradients, random numbers and buffers as without."""

import threading

import pytest
import torch
from torch import nn
from torch.utils import checkpoint

from smpc.codegen.recompute import Checkpointing, buffer_owners, may_checkpoint, run_checkpointed


class Noisy(nn.Module):
    """Dropout, BatchNorm, a buffer that takes part in the result, and one that is rebound."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.ones(4))
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        self.count = self.count + 1
        self.scale.mul_(2)
        return nn.functional.dropout(self.norm(self.linear(x)) * self.scale.clone() * self.count, 0.5)


def owners(module):
    return buffer_owners(module, [name for name, _ in module.named_buffers()])


def train(run, steps=3):
    """Gradients, buffers and the next random number after several forwards and then their backwards."""
    torch.manual_seed(0)
    module = Noisy()
    x = torch.randn(5, 4, requires_grad=True)
    outputs = [run(module, x) for _ in range(steps)]
    for output in outputs:
        output.pow(2).sum().backward()
    found = {"x": x.grad, "next": torch.rand(3)}
    found |= {name: parameter.grad for name, parameter in module.named_parameters()}
    found |= {name: buffer.clone() for name, buffer in module.named_buffers()}
    return module.runs, found


def test_everything_is_as_without():
    runs, expected = train(lambda module, x: module(x))
    again, found = train(lambda module, x: run_checkpointed(module, x, buffers=owners(module)))
    assert (runs, again) == (3, 6)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_plain_checkpoints_change_buffers_twice():
    """What the difference to torch's own is: the test above would fail with it."""
    _, expected = train(lambda module, x: module(x), steps=1)
    _, found = train(lambda module, x: checkpoint.checkpoint(module, x, use_reentrant=False), steps=1)
    assert found["count"] == 2 * expected["count"]
    assert not torch.equal(found["norm.running_mean"], expected["norm.running_mean"])


def test_random_state_can_be_left_alone():
    torch.manual_seed(0)
    x = torch.ones(64, requires_grad=True)
    draw = lambda x: nn.functional.dropout(x, 0.5) * x  # noqa: E731
    y = run_checkpointed(draw, x, preserve_rng_state=False)
    y.sum().backward()
    kept = y.detach() != 0
    assert not torch.equal(x.grad != 0, kept)  # another mask
    x.grad = None
    y = run_checkpointed(draw, x)
    y.sum().backward()
    assert torch.equal(x.grad != 0, y.detach() != 0)


def test_autocast_state_is_that_of_the_first_run():
    linear, seen = nn.Linear(4, 4), []

    def run(x):
        out = linear(x)
        seen.append(out.dtype)
        return out.float() * out.float()

    with torch.autocast("cpu", torch.bfloat16):
        y = run_checkpointed(run, torch.ones(2, 4))
    y.sum().backward()
    assert seen == [torch.bfloat16] * 2


def test_without_gradients_it_is_a_call():
    module = Noisy()
    with torch.no_grad():
        y = run_checkpointed(module, torch.ones(2, 4), buffers=owners(module))
    assert not y.requires_grad
    assert module.runs == 1


def test_two_names_of_one_buffer_are_one():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("a", torch.zeros(()))
            self.register_buffer("b", self.a)

        def forward(self, x):
            self.a.add_(1)
            return (x * self.b.clone()).tanh()

    module = Twice()
    assert [name for _, name in buffer_owners(module, ["a"])] == ["a", "b"]
    x = torch.ones(1, requires_grad=True)
    outputs = [run_checkpointed(module, x, buffers=buffer_owners(module, ["b"])) for _ in range(2)]
    sum(outputs).backward()
    expected = sum(n * (1 - torch.tanh(torch.tensor(float(n))) ** 2) for n in (1, 2))
    assert x.grad.item() == pytest.approx(expected.item(), rel=1e-6)
    assert module.a is module.b
    assert module.a == 2


def test_a_region_that_fails_leaves_buffers_as_they_were():
    module = Noisy()
    fail = []

    def run(x):
        y = module(x)
        if fail:
            raise ValueError("the second run")
        return y.exp()

    y = run_checkpointed(run, torch.ones(2, 4), buffers=owners(module))
    before = dict(module.named_buffers())
    fail.append(1)
    with pytest.raises(ValueError, match="the second run"):
        y.sum().backward()
    assert all(module.get_buffer(name) is buffer for name, buffer in before.items())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_others_become_the_same(reentrant):
    """In one graph: the gradient of a weight that is used outside too comes once, and hooks on it run once."""
    weight, runs, arrived = nn.Parameter(torch.randn(4)), [], []
    weight.register_hook(lambda grad: arrived.append(1))

    def region(x):
        runs.append(1)
        return (x * weight).tanh() * 2

    x, kept = torch.randn(4, requires_grad=True), []
    with Checkpointing(kept):
        y = checkpoint.checkpoint(region, x, use_reentrant=reentrant)
        nested = checkpoint.checkpoint(
            lambda z: checkpoint.checkpoint(region, z, use_reentrant=True), y, use_reentrant=False
        )
    assert [value is given for value, given in zip(kept, (x, y), strict=True)] == [True, True]
    (nested * weight).sum().backward()
    assert len(arrived) == 1
    assert len(runs) == 2 + 2  # both once again: the outer one stops when it knows what the inner one reads
    expected = torch.autograd.grad((region(region(x)) * weight).sum(), (x, weight))
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(weight.grad, expected[1])
    assert checkpoint.CheckpointFunction.__name__ == "CheckpointFunction"


def test_reentrant_checkpoints_without_a_gradient_to_pass_on_have_none():
    weight = nn.Parameter(torch.ones(2))
    with Checkpointing():
        y = checkpoint.checkpoint(lambda x: x * weight, torch.ones(2), use_reentrant=True)
        z = checkpoint.checkpoint(lambda x: x * weight, torch.ones(2), use_reentrant=False)
    assert (y.requires_grad, z.requires_grad) == (False, True)


def test_threads_enter_and_leave_in_any_order():
    """Tensor-parallel ranks may be threads: the last to leave restores torch's functions, and none sees another's context."""
    entered, left = threading.Event(), threading.Event()
    original = checkpoint.CheckpointFunction, checkpoint._checkpoint_without_reentrant_generator
    kept = []

    def other():
        with Checkpointing(kept):
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=other)
    with Checkpointing():
        thread.start()
        entered.wait(10)
    x = torch.ones(3, requires_grad=True)
    checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    assert not kept
    left.set()
    thread.join()
    assert original == (checkpoint.CheckpointFunction, checkpoint._checkpoint_without_reentrant_generator)
    torch.testing.assert_close(x.grad, torch.cos(x.detach()))


class ChecksOut(nn.Linear):
    """A module of somebody's own."""


def test_code_of_torch_alone_asks_for_no_checkpoint():
    plain = nn.Sequential(nn.Linear(2, 2), nn.GELU())
    assert not may_checkpoint([plain], "return self[0](x)")
    assert may_checkpoint([plain], "return function('package.Square.apply')(x)")
    assert may_checkpoint([nn.Sequential(plain, ChecksOut(2, 2))], "")
    hooked = nn.Sequential(nn.Linear(2, 2))
    hooked[0].register_forward_hook(lambda module, args, output: output)
    assert may_checkpoint([hooked], "")
    patched = nn.Linear(2, 2)
    patched.forward = lambda x: x
    assert may_checkpoint([patched], "")
