"""`fully_shard` with `fp16` and `bf16`: the training, the loss scale, the norms and the checkpoints of the same job without it."""

import copy

import pytest
import torch
from checkpoint_jobs import resume
from executor_harness import run_workers
from precision_jobs import Job, batch, differences, gain_at, make_model, whole
from torch import nn
from torch.distributed.tensor import DTensor

import smpc.v1 as smp
from smpc.sharding.dtensors import local

STEPS, HUGE = 6, (2, 4)
DYNAMIC = {"static_loss_scale": None, "dynamic_loss_scale": True, "init_scale": 2.0**12, "scale_window": 2}
TOPOLOGY = (2, 1, 2)
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def begin(topology, precision, shards, **config):
    options = DYNAMIC if precision == "fp16" else {}
    return Job(topology, {precision: True, "fully_shard": shards, **config}, **options)


def train(job, steps, max_norm=1e9):
    """The scale, whether it overflows, the loss and the norm of each step. Norms that do not clip change no bit."""
    found = []
    for step in steps:
        scale = job.optimizer.loss_scale
        loss, norm = job.step(step, HUGE if job.optimizer.scale_can_shrink else (), max_norm)
        found.append((scale, job.optimizer.overflow, loss, norm))
    return found


def reference_norm():
    """Of the first step's gradients, averaged over the replicas, in plain fp32 PyTorch."""
    model = make_model()
    for replica in range(2):
        x, targets = batch(0, replica)
        (nn.functional.cross_entropy(model(x, gain_at(0)), targets) / 2).backward()
    return float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))


def both(rank, folder, precision):
    found = []
    for shards in (False, True):
        job = begin(TOPOLOGY, precision, shards)
        seen = train(job, range(STEPS))
        bits = whole(job)
        clipped = train(job, [STEPS], max_norm=0.5)
        parameters, masters = list(job.model.local_parameters()), job.optimizer.masters
        assert all(isinstance(tensor, DTensor) == shards for tensor in (*parameters, *masters))
        assert {parameter.dtype for parameter in parameters} == {HALF[precision]}
        assert {master.dtype for master in masters} == {torch.float32}
        assert len(job.optimizer.optimizer.state) == len(masters)
        if shards and precision == "fp16":
            one_rank_overflows(job)
        found.append((seen, *bits, clipped, whole(job)[1], sum(local(master).numel() for master in masters)))
        smp.shutdown()
    return found


def one_rank_overflows(job):
    """What one rank alone finds in its parts keeps all from updating theirs."""
    before, scale = whole(job), job.optimizer.loss_scale
    job.forward_backward(0)
    if torch.distributed.get_rank() == 3:
        local(next(job.model.local_parameters()).grad).view(-1)[0] = torch.inf
    job.optimizer.step()
    assert job.optimizer.overflow
    assert job.optimizer.loss_scale == scale / 2
    assert [differences(a, b) for a, b in zip(whole(job), before, strict=True)] == [[], []]


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp16", pytest.param("bf16", marks=pytest.mark.slow)])
def test_training_is_that_of_whole_parameters(tmp_path, precision):
    smp.init({"pipeline_parallel_degree": 1})
    norm = reference_norm()
    smp.shutdown()
    for plain, shards in run_workers(both, 4, tmp_path, precision):
        for expected, found in zip(plain[0] + plain[3], shards[0] + shards[3], strict=True):
            assert found[:2] == expected[:2]
            assert torch.equal(found[2], expected[2]) or (found[1] and not torch.isfinite(found[2]))
            assert float(found[3]) == pytest.approx(float(expected[3]), rel=1e-5)  # sums in another order
        assert float(shards[0][0][3]) == pytest.approx(norm, rel=0.01 if precision == "fp16" else 0.03)
        assert [seen[1] for seen in shards[0]] == [precision == "fp16" and step in HUGE for step in range(STEPS)]
        assert differences(shards[1], plain[1]) == []
        assert differences(shards[2], plain[2]) == []
        assert shards[4].keys() == plain[4].keys()
        for key, value in plain[4].items():
            torch.testing.assert_close(shards[4][key], value, rtol=1e-4, atol=1e-7)
        assert shards[5] <= 0.5 * plain[5] + 64


@smp.step
def look(model, x, gain):
    return model(x, gain)


def cut(job):
    """Partition the model, without training; what waits for the partition is loaded."""
    look(job.model, batch(0)[0], gain_at(0))


def assert_same(job, expected):
    """In all bits."""
    found = state_of(job)
    assert [differences(a, b) for a, b in zip(found[:2], expected[:2], strict=True)] == [[], []]
    assert found[2] == expected[2]


def state_of(job):
    """Parameters, optimizer state with masters, and loss scaler."""
    return *whole(job), job.optimizer.state_dict().get("loss_scaler")


def resumed(topology, precision, shards, path, expected, late, **options):
    """A job of other weights that has resumed a checkpoint, before or after its first step."""
    torch.manual_seed(11)
    job = begin(topology, precision, shards)
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.mul_(0.5)
    if late:
        job.step(0)
    resume(path, tag="saved", **options)
    if not late:
        cut(job)
    assert_same(job, expected)
    return job


def checkpoints(rank, folder, precision, alone, cases):
    """Resume what one rank saved; save for one rank; on four ranks go from parts to whole tensors and back."""
    for partial, late in cases:
        resumed(TOPOLOGY, precision, True, folder / "alone", alone, late, partial=partial)
        smp.shutdown()
    job = begin(TOPOLOGY, precision, True)
    train(job, range(4))
    expected = state_of(job)
    save_both(job, folder / "shards")
    # Copies: like torch's, state dicts may have tensors that change with the next step.
    states = copy.deepcopy((job.model.state_dict(), job.optimizer.state_dict()))
    local_states = copy.deepcopy((job.model.local_state_dict(), job.optimizer.local_state_dict()))
    after = train(job, [4, 5]), whole(job)
    smp.shutdown()

    for shards in (True, False):
        for partial, late in cases:
            job = resumed(TOPOLOGY, precision, shards, folder / "shards", expected, late, partial=partial)
            goes_on(job, after, shards)
        for given, late in ((states, True), (local_states, False), (states, False), (local_states, True))[
            : 2 * len(cases)
        ]:
            job = begin(TOPOLOGY, precision, shards)
            if late:  # first the model, then the optimizer; else the other way round, before the partition
                job.step(0)
                job.model.load_state_dict(given[0])
            job.optimizer.load_state_dict(given[1])
            if not late:
                job.model.load_state_dict(given[0])
                cut(job)
            assert_same(job, expected)
            smp.shutdown()
    job = Job(TOPOLOGY, {"fully_shard": True})  # goes on in fp32, with the masters as its parameters
    resume(folder / "shards", tag="saved", strict=False)
    cut(job)
    parameters = {name: parameter for name, parameter in whole(job)[0].items() if name != "damp"}
    masters = {key.removesuffix("::master"): v for key, v in expected[1].items() if key.endswith("::master")}
    assert differences(parameters, masters) == []
    smp.shutdown()
    return expected


def save_both(job, path):
    for partial in (True, False):
        smp.save_checkpoint(str(path), "saved", partial=partial, model=job.model, optimizer=job.optimizer)


def goes_on(job, after, shards):
    """The steps that follow equal the saving job's; the norms of whole gradients are summed in another order."""
    seen = train(job, [4, 5])
    for (*found, norm), (*wanted, other) in zip(seen, after[0], strict=True):
        assert found[:2] == wanted[:2]
        assert torch.equal(found[2], wanted[2]) or found[1]
        assert float(norm) == pytest.approx(float(other), rel=1e-7 if shards else 1e-5)
    assert [differences(a, b) for a, b in zip(whole(job), after[1], strict=True)] == [[], []]
    smp.shutdown()


def check_checkpoints(folder, precision, cases):
    job = begin((1, 1, 1), precision, False)
    train(job, range(3))
    alone = state_of(job)
    save_both(job, folder / "alone")
    smp.shutdown()
    (expected, *_) = run_workers(checkpoints, 4, folder, precision, alone, cases)
    for partial, late in cases:
        resumed((1, 1, 1), precision, False, folder / "shards", expected, late, partial=partial)
        smp.shutdown()


# Partial or full checkpoints, resumed after the first step or before it.
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_every_kind_of_checkpoint_goes_from_parts_to_whole_tensors_and_back(tmp_path, precision):
    check_checkpoints(tmp_path, precision, [(partial, late) for partial in (True, False) for late in (True, False)])


def writes(rank, folder):
    """Masters follow what is written into parameters, whoever writes, and keep their bits elsewhere."""
    job = begin(TOPOLOGY, "bf16", True)
    train(job, range(2))
    model = job.model
    parameters, states = whole(job)
    masters = {key.removesuffix("::master"): value for key, value in states.items() if key.endswith("::master")}
    assert any(not torch.equal(value, parameters[name].float()) for name, value in masters.items())
    model.load_state_dict(parameters)  # what is there already
    assert differences(whole(job)[1], states) == []

    changed = {**parameters, "last.bias": parameters["last.bias"].float() + 1 / 3}  # fp32, as others may have it
    for write in (
        lambda: model.load_state_dict(changed),
        lambda: write_in_place(model),
        lambda: load_plain(job, folder),
    ):
        write()
        now, after = whole(job)
        for name, master in masters.items():
            expected = now[name].float() if name == "last.bias" else master
            assert torch.equal(after[f"{name}::master"], expected), name
        assert not torch.equal(now["last.bias"], parameters["last.bias"])
        parameters = now
    job.step(3)
    parameters, states = whole(job)
    assert all(torch.equal(states[f"{name}::master"].bfloat16(), parameters[name]) for name in masters)
    smp.shutdown()


def write_in_place(model):
    with torch.no_grad():
        for name, parameter in model.local_named_parameters():
            if name == "last.bias":
                parameter.add_(1.0)


def load_plain(job, folder):
    """A checkpoint of parameters alone, without masters."""
    state = job.model.state_dict()
    job.model.load_state_dict({**state, "last.bias": state["last.bias"] * 2})
    smp.save_checkpoint(str(folder / "plain"), "saved", model=job.model, force=True)
    job.model.load_state_dict(state)
    resume(folder / "plain", tag="saved", load_optimizer=False)


@pytest.mark.long
def test_masters_in_parts_follow_what_is_written_into_parameters(tmp_path):
    assert run_workers(writes, 4, tmp_path) == [None] * 4
