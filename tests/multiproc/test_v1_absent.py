"""What a script does with parameters that are on other ranks: right, or an error or a warning that says so."""

import copy
import functools
import math
import warnings

import mixtures
import numpy as np
import pytest
import torch
import torch.distributed as dist
from executor_harness import run_workers
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from v1_harness import MB, batches, feed, make_model, start, train_step

import smpc.v1 as smp
from smpc.errors import PeerError, UsageError


def scripts_lines(rank, folder):
    module, model, optimizer, kwargs = start()
    parameters, ids = list(model.parameters()), batches(kwargs)
    train_step(model, feed(ids[0]), 1.0)
    local = {id(p) for p in model.local_parameters()}
    absent = [p for p in parameters if id(p) not in local]
    other, name = absent[0], next(n for n, p in model.named_parameters() if p is absent[0])
    here = torch.ones(3, requires_grad=True)
    wrong = [
        lambda: sum(p.square().sum() for p in model.parameters()),  # a weight penalty
        lambda: torch.linalg.vector_norm(torch.stack([p.detach().norm() for p in model.parameters()])).item(),
        lambda: print(other.detach().norm()),
        lambda: copy.deepcopy(other.detach().norm()).tolist(),
        lambda: torch.save(other.detach().abs(), folder / "values.pt"),
        lambda: bool(other.detach().norm() > 0),
        lambda: other.detach().amax(),
        lambda: dist.all_reduce(other),
        lambda: torch._foreach_norm(parameters),
        lambda: parameters_to_vector(model.parameters()),
        lambda: vector_to_parameters(torch.ones(10**6), absent),
        lambda: other + 1,
        lambda: here.detach().add_(other),
        lambda: other.data.mean().item(),
        lambda: nn.functional.linear(torch.ones(2, 3), other),
        lambda: module(input_ids=ids[0]),
        lambda: torch.save(module.state_dict(), folder / "state.pt"),
        lambda: torch.save(module, folder / "module.pt"),
        lambda: setattr(other, "data", torch.ones(7, 7, 7)),
    ]
    for line in wrong:
        with pytest.raises(
            UsageError, match=rf"on pipeline ranks? .*{1 - rank}.*pipeline rank {rank} has no values of it"
        ):
            line()
    with pytest.raises(UsageError, match=f"^sum: parameter '{name}' is on pipeline rank {1 - rank}"):
        other.sum()
    with pytest.warns(UserWarning, match=r"but a sum over all of them \(a norm\) is that of this rank alone") as found:
        gradients = [p.grad for p in absent for _ in range(2)]
    assert [gradient.nbytes for gradient in gradients] == [0] * 2 * len(absent)
    assert [(gradient.shape, gradient.numel()) for gradient in gradients[::2]] == [(p.shape, p.numel()) for p in absent]
    with pytest.raises(UsageError, match=rf"^all_reduce: .*'{name}', which is on pipeline rank {1 - rank}"):
        dist.all_reduce(gradients[0])
    assert [w.filename for w in found] == [__file__], "once for each line that asks, and it is this one"
    group = optimizer.param_groups[0]
    rate, group["lr"] = group["lr"], 0.1 / sum(p.grad.square().sum().item() for p in parameters)
    with pytest.raises(UsageError, match=r"^optimizer\.step: lr: .* computed of what this rank has alone"):
        optimizer.step()
    group["lr"] = rate
    for line in wrong[:2]:  # a closure is the script's code, too
        with pytest.raises(UsageError, match=f"pipeline rank {rank} has no values of it"):
            optimizer.step(line)
    # What each rank does to its own parameters is done to all of them.
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        for parameter in model.parameters():
            parameter.mul_(0.5)
            parameter.data.add_(0.25)
            parameter.data = parameter.data.clone()
            nn.init.constant_(parameter[:0] if id(parameter) in local else parameter, 3.0)
        for parameter in model.local_parameters():
            parameter.data.numpy()[...] *= 1.5
        model.get_module().transformer.h[0].ln_1.weight[0] = 5.0
        model.get_module().transformer.h[1].ln_1.weight[0] = 5.0
        copied = copy.deepcopy(module)
        for ours, theirs in zip(copied.parameters(), model.parameters(), strict=True):
            ours.lerp_(theirs, 0.5)
        torch._foreach_mul_(parameters, 2.0)
        assert (other.nbytes, other.dim(), other.requires_grad, other.device.type) == (0, 2, True, "cpu")
        assert sum(p.numel() for p in parameters) == sum(p.numel() for p in make_model()[0].parameters())
        assert isinstance(other, nn.Parameter)
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        model.to("cpu").float()
    state = model.state_dict()
    model.cpu()
    assert type(other) is nn.Parameter
    assert math.isfinite(other.sum())
    train_step(model, feed(ids[1]), 1.0)
    assert other.nbytes == 0
    with pytest.raises(UsageError, match="is on pipeline rank"):
        other.sum()
    return state


@pytest.mark.long
def test_lines_that_use_parameters_of_other_ranks(tmp_path):
    """They counted as zero: a weight penalty, a norm, an average of weights silently covered one stage only."""
    first, second = run_workers(scripts_lines, 2, tmp_path)
    model, _, kwargs = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for ids in batches(kwargs)[0].chunk(MB):
        (model(input_ids=ids, labels=ids).loss / MB).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5).add_(0.25).mul_(1.5)
        for layer in model.transformer.h[:2]:
            layer.ln_1.weight[0] = 5.0
        for parameter in model.parameters():
            parameter.mul_(2.0)
    optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(first[name], value), name
        assert torch.equal(second[name], value), name


@smp.step
def with_penalty(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    loss = loss + sum(p.square().sum() for p in model.parameters())
    model.backward(loss)
    return loss


def penalty(rank, folder):
    _, model, _, kwargs = start()
    with_penalty(model, feed(batches(kwargs)[0]))


@pytest.mark.long
def test_a_weight_penalty_in_a_step_function_ends_the_job(tmp_path):
    """It had the last stage's parameters alone, in the loss and in the gradients."""
    with pytest.raises(
        AssertionError, match=r"square: parameter '\S+' is on pipeline rank 0, and pipeline rank 1 has no values"
    ):
        run_workers(penalty, 2, tmp_path)


class Stack(nn.Module):
    """Layers of which each of two stages has some. `tied`: the last layer has the weight of the first one, so both stages have it."""

    def __init__(self, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.head = nn.Linear(8, 20)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        return nn.functional.cross_entropy(self.head(torch.tanh(self.layers(self.embedding(ids)))), ids.flip(0))


@smp.step
def step_of_stack(model, ids):
    loss = model(ids)
    model.backward(loss)
    return loss


def trained(model, optimizer, train, line):
    """Two steps, after each of which a script has changed gradients and parameters by a `line`."""
    for number in range(2):
        optimizer.zero_grad()
        train(torch.arange(8).add(number))
        torch.manual_seed(number)
        line(model)
        optimizer.step()


def noise(model):
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p.grad), alpha=0.01)
        p.grad += 0.01 * torch.randn(p.grad.shape)
        p.data.mul_(torch.rand_like(p) * 0.01 + 0.99)


def adaptive_clipping(model):
    with torch.no_grad():
        for p in model.parameters():
            most = 0.1 * p.norm(dim=-1, keepdim=True).clamp(min=1e-3)
            p.grad.copy_(torch.where(p.grad.norm() > 0, p.grad * (most / p.grad.abs().mean()).clamp(max=1.0), p.grad))


def momentum(model):
    held = model.__dict__.setdefault("_held", {})
    for name, p in model.named_parameters():
        first, second = held.setdefault(name, (torch.zeros_like(p), torch.zeros_like(p)))
        first.mul_(0.9).add_(p.grad, alpha=0.1)
        second.mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
        p.grad = first / (second.sqrt() + 1e-3)
        p.data.addcdiv_(first, second.sqrt().add_(1.0), value=-0.1)


def momentum_of_lists(model):
    parameters = list(model.parameters())
    held = model.__dict__.setdefault("_held", [p.grad.clone() for p in parameters])
    torch._foreach_mul_(held, 0.9)
    torch._foreach_add_(held, [p.grad for p in parameters], alpha=0.1)
    with torch.no_grad():
        torch._foreach_add_(parameters, held, alpha=-0.1)


def rows_and_counts(model):
    with torch.no_grad():
        model.embedding.weight[0].zero_()
        model.head.weight[1] = model.head.weight[0]
        share = 1 - 100 / sum(p.numel() for p in model.parameters())
        for p in model.parameters():
            p.mul_(share).sub_(p.flatten().mean())


def summed_up(total):
    if smp.is_initialized():
        dist.all_reduce(total, group=smp.get_pp_process_group())
    return total


def clipped_by_all(model):
    total = summed_up(sum(p.grad.norm() ** 2 for p in model.parameters())) ** 0.5
    for p in model.parameters():
        p.grad.mul_((0.01 / total).clamp(max=1.0).item())


def weights_by_all(model):
    with torch.no_grad():
        total = summed_up(torch.stack(torch._foreach_norm(list(model.parameters()))).square().sum())
        for p in model.parameters():
            p.sub_(p, alpha=1e-3 * total.sqrt().item())


def clipped_alone(model):
    total = sum(p.grad.norm() ** 2 for p in model.parameters()) ** 0.5
    for p in model.parameters():
        p.grad.mul_((0.01 / total).clamp(max=1.0))


def clipped_by_a_number_alone(model):
    total = sum((p.grad**2).sum().item() for p in model.parameters()) ** 0.5
    for p in model.parameters():
        p.data.add_(p.grad, alpha=0.05 / total)


def averaged_alone(model):
    with torch.no_grad():
        mean = sum(p.abs().mean() for p in model.parameters()) / 12
        torch._foreach_mul_(list(model.parameters()), 1 - 0.1 * mean)


def total_of_floats(model):
    return math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))


def clipped_by_a_float_alone(model):
    most = min(1.0, 0.01 / total_of_floats(model))
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(most)


def clipped_by_numpy_alone(model):
    total = np.sqrt(sum((p.grad.numpy() ** 2).sum() for p in model.parameters()))
    torch._foreach_mul_([p.grad for p in model.parameters()], float(0.01 / total))


def clipped_past_a_float_alone(model):
    """One stage has more than this, the other has not."""
    total = total_of_floats(model)
    if total > 0.1:
        for p in model.parameters():
            p.grad.mul_(0.1 / total)


def stepped_by_a_float_alone(model):
    total = total_of_floats(model)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.01 / total)


def normalized_by_floats(model):
    for p in model.parameters():
        p.grad.div_(float(p.grad.norm()) + 1e-3)


def clipped_by_a_float_of_all(model):
    total = summed_up(torch.tensor(total_of_floats(model) ** 2)).sqrt().item()
    for p in model.parameters():
        p.grad.mul_(min(1.0, 0.01 / total))


def decayed_by_depth(model):
    for depth, p in enumerate(model.parameters()):
        p.grad.mul_(0.87**depth)


_RIGHT = (
    noise,
    adaptive_clipping,
    momentum,
    momentum_of_lists,
    rows_and_counts,
    clipped_by_all,
    weights_by_all,
    normalized_by_floats,
    clipped_by_a_float_of_all,
    decayed_by_depth,
)
_COMPARED = (clipped_by_a_float_alone, clipped_by_numpy_alone, clipped_past_a_float_alone, stepped_by_a_float_alone)
_REFUSED = (clipped_alone, clipped_by_a_number_alone, averaged_alone)
_LINES = {each.__name__: each for each in (*_RIGHT, *_REFUSED)}


def draws(rank, folder, config, name):
    """What differs from what one process draws."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": mixtures.MB, **config})
    model, plain = smp.DistributedModel(mixtures.made(name)), mixtures.made(name)
    mixtures.train_step(model, mixtures.batch_of(0, 0))
    for each in (model, plain):
        torch.manual_seed(5)
        named = sorted((name.removeprefix("module."), p) for name, p in each.named_parameters())
        for number, (_, p) in enumerate(named):
            nn.init.uniform_(p, -1, 1) if number % 2 else p.data.normal_()
            p.data.add_(torch.rand_like(p))
    state = model.state_dict()
    return [name for name, value in plain.named_parameters() if not torch.allclose(state[name], value)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "name"),
    [
        (
            {"tensor_parallel_degree": 2, "tensor_parallel_plan": "auto", "prescaled_batch": True, "ddp": True},
            "by hand",
        ),
        ({"expert_parallel_degree": 2, "ddp": True}, "by hand"),
        ({"expert_parallel_degree": 2, "ddp": True}, "listed"),
    ],
    ids=["tensors", "experts", "experts in lists"],
)
def test_slices_of_other_stages_draw_as_much_as_one_process(config, name, tmp_path):
    """They drew as much as a slice has, and from then on ranks drew other numbers."""
    assert run_workers(draws, 4, tmp_path, config, name) == [[]] * 4


def train_stack(rank, folder, config):
    warnings.simplefilter("ignore")
    smp.init(config)
    found = {}
    for line in _LINES:
        torch.manual_seed(0)
        model = smp.DistributedModel(Stack())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        shown = model.get_module()
        try:
            trained(shown, optimizer, lambda ids, model=model: step_of_stack(model, ids), _LINES[line])
            found[line] = model.state_dict()
        except UsageError as error:
            found[line] = str(error)
        smp.shutdown()
        smp.init(config)
    return found


@pytest.mark.long
def test_what_scripts_compute_of_parameters_of_other_ranks(tmp_path):
    """Between steps, as one process does it, or refused on all ranks: norms, noise and moments by hand were those of one stage."""
    by_rank = run_workers(train_stack, 2, tmp_path, {"pipeline_parallel_degree": 2, "microbatches": 1})
    for line in _LINES:
        torch.manual_seed(0)
        model = Stack()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trained(model, optimizer, lambda ids, model=model: model(ids).backward(), _LINES[line])
        for found in (of_rank[line] for of_rank in by_rank):
            if line in [each.__name__ for each in _REFUSED]:
                assert "that was computed of what this rank has alone, without" in found
                continue
            assert not isinstance(found, str), found
            for name, value in model.state_dict().items():
                torch.testing.assert_close(found[name], value, msg=lambda text, at=(line, name): f"{at}: {text}")


def train_compared(rank, folder, number, ends_in):
    warnings.simplefilter("ignore")
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 1})
    torch.manual_seed(0)
    model = smp.DistributedModel(Stack())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    ids = torch.arange(8)
    for _ in range(2):  # after the first step no rank has compared
        optimizer.zero_grad()
        step_of_stack(model, ids)
        normalized_by_floats(model)
        optimizer.step()
    _COMPARED[number](model)
    ends = {
        "step": lambda: step_of_stack(model, ids),
        "state_dict": model.state_dict,
        "checkpoint": lambda: smp.save_checkpoint(str(folder / "saved"), "now", partial=True, model=model),
    }
    with pytest.raises((UsageError, PeerError), match="of which ranks have slices or stages"):
        ends[ends_in]()
    return not (folder / "saved").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "ends_in"), [(0, "step"), (1, "state_dict"), (2, "step"), (2, "checkpoint"), (3, "step")]
)
def test_stages_compare_the_numbers_that_scripts_write_by(number, ends_in, tmp_path):
    """A norm of one stage, once it was a float, scaled the gradients of each by another number, with a warning alone."""
    assert run_workers(train_compared, 2, tmp_path, number, ends_in) == [True, True]


def once(model):
    """All parameters, those that stages share on the first rank that has them alone."""
    is_last = smp.is_initialized() and smp.pp_rank() == 1
    return [p for name, p in model.named_parameters() if not (is_last and name == "embedding.weight")]


def penalized_once(model):
    with torch.no_grad():
        total = summed_up(torch.stack([p.norm() for p in once(model)]).square().sum())
        for p in model.parameters():
            p.mul_(p.norm() / (p.norm() + 0.1)).sub_(p, alpha=1e-3 * total.item())


def written_one_by_one(model):
    total = torch.zeros(())
    for p in model.parameters():
        total += p.grad.double().square().sum()
    summed_up(total)


def of_lists(model):
    summed_up(torch.stack(torch._foreach_norm([p.grad for p in model.parameters()])).square_().sum())


def largest_of_all(model):
    """A maximum counts nothing twice."""
    most = torch.stack([p.grad.abs().amax() for p in model.local_parameters()]).amax()
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=smp.get_pp_process_group())
    return most.item()


def train_tied(rank, folder):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 1})
    torch.manual_seed(0)
    model = smp.DistributedModel(Stack(tied=True))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train = functools.partial(step_of_stack, model)
    trained(model.get_module(), optimizer, train, penalized_once)
    optimizer.zero_grad()
    train(torch.arange(8))
    most = largest_of_all(model)
    for line in (clipped_by_all, written_one_by_one, of_lists) if rank else ():
        with pytest.raises(
            UsageError, match=r"all_reduce: .*'embedding.weight', which the ranks \[0, 1\] have together"
        ):
            line(model.get_module())
    return model.state_dict(), most


def test_parameters_that_stages_share_count_once_in_sums(tmp_path):
    """They counted once for each stage, without a word."""
    torch.manual_seed(0)
    model = Stack(tied=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained(model, optimizer, lambda ids: model(ids).backward(), penalized_once)
    optimizer.zero_grad()
    model(torch.arange(8)).backward()
    largest = max(p.grad.abs().max().item() for p in model.parameters())
    for found, most in run_workers(train_tied, 2, tmp_path):
        torch.testing.assert_close(found, dict(model.state_dict()))
        assert most == pytest.approx(largest, rel=1e-5)
