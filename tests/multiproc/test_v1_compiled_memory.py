"""No rank holds a whole weight that the compiler slices: not where creation is delayed, and else no longer than until the first step."""

import itertools

import hugging_face
import pytest
import torch
import transformers
from executor_harness import run_workers
from torch import nn
from torch.profiler import ProfilerActivity, profile

import smpc.v1 as smp
from smpc.errors import TraceError
from smpc.nn.init.delayed import delay_param_initialization, draw_delayed, is_delayed

LAYERS, WIDTH, SEED = 4, 2048, 11
WEIGHT = 4 * WIDTH * WIDTH
MARGIN = 12 << 20  # blocks of 4 MB and activations: less than a weight


def layers(width=WIDTH):
    """In two parts of the pipeline, if there is one; relu keeps linear layers from being one."""
    found = []
    for i in range(LAYERS):
        with smp.partition(i * smp.pp_size() // LAYERS) if smp.is_initialized() else torch.no_grad():
            found.append(nn.Linear(width, width, bias=False))
    return nn.Sequential(*(module for linear in found for module in (linear, nn.ReLU())))


@smp.step
def evaluate(model, x):
    return model(x).mean()


@smp.step
def train_step(model, batch):
    loss = model(**batch).loss
    model.backward(loss)
    return loss


def init(tp, pp, delayed, **config):
    smp.init(
        {
            "tensor_parallel_degree": tp,
            "pipeline_parallel_degree": pp,
            "auto_partition": False,
            "default_partition": 0,
            "ddp": True,
            "prescaled_batch": True,
            "tensor_parallel_plan": "auto",
            "delayed_parameter_initialization": delayed,
        }
        | config
    )


def peak_of(function):
    """The most bytes of tensors that live at a time, beside those that lived before, and those that are left."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = list(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    return max(live), live[-1]


def measure(rank, folder, tp, pp, delayed):
    init(tp, pp, delayed)
    ones = torch.ones(1, WIDTH)

    def start():
        torch.manual_seed(SEED)
        with smp.model_creation():
            plain = layers()
        assert is_delayed(plain) == delayed
        smp.DistributedModel(plain)
        del plain
        evaluate(smp.state.model, ones)

    peak, left = peak_of(start)
    model = smp.state.model
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert all(model.is_distributed_parameter(p) for p in model.local_parameters())
    torch.save((peak, left, held, model.state_dict()), folder / f"found{rank}.pt")
    smp.shutdown()


def measured(tmp_path, tp, pp, delayed):
    run_workers(measure, tp * pp, tmp_path, tp, pp, delayed)
    found = [torch.load(tmp_path / f"found{rank}.pt") for rank in range(tp * pp)]
    for rank, (peak, left, held, _) in enumerate(found):
        print(f"rank {rank}: peak {peak:,} bytes, left {left:,}, slices {held:,}, whole weight {WEIGHT:,}")
        assert held == LAYERS * WEIGHT // (tp * pp)
        assert left <= held + (1 << 20), "what was whole is given back"
    return [peak for peak, *_ in found], [state for *_, state in found]


def test_delayed_weights_are_drawn_as_slices_and_are_those_of_one_process(tmp_path):
    peaks, states = measured(tmp_path, 2, 1, delayed=True)
    assert max(peaks) <= LAYERS * WEIGHT // 2 + MARGIN, "slices and blocks"
    torch.manual_seed(SEED)
    with delay_param_initialization():
        alone = layers()
    draw_delayed(alone, torch.device("cpu"), SEED)
    for state in states:
        for name, value in alone.state_dict().items():
            assert torch.equal(state[name], value), name


@pytest.mark.slow
def test_delayed_weights_of_a_pipeline_too(tmp_path):
    peaks, states = measured(tmp_path, 2, 2, delayed=True)
    assert max(peaks) <= LAYERS * WEIGHT // 4 + MARGIN
    torch.manual_seed(SEED)
    with delay_param_initialization():
        alone = layers()
    draw_delayed(alone, torch.device("cpu"), SEED)
    assert all(torch.equal(state[name], value) for state in states for name, value in alone.state_dict().items())


@pytest.mark.slow
def test_weights_that_are_there_become_slices_one_after_another(tmp_path):
    """Beside the model that the script made: the slice of one weight, and in exchange for it the weight is given back."""
    peaks, _ = measured(tmp_path, 2, 1, delayed=False)
    assert max(peaks) <= (LAYERS + 1) * WEIGHT


def train(rank, folder, name, tp, pp):
    init(tp, pp, True, auto_partition=True, microbatches=2)
    torch.manual_seed(SEED)
    _, cls, make = hugging_face.MODELS[name]
    with smp.model_creation():
        plain = getattr(transformers, cls)(make())
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    batch = hugging_face.batch(name, 4, masked=False) | ({"use_cache": False} if name == "t5" else {})
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(train_step(model, batch).reduce_mean().item())
        optimizer.step()
    torch.save(losses, folder / f"losses{rank}.pt")
    smp.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "vit", "gptneox"])
def test_every_arrangement_trains_from_the_same_delayed_weights(tmp_path, name):
    found = []
    for tp, pp in ((1, 1), (2, 1), (2, 2), (4, 1)):
        folder = tmp_path / f"{tp}{pp}"
        folder.mkdir()
        run_workers(train, tp * pp, folder, name, tp, pp)
        found += [torch.load(folder / f"losses{rank}.pt") for rank in range(tp * pp)]
    for losses in found:
        assert losses == pytest.approx(found[0], rel=1e-4)


def delay_on_one_rank(rank, folder):
    init(2, 1, False)
    with smp.delay_param_initialization(rank == 0):
        plain = layers(8)
    model = smp.DistributedModel(plain)
    with pytest.raises(TraceError, match=r"expected all to delay .* found, by rank, \[4, 0\] of them"):
        evaluate(model, torch.ones(1, 8))
    smp.shutdown()


@pytest.mark.slow
def test_a_delay_on_some_ranks_alone_is_refused(tmp_path):
    assert run_workers(delay_on_one_rank, 2, tmp_path) == [None] * 2
