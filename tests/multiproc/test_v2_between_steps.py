"""What scripts write into sharded parameters between an evaluation and the next step, in `smpc.v2`: torch leaves some of them whole."""

import pytest
import torch
from checkpoint_harness import run_ranks, values_of
from test_split_parameters import Net
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

import smpc.v2 as tsm


def batch(step):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def loss_of(model, step):
    return (model(batch(step)) - batch(step + 50)).square().mean()


def flat(strategy=None, orig=True):
    def wrap():
        model, options = Net(), {"device_id": torch.device("cpu"), "use_orig_params": orig}
        model.up = FullyShardedDataParallel(model.up, sharding_strategy=strategy, **options)
        return FullyShardedDataParallel(model, sharding_strategy=strategy, **options)

    return wrap


def sharded(**options):
    model = Net()
    for module in (model.up, model):
        fully_shard(module, **options)
    return model


def left_whole():
    return sharded(reshard_after_forward=False)


def sliced():
    model = tsm.transform(Net(), config={"sample_inputs": (batch(0),)})
    fully_shard(model)
    return model


def update(model, optimizer, step):
    optimizer.zero_grad()
    loss_of(model, step).backward()
    optimizer.step()


def swaps_weights(model, grad):
    """Put an average of the weights in their place, evaluate it, and put them back. Losses."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    average = None
    for step in range(3):
        update(model, optimizer, step)
        with torch.no_grad():
            if average is None:
                average = [parameter.detach().clone() for parameter in model.parameters()]
            kept = [parameter.detach().clone() for parameter in model.parameters()]
            for own, mean, before in zip(model.parameters(), average, kept, strict=True):
                mean.lerp_(before, 0.5)
                own.copy_(mean)
        with torch.set_grad_enabled(grad):
            losses.append(loss_of(model, 9).item())
        with torch.no_grad():
            for own, before in zip(model.parameters(), kept, strict=True):
                own.copy_(before)
        losses.append(loss_of(model, 9).item() if grad else 0.0)
    return losses


def freezes_layers(model, grad):
    """Freeze a layer after an evaluation, and another step later train it again. Losses."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(6):
        update(model, optimizer, step)
        with torch.set_grad_enabled(grad):
            losses.append(loss_of(model, 8).item())
        if step in (1, 3):
            for parameter in model.down.parameters():
                parameter.requires_grad_(step == 3)
    return losses


def freezes_units(model, grad):
    """Freeze a unit after an evaluation, and later train it again, in two forwards of one backward, too. Losses."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(6):
        update(model, optimizer, step)
        with torch.set_grad_enabled(grad):
            losses.append(loss_of(model, 8).item())
        if step in (1, 3):
            for parameter in model.up.parameters():
                parameter.requires_grad_(step == 3)
    optimizer.zero_grad()
    first = loss_of(model, 7)
    with torch.no_grad():
        losses.append(loss_of(model, 8).item())
    (first + loss_of(model, 6)).backward()
    optimizer.step()
    losses.append(loss_of(model, 8).item())
    return losses


def writes_while_whole(model, grad):
    """Scale all weights after an evaluation. Losses."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(3):
        update(model, optimizer, step)
        with torch.set_grad_enabled(grad):
            losses.append(loss_of(model, 8).item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
    return losses


def evaluates_before_an_update(model, grad):
    """Losses, of which each second one is of an evaluation between a backward and its update."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        with torch.set_grad_enabled(grad):
            losses += [loss.item(), loss_of(model, 8).item()]
        optimizer.step()
    return losses


NATIVE = ""
CASES = {  # how, the degree (or none), what, and whether it evaluates with gradients
    "fully_shard, swaps": (sharded, "hybrid_shard_degree", swaps_weights, False),
    "slices, swaps": (sliced, "tensor_parallel_degree", swaps_weights, False),
    "FSDP1, swaps": (flat(), "hybrid_shard_degree", swaps_weights, False),
    "FSDP1, swaps, with gradients": (flat(), "hybrid_shard_degree", swaps_weights, True),
    "FSDP1 flat, ZeRO 2, swaps": (
        flat(ShardingStrategy.SHARD_GRAD_OP, False),
        "hybrid_shard_degree",
        swaps_weights,
        False,
    ),
    "fully_shard whole, swaps": (left_whole, "hybrid_shard_degree", swaps_weights, False),
    "fully_shard whole, evaluates": (left_whole, "hybrid_shard_degree", evaluates_before_an_update, False),
    "native fully_shard, evaluates": (sharded, NATIVE, evaluates_before_an_update, False),
    "native fully_shard whole, swaps": (left_whole, NATIVE, swaps_weights, False),
    "native FSDP1, evaluates": (flat(), NATIVE, evaluates_before_an_update, False),
    "native FSDP1 flat, ZeRO 2, swaps": (flat(ShardingStrategy.SHARD_GRAD_OP, False), NATIVE, swaps_weights, False),
    "fully_shard, freezes": (sharded, "hybrid_shard_degree", freezes_layers, False),
    "fully_shard, freezes, with gradients": (sharded, "hybrid_shard_degree", freezes_layers, True),
    "FSDP1, freezes, with gradients": (flat(), "hybrid_shard_degree", freezes_units, True),
    "slices, writes, with gradients": (sliced, "tensor_parallel_degree", writes_while_whole, True),
    "slices, freezes": (sliced, "tensor_parallel_degree", freezes_layers, False),
    "slices, freezes, with gradients": (sliced, "tensor_parallel_degree", freezes_layers, True),
}


def runs(rank, channel, name):
    make, degree, run, grad = CASES[name]
    tsm.init({degree: 2} if degree else {})
    model = make()
    losses = run(model, grad)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return losses, {name: value.tolist() for name, value in state.items()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * name.startswith("slices")) for name in CASES]
)
def test_what_is_written_after_an_evaluation_counts(tmp_path, name):
    """FSDP1 computed the next step, and saved, what it had gathered before; `fully_shard` froze, and wrote into, what it let go of."""
    _, _, run, grad = CASES[name]
    model = Net()
    expected = run(model, grad)
    for losses, state in values_of(run_ranks(2, runs, tmp_path, name)):
        assert losses == pytest.approx(expected, rel=1e-5)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(torch.tensor(state[key]), value, rtol=1e-4, atol=1e-6)
