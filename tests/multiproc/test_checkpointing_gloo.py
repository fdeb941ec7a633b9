"""Activation checkpointing and offloading on two gloo processes: the bits of the same pipeline without, dropout on."""

import checkpointed
import parity
import pytest
import torch
import torch.distributed as dist
from executor_harness import run_workers
from torch import nn

import smpc.v1 as smp
from smpc.compile import compile_model
from smpc.errors import PartitionError, UsageError
from smpc.executor.transport import GlooTransport
from smpc.runtime import Runtime

MB = 8
CASES = [
    ("gpt2", ("transformer.h.*",), {"schedule": "zb-h1"}),
    ("t5", ("*.block.*",), {"pipeline": "simple"}),
    ("sequential group_2", (), {"pipeline": "simple"}),
]


def step_of(rank, model, compilation, batch):
    """Losses, and gradients and state of this rank's stages after a step."""
    runtime = Runtime(model, rank=rank, transport=GlooTransport(dist.new_group()))
    program = runtime.install(compilation)
    losses = []

    def on_output(_, output):
        loss = parity.loss_of(output) / MB
        losses.append(loss.detach())
        return [(loss, None)]

    torch.manual_seed(rank)
    runtime.run(program, parity.split(batch, MB) if rank == 0 else None, on_output, training=True)
    stages = runtime.stages.values()
    gradients = {name: p.grad for stage in stages for name, p in stage.named_parameters() if p.grad is not None}
    return losses, gradients, {name: tensor for stage in stages for name, tensor in stage.state_dict().items()}


def compiled(name, patterns, schedule):
    options = {"recompute": patterns, "offload_activations": True, "activation_loading_horizon": 1}
    return compile_model(*checkpointed.build(name), pipeline_parallel_degree=2, microbatches=MB, **schedule, **options)


def both(rank, _, cases):
    found = []
    for name, compilation in cases:
        results = []
        for used in (checkpointed.without(compilation), compilation):
            model, batch = checkpointed.build(name)
            results.append(step_of(rank, model, used, batch))
        moved = sum(i.op == "OFFLOAD" for i in compilation.programs[rank].instructions)
        found.append((*results, moved))
    return found


@pytest.mark.long
@pytest.mark.parametrize("cases", [CASES[::2], pytest.param(CASES[1:2], marks=pytest.mark.slow)], ids=["two", "t5"])
def test_no_bit_changes(tmp_path, cases):
    found = run_workers(both, 2, tmp_path, [(case[0], compiled(*case)) for case in cases])
    for rank, results in enumerate(found):
        for (name, _, _), (expected, got, moved) in zip(cases, results, strict=True):
            assert expected[1], name
            for ours, theirs in zip(got[1:], expected[1:], strict=True):
                assert ours.keys() == theirs.keys()
                wrong = [key for key, value in theirs.items() if not torch.equal(ours[key], value)]
                assert not wrong, f"{name}, rank {rank}: {wrong}"
            assert len(got[0]) == len(expected[0]) == (MB if rank else 0)
            assert all(torch.equal(a, b) for a, b in zip(got[0], expected[0], strict=True))
            assert moved or rank, f"{name}: nothing is offloaded on rank {rank}"


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.second, self.runs = nn.Linear(4, 4), nn.Linear(4, 4), 0
        self.linear.register_forward_hook(self._count)

    def _count(self, *_):
        self.runs += 1

    def forward(self, x):
        return torch.tanh(self.second(self.linear(x)))


class Model(nn.Module):
    def __init__(self, checkpoints):
        super().__init__()
        self.layers, self.checkpoints = nn.Sequential(*(Layer() for _ in range(4))), checkpoints

    def forward(self, x):
        return smp.checkpoint_sequential(self.layers, x, strategy="group_2") if self.checkpoints else self.layers(x)


@smp.step
def train_step(model, x):
    loss = model(x).pow(2).mean()
    model.backward(loss)
    return loss


def script(rank, _, checkpoints, splits_a_layer):
    """A training script: sequential checkpoints and offloading under a partition by hand."""
    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "microbatches": MB,
            "auto_partition": False,
            "default_partition": 0,
            "pipeline": "simple",
            "offload_activations": checkpoints,
            "activation_loading_horizon": 1,
        }
    )
    torch.manual_seed(0)
    module = Model(checkpoints)
    for layer in (*module.layers[2:], *([module.layers[1].second] if splits_a_layer else [])):
        smp.set_partition(layer, 1)
    model = smp.DistributedModel(module)
    x = torch.randn(8, 4)
    if splits_a_layer:
        with pytest.raises(PartitionError, match=r"on one partition, found that layers\.1 is on stages 0, 1"):
            train_step(model, x)
        smp.barrier()  # a rank that ends takes its connections along, and the other may not have heard yet
        return None
    loss = train_step(model, x).outputs
    with pytest.raises(UsageError, match="the model has been partitioned by its first step"):
        smp.set_activation_checkpointing(module.layers)
    gradients = {name: p.grad for name, p in model.local_named_parameters()}
    smp.shutdown()
    return loss, gradients, [layer.runs for layer in module.layers]


@pytest.mark.long
def test_a_script_with_a_partition_by_hand(tmp_path):
    folders = [tmp_path / name for name in ("plain", "checkpointed")]
    for folder in folders:
        folder.mkdir()
    plain, found = (run_workers(script, 2, folder, i == 1, False) for i, folder in enumerate(folders))
    for rank, ((expected, expected_grads, before), (loss, grads, runs)) in enumerate(zip(plain, found, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(loss, expected, strict=True))
        assert grads.keys() == expected_grads.keys()
        assert len(grads) == 8
        assert all(torch.equal(grads[name], value) for name, value in expected_grads.items())
        own = slice(2 * rank, 2 * rank + 2)
        # The last layer of a group need not run to its end again: its hook comes after what autograd saves first.
        assert before[own] == [MB, MB]
        assert runs[own] == [2 * MB, 2 * MB]


def test_a_layer_on_two_partitions_is_an_error_on_both_ranks(tmp_path):
    assert run_workers(script, 2, tmp_path, True, True) == [None] * 2
