"""Usual lines of scripts beside models that `shard` has split over two ranks, as in one process or refused."""

import copy

import pytest
import torch
import torch.distributed as dist
from executor_harness import run_workers
from expert_models import LoopBlock, make, one_process, tokens
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from smpc import expert_parallel, tensor_parallel
from smpc.errors import ConfigError, StepError, UsageError
from smpc.executor.collectives import TensorGroup

STEPS = 3
OTHERS = r"found \[0, 1\], of which \[{}\] have other parts than rank {}"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.norm = nn.Linear(8, 32), nn.Linear(32, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + self.down(torch.relu(self.up(x))))


def loss_of(model, step):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    return (model(x) - x.flip(0)).square().mean()


CLIPPING = {
    "all": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "largest": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=float("inf")),
    "first": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=1.0),
    "some": lambda model: nn.utils.clip_grad_norm_([p for n, p in model.named_parameters() if "up." in n], 0.1),
}


def clipped_steps(model, clip):
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        norms.append(clip(model).item())
        optimizer.step()
    return norms


def scaled_steps(model, poisons):
    """Scales after each step. `poisons`: whether this process makes a gradient of the second step infinite."""
    optimizer, scales = torch.optim.SGD(model.parameters(), lr=0.1), []
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if poisons and step == 1:
            with (
                torch._C.DisableTorchFunctionSubclass()
            ):  # as a kernel does: a script's own line would be an error in a slice
                next(p for n, p in model.named_parameters() if n.endswith("up.weight")).grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def sharded():
    return tensor_parallel.shard(Net(), torch.ones(4, 8), TensorGroup.of(dist.group.WORLD))


def trains(rank, folder):
    found = {}
    for name, clip in CLIPPING.items():
        model = sharded()
        found[name] = clipped_steps(model, clip), model.whole_state_dict()
    model = sharded()
    return found, scaled_steps(model, rank == 1), model.whole_state_dict()


@pytest.mark.long
def test_clipping_and_loss_scales_count_the_slices_of_all_ranks(tmp_path):
    """Each rank had clipped by the norm of its slices, and a rank without an overflow had made the step."""
    for found, scales, state in run_workers(trains, 2, tmp_path):
        for name, clip in CLIPPING.items():
            model = Net()
            torch.testing.assert_close(found[name][0], clipped_steps(model, clip), rtol=1e-4, atol=0)
            torch.testing.assert_close(found[name][1], model.state_dict(), rtol=1e-4, atol=1e-6)
        model = Net()
        assert scales == scaled_steps(model, True)
        torch.testing.assert_close(state, model.state_dict(), rtol=1e-4, atol=1e-6)


def refused(rank, folder):
    model = sharded()
    loss_of(model, 0).backward()
    with pytest.raises(ConfigError, match=r"Adafactor: .*, for parts of a model that was given to shard; use another"):
        torch.optim.Adafactor(model.parameters()).step()
    with pytest.raises(UsageError, match="get_total_norm: expected tensors that this rank has whole"):
        nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    with pytest.raises(UsageError, match=OTHERS.format(1 - rank, rank)):
        nn.parallel.DistributedDataParallel(model)
    with pytest.raises(UsageError, match="fully_shard: .*" + OTHERS.format(1 - rank, rank)):
        fully_shard(model)
    alone = [dist.new_group([each]) for each in range(2)][rank]
    replica = nn.parallel.DistributedDataParallel(model, process_group=alone)
    replica.zero_grad()
    loss_of(replica, 0).backward()
    own = Net()
    loss_of(own, 0).backward()
    whole = model.whole_gradients()
    nn.utils.get_total_norm([parameter.grad for parameter in own.parameters()])
    torch.optim.Adafactor(own.parameters()).step()
    return whole


def test_what_needs_whole_parameters_is_refused(tmp_path):
    """Adafactor had taken norms of slices, and DistributedDataParallel given both ranks the first one's."""
    model = Net()
    loss_of(model, 0).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for found in run_workers(refused, 2, tmp_path):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def clips_experts(rank, folder, name, more):
    model = expert_parallel.shard(make(name, **more), dist.group.WORLD)
    if more:  # by torch's own averages
        own = [f"model.{name}" for name, _ in model.expert_parameters()]
        with pytest.raises(UsageError, match=OTHERS.format(1 - rank, rank)):
            nn.parallel.DistributedDataParallel(model)
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
        replica = nn.parallel.DistributedDataParallel(model)
        replica(**tokens(rank))["loss"].backward()
    else:
        model(**tokens(rank))["loss"].backward()
        model.average_gradients()
    if more:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, LoopBlock))
        with pytest.raises(UsageError, match="FullyShardedDataParallel: expected parameters that this rank has whole"):
            FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    held = [parameter for parameter in model.parameters() if parameter.grad is not None]
    return nn.utils.clip_grad_norm_(held, 0.1).item(), model.whole_gradients()


@pytest.mark.parametrize(("name", "more"), [("MixtralForCausalLM", {}), ("loop", {"num_experts": 5})])
def test_clipping_counts_the_experts_of_all_ranks(tmp_path, name, more):
    """Of five listed experts one rank has three, and the other two: each sums up its own first."""
    model = make(name, **more)
    _, gradients = one_process(model, [tokens(seed) for seed in range(2)])
    for key, parameter in model.named_parameters():
        parameter.grad = gradients.get(key)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
    for found, clipped in run_workers(clips_experts, 2, tmp_path, name, more):
        assert found == pytest.approx(norm, rel=1e-9)
        for key, gradient in gradients.items():
            torch.testing.assert_close(clipped[key], gradient, rtol=1e-9, atol=1e-12)


def replaced(model):
    """Others in the place of the parameters, by name: what scripts may do to them."""
    yield "loaded by assign", model.model.load_state_dict(copied(model.model.state_dict()), assign=True)
    yield "set", setattr(model.model.norm, "weight", nn.Parameter(model.model.norm.weight.detach().clone()))


def copied(state):
    return {name: value.clone() for name, value in state.items()}


def trains_others(rank, folder):
    group = TensorGroup.of(dist.group.WORLD)
    with torch.device("meta"):
        model = tensor_parallel.shard(Net(), torch.ones(4, 8), group)
    model.to_empty(device="cpu")
    model.load_whole_state_dict(copied(Net().state_dict()))
    found = {"from the meta device": (clipped_steps(model, CLIPPING["all"]), model.whole_state_dict())}
    model = sharded()
    for name, _ in replaced(model):
        model.load_whole_state_dict(copied(Net().state_dict()))
        found[name] = clipped_steps(model, CLIPPING["all"]), model.whole_state_dict()
    model.model.norm.weight = nn.Parameter(torch.ones(8, dtype=torch.float64))
    with pytest.raises(
        StepError, match=r"'norm.weight': expected torch.float32 of shape \[8\], .* found torch.float64"
    ):
        model(torch.ones(4, 8))
    model = sharded()
    assert torch.equal(torch.compile(model)(torch.ones(4, 8)), model(torch.ones(4, 8)))
    with pytest.raises(UsageError, match=r"ShardedModule: .* shard another copy of the model"):
        copy.deepcopy(model)
    with pytest.raises(StepError, match=r"'up.weight': expected torch.float32 .* found torch.bfloat16"):
        model.bfloat16()(torch.ones(4, 8))
    return found


@pytest.mark.long
def test_a_program_follows_parameters_that_others_have_replaced(tmp_path):
    """It had gone on with those of before, without a gradient for the new ones, and from the meta device with an error of torch's."""
    model = Net()
    norms = clipped_steps(model, CLIPPING["all"])
    for found in run_workers(trains_others, 2, tmp_path):
        assert set(found) == {"from the meta device", "loaded by assign", "set"}
        for name, (own, state) in found.items():
            torch.testing.assert_close(own, norms, rtol=1e-4, atol=0, msg=name)
            torch.testing.assert_close(state, model.state_dict(), rtol=1e-4, atol=1e-6)


def trains_slices_in_parts(rank, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "tensor"))
    model = tensor_parallel.shard(Net(), torch.ones(4, 8), TensorGroup.of(mesh["tensor"].get_group()))
    fully_shard(model, mesh=mesh["replica"])
    norms = clipped_steps(model, CLIPPING["all"])
    whole = copied({name: value.full_tensor() for name, value in model.model.state_dict().items()})
    return norms, whole, dict(model.layouts)


def test_slices_are_sharded_over_ranks_that_have_the_same(tmp_path):
    """`fully_shard` had left the program with the parameters of before: nothing was trained, without a word."""
    model = Net()
    norms = clipped_steps(model, CLIPPING["all"])
    results = run_workers(trains_slices_in_parts, 4, tmp_path)
    for rank, (found, state, layouts) in enumerate(results):
        torch.testing.assert_close(found, norms, rtol=1e-4, atol=0)
        for name, value in model.state_dict().items():
            own = value.chunk(2, layouts[name].dim)[rank % 2] if name in layouts else value
            torch.testing.assert_close(state[name], own, rtol=1e-4, atol=1e-6)
