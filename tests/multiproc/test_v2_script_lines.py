"""Usual lines of scripts beside a transformed model on two ranks, as in one process or refused: clipping, loss scales, optimizers."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_harness import run_ranks, values_of
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

import smpc.v2 as tsm
from smpc.errors import ConfigError, StepError, UsageError
from smpc.v2.distributed.checkpoint.state_dict_saver import save

FULL = StateDictOptions(full_state_dict=True)
TENSOR = {"tensor_parallel_degree": 2}


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.norm = nn.Linear(8, width), nn.Linear(width, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + self.down(torch.relu(self.up(x))))


def plain(state):
    """Of tensors, which ranks cannot send."""
    return {name: value.tolist() for name, value in state.items()}


def whole(model):
    return plain(get_model_state_dict(model, options=FULL))


def check(state, model):
    assert {*state} == {*model.state_dict()}
    for name, value in model.state_dict().items():
        torch.testing.assert_close(torch.tensor(state[name]), value, rtol=1e-4, atol=1e-6)


def batch(step):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def loss_of(model, step):
    return (model(batch(step)) - batch(step + 50)).square().mean()


def transformed(width=32):
    return tsm.transform(Net(width), config={"sample_inputs": (batch(0),)})


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


CLIPPING = {
    "torch": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "infinity": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=float("inf")),
    "first": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=1.0),
    "some": lambda model: nn.utils.clip_grad_norm_([p for n, p in model.named_parameters() if "up" in n], 0.1),
    "FSDP1": lambda model: (
        model.clip_grad_norm_(0.1)
        if isinstance(model, FullyShardedDataParallel)
        else nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    ),
}


def steps_with(model, clip):
    optimizer, norms = sgd(model), []
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        norms.append(clip(model).item())
        optimizer.step()
    return norms


def clips(rank, channel):
    tsm.init(TENSOR)
    found = {}
    for name, clip in CLIPPING.items():
        model = transformed()
        if name == "FSDP1":
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        norms = steps_with(model, clip)
        found[name] = norms, whole(model)
    return found


@pytest.mark.long
def test_clipping_by_the_norm_of_all_ranks(tmp_path):
    """torch's own took the norm of this rank's slices: each rank scaled by another number, and whole parameters became different."""
    for found in values_of(run_ranks(2, clips, tmp_path)):
        for name, (norms, state) in found.items():
            model = Net()
            torch.testing.assert_close(norms, steps_with(model, CLIPPING[name]), rtol=1e-4, atol=0)
            check(state, model)


def scaled_steps(model, poisons, scaler):
    """Scales after each step. `poisons`: whether this process makes an element of the first gradient of the second step infinite."""
    optimizer, scales = sgd(model), []
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if poisons and step == 1:
            gradient = next(p.grad for p in model.parameters() if p.grad is not None and p.grad.numel())
            with (
                torch._C.DisableTorchFunctionSubclass()
            ):  # as a kernel does: a script's own line would be an error in a slice
                gradient.view(-1)[-1] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def scales_losses(rank, channel, degrees, fsdp):
    tsm.init(degrees)
    model = transformed() if not fsdp else FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
    scales = scaled_steps(model, rank == 1, torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2))
    return scales, whole(model)


@pytest.mark.parametrize(("degrees", "fsdp"), [(TENSOR, False), ({"hybrid_shard_degree": 2}, True)])
def test_an_overflow_of_one_rank_counts_for_all(degrees, fsdp, tmp_path):
    """The rank without it had made the step, and had another scale from then on."""
    model = Net()
    expected = scaled_steps(model, True, torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2))
    for scales, state in values_of(run_ranks(2, scales_losses, tmp_path, degrees, fsdp)):
        assert scales == expected
        check(state, model)


def differentiates_and_replicates(rank, channel):
    tsm.init(TENSOR)
    encoder, model = nn.Linear(8, 8), transformed()
    encoder.load_state_dict(Net(8).up.state_dict())
    with pytest.raises(
        UsageError, match=r"expected a process group of ranks that have the same slices, \[\d\], found \[0, 1\]"
    ):
        nn.parallel.DistributedDataParallel(model, process_group=torch.distributed.group.WORLD)
    replica = nn.parallel.DistributedDataParallel(model)
    loss_of(lambda x: replica(encoder(x)), 0).backward()
    sgd(model).step()
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(loss_of(compiled, 1), loss_of(model, 1))
    return plain({name: parameter.grad for name, parameter in encoder.named_parameters()}), whole(model)


@pytest.mark.long
def test_gradients_of_inputs_and_replicas_of_slices(tmp_path):
    """What is in front of the model had this rank's part of its gradient; DistributedDataParallel gave all ranks the first one's slices."""
    encoder, model = nn.Linear(8, 8), Net()
    encoder.load_state_dict(Net(8).up.state_dict())
    loss_of(lambda x: model(encoder(x)), 0).backward()
    sgd(model).step()
    for gradients, state in values_of(run_ranks(2, differentiates_and_replicates, tmp_path)):
        for name, parameter in encoder.named_parameters():
            torch.testing.assert_close(torch.tensor(gradients[name]), parameter.grad, rtol=1e-4, atol=1e-6)
        check(state, model)


def has_own_batch(rank, channel):
    tsm.init(TENSOR)
    model = transformed()
    with pytest.raises(UsageError, match=r"found another on rank 1 of them than on rank 0; .*get_sampler"):
        loss_of(model, rank)
    before = loss_of(model, 0).item()
    with torch.no_grad():
        model.eval()
        loss_of(model, 0)
    return before


def test_ranks_that_share_a_model_have_the_same_batch(tmp_path):
    """Sums over slices were of different samples, without a word."""
    assert values_of(run_ranks(2, has_own_batch, tmp_path)) == pytest.approx([loss_of(Net(), 0).item()] * 2, rel=1e-5)


def hooks_parameters(rank, channel):
    tsm.init({"hybrid_shard_degree": 2})
    for wrap in (fully_shard, lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"))):
        model = Net()
        model.up.weight.register_hook(lambda grad: grad * 2)
        with pytest.raises(UsageError, match=r"without hooks on their gradients, found some on up\.weight"):
            wrap(model)
    fully_shard(model, ignored_params={model.up.weight})
    return True


def test_hooks_that_shards_would_not_call(tmp_path):
    assert all(values_of(run_ranks(2, hooks_parameters, tmp_path)))


class Lars(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad, alpha=-0.01 * float(parameter.norm() / parameter.grad.norm()))


class Signs(Lars):
    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad.sign(), alpha=0.01)


def steps_once(model, kind):
    optimizer = kind(model.parameters())
    loss_of(model, 0).backward()
    optimizer.step()


def looks_at_whole_parameters(rank, channel, degrees, fsdp):
    tsm.init(degrees)
    model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu")) if fsdp else transformed()
    for kind in (torch.optim.Adafactor, Lars, torch.optim.LBFGS):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(ConfigError, match=f"{kind.__name__}: expected an optimizer whose update of an element"):
            steps_once(model, kind)
        assert all(map(torch.equal, before, model.parameters()))
    with pytest.raises(UsageError, match=r"smpc\.v2\.grad_norm\.clip_grad_norm_"):
        nn.utils.get_total_norm([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    if fsdp:
        with pytest.raises(UsageError, match=r"model.clip_grad_norm_\(max_norm\)"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model.zero_grad()
    steps_once(model, Signs)
    tsm.state.reset()
    own = Net()
    nn.utils.clip_grad_norm_(own.parameters(), 1.0)
    steps_once(own, torch.optim.Adafactor)  # everything is taken back


@pytest.mark.parametrize(("degrees", "fsdp"), [(TENSOR, False), ({"hybrid_shard_degree": 2}, True)])
def test_what_needs_whole_parameters_is_refused(degrees, fsdp, tmp_path):
    """Adafactor, Muon and LARS had taken norms of slices, without a word."""
    values_of(run_ranks(2, looks_at_whole_parameters, tmp_path, degrees, fsdp))


def teacher_and_student(rank, channel, path):
    """Both have the same names; what ranks have of the student's first weight is as large as the teacher's bias is not."""
    tsm.init(TENSOR)
    teacher, student = transformed(32), transformed(16)
    optimizer = sgd(student)
    (loss_of(student, 0) + (student(batch(0)) - teacher(batch(0)).detach()).square().mean()).backward()
    optimizer.step()
    states = [
        get_state_dict(model, sgd(model) if model is teacher else optimizer, options=FULL)
        for model in (teacher, student)
    ]
    save({"teacher": teacher.state_dict(), "student": student.state_dict()}, checkpoint_id=path)
    momenta = states[1][1]["state"]
    return [plain(model) for model, _ in states], {name: momenta[name]["momentum_buffer"].tolist() for name in momenta}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_two_models_whose_parameters_have_the_same_names(tmp_path):
    """A full state dict had a slice of one where the other's was expected; ranks went through models in different orders."""
    path = str(tmp_path / "saved")
    teacher, student = Net(32), Net(16)
    optimizer = sgd(student)
    (loss_of(student, 0) + (student(batch(0)) - teacher(batch(0)).detach()).square().mean()).backward()
    optimizer.step()
    for states, momenta in values_of(run_ranks(2, teacher_and_student, tmp_path, path)):
        check(states[0], teacher)
        check(states[1], student)
        for name, parameter in student.named_parameters():
            expected = optimizer.state[parameter]["momentum_buffer"]
            torch.testing.assert_close(torch.tensor(momenta[name]), expected, rtol=1e-4, atol=1e-6)
    loaded = {name: dict(Net(width).state_dict()) for name, width in (("teacher", 32), ("student", 16))}
    dcp.load(loaded, checkpoint_id=path, no_dist=True)
    check(plain(loaded["teacher"]), teacher)
    check(plain(loaded["student"]), student)


class Router(nn.Module):
    """As routers of mixtures are that compute in fp32, whatever the model is in."""

    def __init__(self):
        super().__init__()
        self.classifier = nn.Linear(8, 8)

    def forward(self, x):
        self.classifier = self.classifier.to(torch.float32)
        return self.classifier(x.float()).to(x.dtype)


def converts(rank, channel):
    tsm.init({"hybrid_shard_degree": 2})
    model = nn.Sequential(nn.Linear(8, 8), Router())
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*model, model):
        fully_shard(module, mp_policy=policy)
    text = r"forward converts 1\.classifier\.weight from torch\.bfloat16 to torch\.float32, which lasts.*before fully_shard"
    with pytest.raises(StepError, match=text):
        model(batch(rank))
    model[1].forward = lambda x: model[1].classifier(x)
    loss_of(model, rank).backward()
    return True


def test_a_forward_that_converts_trained_parameters_is_refused(tmp_path):
    """torch's own words were "FSDP expects uniform gradient dtype", in the first backward."""
    assert all(values_of(run_ranks(2, converts, tmp_path)))


def saves_by_torch(rank, channel, path):
    tsm.init(TENSOR)
    model = transformed()
    optimizer = sgd(model)
    loss_of(model, 0).backward()
    optimizer.step()
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save({**state, "step": 1}, checkpoint_id=path)
    other = transformed()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    found = {"model": other.state_dict(), "step": 0}
    dcp.load(found, checkpoint_id=path)
    return found["step"], loss_of(other, 1).item() - loss_of(model, 1).item()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_s_own_checkpoints_have_whole_tensors(tmp_path):
    """Of slices, and of experts, of one name it had written the first rank's, without a word."""
    path = str(tmp_path / "saved")
    assert values_of(run_ranks(2, saves_by_torch, tmp_path, path)) == [(1, 0.0)] * 2
    model, loaded = Net(), {"model": Net().state_dict(), "optimizer": {"state": {}}}
    optimizer = sgd(model)
    loss_of(model, 0).backward()
    optimizer.step()
    momenta = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    loaded["optimizer"]["state"] = {name: {"momentum_buffer": value} for name, value in momenta.items()}
    dcp.load(loaded, checkpoint_id=path, no_dist=True)
    check(plain(loaded["model"]), model)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(momenta[name], optimizer.state[parameter]["momentum_buffer"], rtol=1e-4, atol=1e-6)


def averages_weights(model, average, shards):
    """A model, and the average of its weights, which is called after the first update alone; what the latter has lost."""
    average.requires_grad_(False)
    optimizer, losses = sgd(model), []
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        for module in (*model.modules(), *average.modules()) if shards else ():
            module.reshard()
        with torch.no_grad():
            for own, other in zip(average.parameters(), model.parameters(), strict=True):
                own.lerp_(other, 0.5)
            losses.append(loss_of(average, 9).item())
    return losses


def averages_on_ranks(rank, channel):
    tsm.init({"hybrid_shard_degree": 2})
    models = Net(), Net(32)
    for model in models:
        for module in (*model.children(), model):
            fully_shard(module)
    return averages_weights(*models, True)


def test_a_sharded_model_that_is_not_called_before_another_is_trained(tmp_path):
    """The end of the first model's backward was one of the second's, too, which torch had not begun: an AttributeError."""
    expected = averages_weights(Net(), Net(32), False)
    for found in values_of(run_ranks(2, averages_on_ranks, tmp_path)):
        assert found == pytest.approx(expected, rel=1e-5)
