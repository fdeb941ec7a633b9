"""DistributedModel in one process; what several ranks share is in tests/multiproc/test_v1_training.py."""

import inspect

import pytest
import torch
from torch import nn

import smpc.v1 as smp
from smpc.errors import CheckpointError, ConfigError, ConfigTypeError, UsageError


class Counter(nn.Module):
    """Extra state that is no tensor, and a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.count = 0
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]

    def forward(self, x):
        self.count += 1
        return x


def build():
    model = nn.Sequential(nn.Embedding(5, 4), Counter(), nn.BatchNorm1d(4), nn.Linear(4, 5, bias=False))
    model[3].weight = model[0].weight
    return model


@pytest.fixture
def session():
    smp.init({"pipeline_parallel_degree": 1})
    yield smp.state.session
    smp.shutdown()


@smp.step
def step(model, ids):
    output = model(ids)
    model.backward(output.sum())
    return output


def test_the_signature_of_the_reference(session):
    parameters = list(inspect.signature(smp.DistributedModel).parameters.values())
    assert {p.name: p.default for p in parameters[1:]} == {
        "trace_device": "gpu",
        "trace_execution_times": False,
        "overlapping_allreduce": True,
        "backward_passes_per_step": 1,
        "average_grads_across_microbatches": True,
        "bucket_cap_mb": 25,
        "trace_memory_usage": False,
        "broadcast_buffers": True,
        "gradient_as_bucket_view": False,
    }


def test_names_are_those_of_the_module(session):
    module = build()
    model = smp.DistributedModel(module)
    assert model.module is module
    assert model.get_module() is module
    assert model.partitioned
    for ours, theirs in (
        (model.named_parameters(), module.named_parameters()),
        (model.local_named_parameters(), module.named_parameters()),
        (model.default_reducer_named_parameters(), module.named_parameters()),
        (model.named_buffers(), module.named_buffers()),
        (model.local_named_buffers(), module.named_buffers()),
        (model.local_named_modules(), module.named_modules()),
    ):
        assert [(name, id(item)) for name, item in ours] == [(name, id(item)) for name, item in theirs]
    for ours, theirs in (
        (model.parameters(), module.parameters()),
        (model.local_parameters(), module.parameters()),
        (model.local_buffers(), module.buffers()),
        (model.local_modules(), module.modules()),
    ):
        assert list(map(id, ours)) == list(map(id, theirs))
    assert list(model.distributed_modules()) == list(model.scaled_batch_reducer_named_parameters()) == []
    parameter, buffer = next(model.parameters()), next(model.buffers())
    assert not model.is_distributed_parameter(parameter)
    assert not model.is_scaled_batch_parameter(parameter)
    assert not model.is_distributed_buffer(buffer)
    assert not model.is_scaled_batch_buffer(buffer)


@pytest.fixture
def replicas():
    smp.init({"partitions": 1, "ddp": True})
    yield
    smp.shutdown()


def test_with_ddp_the_module_is_wrapped_and_its_names_are_not(replicas):
    module = build()
    model = smp.DistributedModel(module)
    wrapper = model.module
    assert isinstance(wrapper, torch.nn.Module)
    assert wrapper is not module
    assert wrapper.module is model.get_module() is module
    assert list(wrapper.state_dict()) == list(model.state_dict()) == list(module.state_dict())
    assert [name for name, _ in wrapper.named_parameters()] == [name for name, _ in module.named_parameters()]
    module.anything = 3
    assert wrapper.anything == 3
    with pytest.raises(AttributeError, match="nothing"):
        _ = wrapper.nothing
    assert not hasattr(type(wrapper).__new__(type(wrapper)), "module")
    model.eval()
    assert not wrapper.training
    assert not module.training
    seen = []
    wrapper.register_forward_hook(lambda *args: seen.append(args))
    found = step(model, torch.arange(5)).outputs
    assert len(seen) == len(found)
    assert torch.equal(wrapper(torch.arange(5)), module(torch.arange(5)))


def test_modes_reach_the_module(session):
    module = build().eval()
    model = smp.DistributedModel(module)
    assert not model.training
    model.train()
    assert module[2].training
    model.eval()
    assert not module[2].training


def test_hooks(session):
    model = smp.DistributedModel(build())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    calls = []
    first = model.register_post_partition_hook(lambda *args: calls.append(("partition", args)))
    removed = model.register_post_partition_hook(lambda *args: calls.append("removed"))
    removed.remove()
    after = model.register_post_step_hook(lambda *args: calls.append(("step", args)))
    ids = torch.arange(5)
    assert calls == []
    step(model, ids)
    step(model, ids)
    after.remove()
    step(model, ids)
    assert calls == [("partition", (model, optimizer)), ("step", (model, optimizer))], "after the first step only"
    model.register_post_partition_hook(lambda *args: calls.append("late"))
    assert calls[-1] == "late"
    model.register_post_step_hook(lambda *args: calls.append("late step"))
    step(model, ids)
    assert calls[-2:] == ["late", "late step"]
    first.remove()


def test_state_dicts(session):
    module = build()
    model = smp.DistributedModel(module)
    step(model, torch.arange(5))
    state = {
        key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in model.state_dict().items()
    }
    assert list(state) == list(module.state_dict())
    assert model.state_dict(gather_to_rank0=True).keys() == state.keys()
    local = model.local_state_dict()
    assert local.pop("_smp_is_partial") is True
    assert local.keys() == state.keys()
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.zero_()
    module[1].count = 100
    result = model.load_state_dict({**state, "_smp_is_partial": True})
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert module[1].count == 1
    assert module[3].weight is module[0].weight
    for key, value in state.items():
        assert not isinstance(value, torch.Tensor) or torch.equal(model.state_dict()[key], value), key


def test_everything_that_does_not_fit_is_listed_and_nothing_is_loaded(session):
    module = build()
    model = smp.DistributedModel(module)
    before = {key: value.clone() for key, value in module.named_parameters()}
    state = dict(model.state_dict())
    wrong = {key: value for key, value in state.items() if key != "2.bias"}
    wrong |= {
        "0.weight": torch.zeros(5, 3),
        "2.weight": torch.zeros(4, dtype=torch.float64),
        "2.running_mean": 3,
        "new": torch.ones(1),
        "3.weight": torch.zeros(5, 4),
    }
    with pytest.raises(CheckpointError) as error:
        model.load_state_dict(wrong)
    assert str(error.value).split("\n")[1:] == [
        "missing: 2.bias",
        "unexpected: new",
        "shape of 0.weight: expected [5, 4], found [5, 3]",
        "dtype of 2.weight: expected torch.float32, found torch.float64",
        "2.running_mean: expected a tensor, found int",
    ]
    assert all(torch.equal(value, before[key]) for key, value in module.named_parameters())
    loose = {"2.weight": torch.full((4,), 0.5, dtype=torch.float64), "new": torch.ones(1)}
    result = model.load_state_dict(loose, strict=False)
    assert result.unexpected_keys == ["new"]
    assert set(result.missing_keys) == set(state) - {"2.weight"}
    assert torch.equal(module[2].weight, torch.full((4,), 0.5))


def test_cpu_returns_the_model(session):
    model = smp.DistributedModel(build())
    assert model.cpu() is model
    step(model, torch.arange(5))


def test_without_replicas(session):
    model = smp.DistributedModel(build())
    with pytest.raises(ConfigError, match="no data-parallel replicas"):
        model.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(ConfigError, match="no data-parallel replicas"), model.join():
        pass


def test_wrong_arguments(session):
    module = nn.Linear(1, 1)
    with pytest.raises(ConfigTypeError, match=r"expected a torch.nn.Module, found str"):
        smp.DistributedModel("model")
    with pytest.raises(ConfigError, match="trace_device: expected 'cpu' or 'gpu', found 'tpu'"):
        smp.DistributedModel(module, trace_device="tpu")
    with pytest.raises(ConfigError, match="trace_execution_times: must be False if trace_device is 'cpu'"):
        smp.DistributedModel(module, trace_execution_times=True, trace_device="cpu")
    with pytest.raises(ConfigError, match="backward_passes_per_step: expected at least 1, found 0"):
        smp.DistributedModel(module, backward_passes_per_step=0)
    options = {"backward_passes_per_step": True, "bucket_cap_mb": "25", "overlapping_allreduce": "no"}
    with pytest.raises(ConfigError) as caught:
        smp.DistributedModel(module, **options)
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == sorted(options, reverse=True)
    for size in (0, -1, float("nan"), True):
        with pytest.raises(ConfigError, match="bucket_cap_mb: expected a number of MiB above 0"):
            smp.DistributedModel(module, bucket_cap_mb=size)
    model = smp.DistributedModel(module)
    with pytest.raises(ConfigError, match="expected the plain model, found a DistributedModel"):
        smp.DistributedModel(model)
    with pytest.raises(UsageError, match="shares parameters with another DistributedModel"):
        smp.DistributedModel(module)


def test_before_init():
    with pytest.raises(UsageError, match=r"smp.init has not been called"):
        smp.DistributedModel(nn.Linear(1, 1))
