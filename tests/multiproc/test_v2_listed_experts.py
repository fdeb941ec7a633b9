"""Transformed models whose experts are modules of their own, divided over real ranks, against one process."""

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from checkpoint_harness import run_ranks, values_of
from expert_models import Gated, SortedBlock, make, tokens
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformed import EXPERTS, STEPS, WITH_CONTEXT, WITH_TENSOR, build, own_chunks, sample_of, slow, wrapped

import smpc.v2 as tsm
from smpc.errors import ConfigError, ConfigUnsupportedError, UsageError
from smpc.v2.grad_norm import clip_grad_norm_
from smpc.v2.moe.moe_config import MoEConfig

DECAY = {"lr": 1e-2, "weight_decay": 0.3}
REPLICAS = {"expert_parallel_degree": 2, "hybrid_shard_degree": 4}
SHUFFLED = MoEConfig(moe_load_balancing="none", moe_z_loss_coeff=0.0, global_token_shuffle=True)


class Called(nn.ModuleList):
    """Experts in a list with a forward of its own, which the routing comes to."""

    def forward(self, x, index, weights):
        result = torch.zeros_like(x)
        for number, expert in enumerate(self):
            rows, slot = torch.where(index == number)
            if len(rows):
                result = result.index_add(0, rows, expert(x[rows]) * weights[rows, slot, None])
        return result


class CalledBlock(nn.Module):
    def __init__(self, width, num_experts):
        super().__init__()
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = Called(Gated(width) for _ in range(num_experts))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, index = self.router(flat).softmax(-1).topk(2)
        return (self.experts(flat, index, weights).view_as(x),)


class SortedTuple(SortedBlock):
    def forward(self, x):
        return (super().forward(x),)


BLOCKS = {"loop": None, "called": CalledBlock, "sorted": SortedTuple}


def model_of(kind):
    model = build("listed")
    if BLOCKS[kind] is not None:
        for layer in model.layers:
            layer.mixture = BLOCKS[kind](16, 10)
    return model.double()


def few_tokens(step, sample):
    """So few that some experts have none."""
    return torch.randint(0, 64, (1, 4), generator=torch.Generator().manual_seed(100 * step + sample))


def loss_of(model, ids):
    return nn.functional.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), ids.flatten())


def trains(rank, channel, kind, degrees, fsdp, config=None):
    """Losses, norms, the whole weights, and how many bytes of experts the rank held."""
    tsm.init(degrees)
    model = tsm.transform(model_of(kind), config=config)
    held = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name or ".parts." in name)
    model = wrapped(model, fsdp)
    optimizer = torch.optim.AdamW(model.parameters(), **DECAY)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, own_chunks(few_tokens(step, sample_of())))
        loss.backward()
        norms.append(clip_grad_norm_(model, 0.5).item())
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / tsm.state.world_size)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return losses, norms, {name: value.numpy() for name, value in whole.items()}, held


@functools.cache
def one_process(kind, num_samples):
    """The same of one process; and how many parameters had no gradient in some step."""
    model = model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), **DECAY)
    losses, norms, without = [], [], set()
    for step in range(STEPS):
        optimizer.zero_grad()
        found = [loss_of(model, few_tokens(step, sample)) / num_samples for sample in range(num_samples)]
        sum(found).backward()
        without |= {name for name, parameter in model.named_parameters() if parameter.grad is None}
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        losses.append(sum(found).item())
    return losses, norms, model.state_dict(), len(without)


@pytest.mark.matrix(3)
@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "kind", "degrees", "fsdp", "config"),
    [
        (2, "loop", EXPERTS, 2, None),
        (4, "called", REPLICAS, 2, None),
        (2, "sorted", WITH_CONTEXT, 2, None),
        slow(2, "called", EXPERTS, 2, SHUFFLED),
        slow(2, "loop", EXPERTS, 2, SHUFFLED),
        slow(4, "loop", EXPERTS, 2, None),
        slow(4, "called", {"expert_parallel_degree": 4}, 2, None),
        slow(4, "loop", WITH_TENSOR, 2, None),
        slow(4, "called", WITH_TENSOR, 2, None),
        slow(2, "loop", WITH_CONTEXT, 2, None),
        slow(4, "loop", {**WITH_CONTEXT, "expert_parallel_degree": 4}, 2, None),
    ],
)
def test_training_is_that_of_one_process(size, kind, degrees, fsdp, config, tmp_path):
    """Experts that no token of any rank comes to have no gradient: they do not decay."""
    sharing = degrees.get("tensor_parallel_degree", 1) * degrees.get("context_parallel_degree", 1)
    losses, norms, weights, _ = one_process(kind, size // sharing)
    experts = sum(p.nbytes for name, p in model_of(kind).named_parameters() if ".experts." in name or ".parts." in name)
    for found in values_of(run_ranks(size, trains, tmp_path, kind, degrees, fsdp, config)):
        torch.testing.assert_close(found[0], losses, rtol=1e-9, atol=0)
        torch.testing.assert_close(found[1], norms, rtol=1e-9, atol=0)
        for name, value in weights.items():
            if not name.endswith(".load"):  # each rank counts its own tokens
                torch.testing.assert_close(torch.from_numpy(found[2][name]), value, rtol=1e-9, atol=1e-11, msg=name)
        assert abs(found[3] - experts / degrees["expert_parallel_degree"]) <= experts / 10


def test_some_experts_have_no_gradient_in_one_process():
    assert one_process("loop", 2)[3] > 0


def updates(model, batches):
    """The weights after two updates, each by the mean of the batches' losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for given in batches:
            (model(**given)["loss"] / len(batches)).backward()
        optimizer.step()


def is_like_one_process(rank, channel, name):
    tsm.init(EXPERTS)
    model, reference = wrapped(tsm.transform(make(name, torch.float32)), 2), make(name, torch.float32)
    updates(model, [tokens(rank)])
    updates(reference, [tokens(each) for each in range(2)])
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for key, value in reference.state_dict().items():
        torch.testing.assert_close(full[key], value, rtol=1e-6, atol=2e-6, msg=key)
    return True


@pytest.mark.long
def test_an_architecture_of_hugging_face(tmp_path):
    """Its experts drop tokens over their capacity, which the forward of a dictionary of them does."""
    found = run_ranks(2, is_like_one_process, tmp_path, "SwitchTransformersForConditionalGeneration")
    assert values_of(found) == [True, True]


def draws(model):
    """What a script does to begin anew, in one order of the parameters."""
    torch.manual_seed(3)
    for _, parameter in sorted(model.named_parameters()):
        nn.init.normal_(parameter, std=0.02)


def begins_anew(rank, channel):
    tsm.init(EXPERTS)
    model, reference = tsm.transform(model_of("loop")), model_of("loop")
    draws(model)
    full = get_model_state_dict(wrapped(model, 2), options=StateDictOptions(full_state_dict=True))
    draws(reference)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(full[name], value, rtol=0, atol=0, msg=name)
    return True


def noise(model):
    torch.manual_seed(4)
    for _, parameter in sorted(model.named_parameters()):
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        with torch.no_grad():
            parameter.mul_((torch.rand_like(parameter) > 0.1).double())


def clip_by_hand(model):
    total = sum(p.grad.norm().item() ** 2 for p in model.parameters() if p.grad is not None) ** 0.5
    if total > 0.1:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.1 / total)


def writes_by_hand(rank, channel):
    tsm.init(EXPERTS)
    model, reference = wrapped(tsm.transform(model_of("loop")), 2), model_of("loop")
    for each in (model, reference):
        noise(each)
    for step in range(2):
        losses = [loss_of(each, few_tokens(step, rank)) for each in (model, reference)]
        torch.testing.assert_close(*losses)
        losses[0].backward()
    with pytest.raises(UsageError, match="computed of this rank's slice of"):
        clip_by_hand(model)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(full[name], value, rtol=1e-12, atol=1e-12, msg=name)
    return True


@pytest.mark.long
def test_what_scripts_compute_of_experts_of_lists_is_right_or_refused(tmp_path):
    """Each rank clipped by the norm of its own, and drew its own alone."""
    assert values_of(run_ranks(2, writes_by_hand, tmp_path)) == [True, True]


@pytest.mark.long
def test_all_ranks_draw_all_experts(tmp_path):
    """Each drew its own, and from then on other numbers for what all have."""
    assert values_of(run_ranks(2, begins_anew, tmp_path)) == [True, True]


def accumulates(rank, channel):
    """What the experts' weights are after updates between which gradients are kept, forgotten, set to zero and added to."""
    tsm.init(EXPERTS)
    model = wrapped(tsm.transform(model_of("loop")), 2)
    reference = model_of("loop")
    own, whole = (torch.optim.AdamW(each.parameters(), **DECAY) for each in (model, reference))

    def both(*steps):
        for step in steps:
            loss_of(model, few_tokens(step, rank)).backward()
            (sum(loss_of(reference, few_tokens(step, sample)) for sample in range(2)) / 2).backward()

    def update(**options):
        for optimizer in (own, whole):
            optimizer.step()
            optimizer.zero_grad(**options)

    both(0, 1)
    update()
    both(2)  # a step that is left out
    for optimizer in (own, whole):
        optimizer.zero_grad()
    both(3)
    update(set_to_none=False)  # from now on there are gradients, of zero
    both(4)
    update()
    model.set_requires_gradient_sync(False)
    both(5)
    model.set_requires_gradient_sync(True)
    both(6)
    update()
    both(7)
    for parameter in (
        *model.parameters(),
        *reference.parameters(),
    ):  # a penalty, which no result of an expert depends on
        penalty = 0.02 * parameter.detach()
        parameter.grad = penalty if parameter.grad is None else parameter.grad + penalty
    update()
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in reference.state_dict().items():
        if not name.endswith(".load"):
            torch.testing.assert_close(full[name], value, rtol=1e-9, atol=1e-11, msg=name)
    return True


@pytest.mark.long
def test_gradients_stay_where_those_of_one_process_do(tmp_path):
    assert values_of(run_ranks(2, accumulates, tmp_path)) == [True, True]


LEFT_WHOLE = "expert_parallel_degree: every rank has all of these experts: layers.1.mixture.experts: there are buffers in its experts,"


class Counting(Gated):
    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("count", torch.zeros(()))


def is_refused(rank, channel):
    tsm.init(EXPERTS)
    model = tsm.transform(model_of("loop"))
    with pytest.raises(
        ConfigUnsupportedError, match=r"FullyShardedDataParallel: expected experts in one module.*use fully_shard"
    ):
        FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    for module in (model.layers[0].mixture.experts[1], model.layers[0].mixture.experts[1].up):
        with pytest.raises(UsageError, match=r"fully_shard: expected no module inside of layers.0.mixture.experts"):
            fully_shard(module)
    optimizer = torch.optim.Adafactor(wrapped(model, 2).parameters())
    loss_of(model, few_tokens(0, rank)).backward()
    with pytest.raises(ConfigError, match="slices of a transformed model"):
        optimizer.step()
    other = model_of("loop")
    other.layers[1].mixture.experts = nn.ModuleList(Counting(16).double() for _ in range(10))
    ids = few_tokens(0, rank)
    expected = loss_of(other, ids)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.testing.assert_close(loss_of(tsm.transform(other), ids), expected)
    texts = [str(each.message) for each in told if each.category is UserWarning]
    assert [text.partition(" of which")[0] for text in texts] == [LEFT_WHOLE] * (rank == 0)
    other = model_of("loop")
    for layer in other.layers:
        layer.mixture.experts = nn.ModuleList(Counting(16).double() for _ in range(10))
    with pytest.raises(ConfigError, match="buffers in its experts"):
        tsm.transform(other)
    return True


@pytest.mark.long
def test_what_cannot_be_divided_is_refused(tmp_path):
    assert values_of(run_ranks(2, is_refused, tmp_path)) == [True, True]
