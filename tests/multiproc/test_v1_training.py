"""Training scripts written against smpc.v1, on real gloo processes, compared bitwise with plain PyTorch in one process."""

import copy
import datetime
import multiprocessing
import multiprocessing.forkserver
import warnings

import pytest
import torch
import torch.distributed as dist
import zoo
from executor_harness import Launch, run_workers
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

import smpc.v1 as smp
import smpc.v1.model as v1_model
from smpc.errors import CheckpointError, ConfigUnsupportedError, StepError, TraceError, UsageError

MB = 4
STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def server():
    """The server that all processes are forked from has imported what they need, if this file starts it."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["smpc.v1", "transformers.models.gpt2.modeling_gpt2"]
    )
    multiprocessing.forkserver.ensure_running()


def make_model(name="gpt2"):
    model, (args, kwargs) = zoo.build(name)
    return model, args, kwargs


def batches(kwargs, replica=0):
    generator = torch.Generator().manual_seed(100 + replica)
    ids = kwargs["input_ids"]
    return [torch.randint(3, zoo.VOCABULARY, ids.shape, generator=generator) for _ in range(STEPS)]


def feed(ids):
    """What a script passes: data on pipeline rank 0, an empty tensor elsewhere."""
    return ids if smp.pp_rank() == 0 else torch.empty(0)


def reference(name, num_replicas=1):
    """Losses by replica, step and microbatch, and the state dict after the steps, in plain PyTorch."""
    model, _, kwargs = make_model(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = [batches(kwargs, replica) for replica in range(num_replicas)]
    losses = [[] for _ in range(num_replicas)]
    for step in range(STEPS):
        grads = []
        for replica in range(num_replicas):
            optimizer.zero_grad()
            losses[replica].append([])
            for ids in data[replica][step].chunk(MB):
                loss = model(input_ids=ids, labels=ids).loss
                (loss / MB).backward()
                losses[replica][-1].append(loss.detach())
            grads.append([p.grad for p in model.parameters()])
        for i, parameter in enumerate(model.parameters()):
            shares = [grad[i] / num_replicas for grad in grads]
            parameter.grad = sum(shares[1:], shares[0])
        optimizer.step()
    return losses, model.state_dict(), optimizer.state_dict()


@smp.step
def train_step(model, ids, scale):
    output = model(input_ids=ids, labels=ids)
    model.backward(output.loss * scale)
    return {"loss": output.loss, "pair": (ids.shape[0], None), "output": CausalLMOutput(logits=output.logits)}


@smp.step
def evaluate(model, ids):
    return model(input_ids=ids, labels=ids).loss


# Partitions by hand, the others by default on 0, and the placement that results.
LAST_FIRST = (("transformer.wte", "transformer.wpe", "transformer.drop", "transformer.h.0", "transformer.h.1"), (1, 0))
AROUND = (("transformer.h.1", "transformer.h.2"), (0, 1, 0))


def start(name="gpt2", world=2, by_hand=None, **options):
    config = {"pipeline_parallel_degree": 2, "microbatches": MB, "ddp": world > 2}
    if by_hand is not None:
        config |= {"auto_partition": False, "default_partition": 0}
    smp.init(config)
    module, _, kwargs = make_model(name)
    for inner in by_hand[0] if by_hand is not None else ():
        smp.set_partition(module.get_submodule(inner), 1)
    model = smp.DistributedModel(module, **options)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    return module, model, optimizer, kwargs


def train(rank, folder, name, world, by_hand):
    module, model, optimizer, kwargs = start(name, world, by_hand)
    identities = [id(parameter) for parameter in model.parameters()]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    losses = []
    for ids in batches(kwargs, smp.rdp_rank()):
        optimizer.zero_grad()
        result = train_step(model, feed(ids), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(result["loss"].outputs)
        assert result["pair"] == ([len(ids) // MB] * MB, None)
        assert type(result["output"]) is CausalLMOutput
        assert result["output"].logits.concat().shape == (*ids.shape, zoo.VOCABULARY)
    assert identities == [id(parameter) for parameter in model.parameters()]
    local = {name for name, _ in model.local_named_parameters()}
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    assert {name for name, size in sizes.items() if size} == local
    if by_hand is not None:
        with pytest.raises(UsageError, match="modules do not move any more"):
            smp.set_partition(module, 0)
    state = model.state_dict()
    evaluated = [evaluate(model, feed(ids)).outputs for _ in range(3)]
    return {
        "losses": losses,
        "state": state,
        "optimizer": optimizer.state_dict(),
        "local": local,
        "evaluated": evaluated,
        "keys": list(state),
        "partial": model.local_state_dict(),
        "placement": tuple(stage.rank for stage in model._pipeline.plan.stages),
    }


@pytest.mark.parametrize(
    ("name", "world", "by_hand"),
    [
        ("gpt2", 2, None),
        ("gpt2", 4, None),
        ("gpt2", 2, LAST_FIRST),
        ("gpt2", 2, AROUND),
        ("gpt2", 4, AROUND),
    ],
)
def test_training_equals_one_process(tmp_path, name, world, by_hand):
    results = run_workers(train, world, tmp_path, name, world, by_hand)
    losses, state, optimizer = reference(name, world // 2)
    everything = set()
    placement = (0, 1) if by_hand is None else by_hand[1]
    for rank, result in enumerate(results):
        assert result["placement"] == placement
        replica = rank // 2
        for step in range(STEPS):
            for got, expected in zip(result["losses"][step], losses[replica][step], strict=True):
                assert torch.equal(got, expected), f"loss of step {step} on rank {rank}"
        assert result["keys"] == list(state)
        for key, value in state.items():
            assert torch.equal(result["state"][key], value), f"{key} on rank {rank}"
        names = list(dict(make_model(name)[0].named_parameters()))
        assert result["optimizer"]["param_groups"][0]["params"] == names
        assert list(result["optimizer"]["state"]) == names
        for number, items in optimizer["state"].items():
            for key, value in items.items():
                assert torch.equal(result["optimizer"]["state"][names[number]][key], value)
        assert result["partial"]["_smp_is_partial"] is True
        everything |= result["local"]
    assert results[0]["local"].isdisjoint(results[1]["local"])
    assert everything == set(names)
    model, _, kwargs = make_model(name)
    model.load_state_dict(state)
    for rank, result in enumerate(results):
        ids = batches(kwargs, rank // 2)[-1]
        expected = [model(input_ids=part, labels=part).loss.detach() for part in ids.chunk(MB)]
        for outputs in result["evaluated"]:  # with a training program, then the forward-only one
            for got, value in zip(outputs, expected, strict=True):
                assert torch.equal(got, value)


def modes_and_shapes(rank, folder, by_hand):
    """A new sequence length, evaluation mode and no_grad each get a program of their own; parameters stay."""
    module, model, optimizer, kwargs = start(by_hand=by_hand)
    ids = batches(kwargs)[0]
    found = {}
    calls = []
    model.register_post_partition_hook(lambda m, o: calls.append((m.partitioned, o is optimizer)))
    model.register_post_step_hook(lambda m, o: calls.append("step"))
    train_step(model, feed(ids), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    found["short"] = train_step(model, feed(ids[:, :7].contiguous()), 1.0)["loss"].outputs
    found["grads"] = {n: p.grad.clone() for n, p in model.local_named_parameters()}
    model.eval()
    with torch.no_grad():
        found["eval"] = evaluate(model, feed(ids)).outputs
    assert calls == [(True, True), "step", "step", "step"]
    model.train()
    found["again"] = train_step(model, feed(ids), 2.0)["loss"].outputs
    found["state"] = model.cpu().state_dict()
    assert all(parameter.numel() for parameter in module.parameters()), "the whole model is on the CPU"
    found["after cpu"] = evaluate(model, feed(ids)).outputs
    assert not all(parameter.numel() for parameter in module.parameters())
    return found


@pytest.mark.parametrize("by_hand", [None, AROUND], ids=["auto", "by hand"])
def test_modes_and_shapes(tmp_path, by_hand):
    first, second = run_workers(modes_and_shapes, 2, tmp_path, by_hand)
    model, _, kwargs = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = batches(kwargs)[0]

    def run(ids):
        losses = []
        for part in ids.chunk(MB):
            losses.append(model(input_ids=part, labels=part).loss)
            (losses[-1] / MB).backward()
        return losses

    run(ids)
    optimizer.step()
    optimizer.zero_grad()
    short = run(ids[:, :7].contiguous())
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    full = [model(input_ids=part, labels=part).loss for part in ids.chunk(MB)]
    for found in (first, second):
        for key, expected in (("short", short), ("eval", full), ("again", full), ("after cpu", full)):
            for got, value in zip(found[key], expected, strict=True):
                assert torch.equal(got, value), key
        for name, grad in found["grads"].items():
            assert torch.equal(grad, grads[name])
        for key, value in model.state_dict().items():
            assert torch.equal(found["state"][key], value)
    assert set(first["grads"]) | set(second["grads"]) == set(grads)


def save_and_load(rank, folder, by_hand):
    path = str(folder / "checkpoint.pt")
    module, model, optimizer, kwargs = start(by_hand=by_hand)
    data = batches(kwargs)

    def step(ids):
        optimizer.zero_grad()
        loss = train_step(model, feed(ids), 1.0)["loss"].reduce_mean()
        optimizer.step()
        return loss

    with pytest.raises(UsageError, match="partitioned by the first step"):
        model.local_state_dict()
    step(data[0])
    smp.save({"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict()}, path)
    full = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    gathered = model.state_dict(gather_to_rank0=True)
    assert bool(gathered) == (rank == 0)
    if rank == 0:
        smp.save(full, path, partial=False)
    smp.barrier()
    expected = [step(ids) for ids in data[1:]]
    state = model.state_dict()

    def check(load):
        load()
        assert all(torch.equal(a, b) for a, b in zip(expected, [step(ids) for ids in data[1:]], strict=True))
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())

    def load(partial, **options):
        loaded = smp.load(path, partial=partial)
        model.load_state_dict(loaded["model"], **options)
        optimizer.load_state_dict(loaded["optimizer"])

    check(lambda: load(True))
    check(lambda: load(True, same_partition_load=True))
    check(lambda: load(False))
    # In a new session, before the first step: loaded when the model is partitioned.
    for partial in (True, False):
        smp.shutdown()
        module, model, optimizer, kwargs = start(by_hand=by_hand)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        check(lambda partial=partial: load(partial))
    swapped = smp.load(f"{path}_{1 - rank}_0", partial=False)
    model.load_state_dict(swapped["model"])
    optimizer.load_state_dict(swapped["optimizer"])
    broken = dict(smp.load(path)["model"])
    key = next(key for key in broken if broken[key] is not True)
    broken[key] = broken[key][1:]
    broken["more"] = torch.ones(1)
    before = model.state_dict()
    with pytest.raises(CheckpointError, match=r"(?s)unexpected: more.*shape of "):
        model.load_state_dict(broken)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    return list(full["model"])


@pytest.mark.parametrize("by_hand", [None, AROUND], ids=["auto", "by hand"])
def test_save_and_load(tmp_path, by_hand):
    keys, _ = run_workers(save_and_load, 2, tmp_path, by_hand)
    assert keys == list(make_model()[0].state_dict())
    assert sorted(path.name for path in tmp_path.glob("*check*")) == [
        "checkpoint.pt",
        "checkpoint.pt_0_0",
        "checkpoint.pt_1_0",
    ]


@smp.step
def forgets_the_model(model, ids):
    return ids.sum()


@smp.step
def calls_twice(model, ids):
    return model(input_ids=ids).logits.sum() + model(input_ids=ids).logits.sum()


@smp.step
def backward_twice(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    model.backward(loss)


@smp.step
def not_scalar(model, ids):
    model.backward(model(input_ids=ids).logits)


@smp.step(non_split_inputs=["flags"])
def sometimes_trains(model, ids, flags):
    loss = model(input_ids=ids, labels=ids).loss
    if flags["train"]:
        model.backward(loss)
    return loss


@smp.step
def wants_gradients(model, embeddings):
    return model(inputs_embeds=embeddings).logits


def late_gather(rank, folder):
    _, model, _, kwargs = start()
    train_step(model, feed(batches(kwargs)[0]), 1.0)
    v1_model._GATHER_TIMEOUT = datetime.timedelta(seconds=1)
    if rank == 0:
        with pytest.raises(CheckpointError, match=r"(?s)state_dict must be called on all 2 ranks .* within 1 s"):
            model.state_dict()
    smp.barrier()
    return True


def test_gathering_on_some_ranks_only_is_an_error(tmp_path):
    assert run_workers(late_gather, 2, tmp_path) == [True, True]


def misuse(rank, folder, by_hand):
    module, model, optimizer, kwargs = start(by_hand=by_hand)
    ids = batches(kwargs)[0]
    with pytest.raises(StepError, match="outside a step"):
        model(input_ids=ids)
    with pytest.raises(StepError, match="outside a step"):
        model.backward(torch.ones(1))
    with pytest.raises(UsageError, match="only one"):
        smp.DistributedModel(module)
    with pytest.raises(ConfigUnsupportedError, match="trace_execution_times"):
        smp.DistributedModel(nn.Linear(1, 1), trace_execution_times=True)
    errors = [
        (lambda: train_step(model, feed(ids[:6]), 1.0), r"argument ids: size 6 of axis 0"),
        (lambda: forgets_the_model(model, feed(ids)), "without calling the model"),
        (lambda: calls_twice(model, feed(ids)), "calls the model twice"),
        (lambda: backward_twice(model, feed(ids)), "backward twice"),
        (lambda: not_scalar(model, feed(ids)), "reduce it to one"),
        (lambda: wants_gradients(model, feed(torch.randn(8, 4, 32, requires_grad=True))), "requires grad"),
    ]
    for call, message in errors:
        with pytest.raises(StepError, match=message):  # the same on every rank, and the next step goes on
            call()
    optimizer.zero_grad()
    for _ in range(2):
        sometimes_trains(model, feed(ids), {"train": False})
    with pytest.raises(StepError, match="its earlier calls did not"):
        sometimes_trains(model, feed(ids), {"train": True})
    assert all(parameter.grad is None for parameter in model.parameters())
    return train_step(model, feed(ids), 1.0)["loss"].outputs


@pytest.mark.parametrize("by_hand", [None, LAST_FIRST], ids=["auto", "by hand"])
def test_misuse_is_one_clear_error_on_every_rank(tmp_path, by_hand):
    first, second = run_workers(misuse, 2, tmp_path, by_hand)
    model, _, kwargs = make_model()
    for i, part in enumerate(batches(kwargs)[0].chunk(MB)):
        loss = model(input_ids=part, labels=part).loss.detach()
        assert torch.equal(first[i], loss)
        assert torch.equal(second[i], loss)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x = -x if x.sum() > 0 else x
        return x


@smp.step
def forward_only(model, x):
    return model(x)


def untraceable(rank, folder):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = smp.DistributedModel(Branches())
    with pytest.raises(TraceError, match="test_v1_training"):
        forward_only(model, torch.randn(4, 4))
    return True


def test_a_model_that_cannot_be_recorded_is_an_error_everywhere(tmp_path):
    assert run_workers(untraceable, 2, tmp_path) == [True, True]


class LossError(ArithmeticError):
    pass


def failing(rank, folder, place, by_hand):
    _module, model, _optimizer, kwargs = start(by_hand=by_hand)
    ids = batches(kwargs)[0]

    @smp.step
    def explode(model, ids):
        if place == "before the model" and smp.pp_rank() == 0:
            raise LossError("bomb")
        loss = model(input_ids=ids, labels=ids).loss
        if place == "after the model":
            raise LossError("bomb")
        model.backward(loss)
        return loss

    train_step(model, feed(ids), 1.0)
    explode(model, feed(ids))


@pytest.mark.parametrize(
    ("place", "by_hand", "culprit"),
    [("before the model", None, 0), ("after the model", None, 1), ("after the model", LAST_FIRST, 0)],
    ids=["before", "after", "after by hand"],
)
def test_an_exception_ends_all_ranks_with_its_traceback(tmp_path, place, by_hand, culprit):
    results = Launch(failing, 2, tmp_path, place, by_hand).wait(60.0)
    for rank, (status, log) in enumerate(results):
        assert status == 1, f"rank {rank}: {status}\n{log}"
        assert 'raise LossError("bomb")' in log, log
    assert "another rank failed first" in results[1 - culprit][1]


class TwoInputs(nn.Module):
    """Positional and keyword inputs, a buffer that changes, and an unused parameter."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList()
        for partition in (0, 1, 0, 1):
            with smp.partition(partition):
                self.layers.append(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
        self.norm = nn.BatchNorm1d(6)
        self.unused = nn.Linear(2, 2)

    def forward(self, x, shift=None, mode="a"):
        for layer in self.layers:
            x = layer(x) + (shift if mode == "a" else -shift)
        return self.norm(x)


@smp.step(input_split_axes={"batch": 1}, non_split_inputs=("weight",))
def nested_step(model, batch, weight, *, mode, tag):
    out = model(batch["x"].t(), shift=batch["more"][0].t(), mode=mode)
    loss = (out * weight).pow(2)
    model.backward([loss], [torch.full_like(loss, 0.5)])
    return loss.sum(), tag


def nested(rank, folder, by_hand):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "auto_partition": not by_hand, "default_partition": 0})
    torch.manual_seed(0)
    module = TwoInputs()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = smp.DistributedModel(module, average_grads_across_microbatches=False)
    assert ["auto_partition is true" in str(w.message) for w in caught] == ([True] if rank == 0 and not by_hand else [])
    torch.manual_seed(1)
    batch = {"x": torch.randn(6, 8), "more": [torch.randn(6, 8)], "name": "n"}
    weight = torch.randn(6)
    results = []
    for mode in ("a", "b"):
        if smp.pp_rank() == 0:
            results.append(nested_step(model, batch, weight=weight, mode=mode, tag=rank))
        else:
            results.append(nested_step(model, None, weight=None, mode=mode, tag=rank))
    return {
        "losses": [result[0].outputs for result in results],
        "tags": [result[1] for result in results],
        "grads": {name: p.grad for name, p in model.local_named_parameters()},
        "state": model.state_dict(),
    }


@pytest.mark.parametrize("by_hand", [False, True], ids=["auto", "by hand"])
def test_nested_arguments_buffers_and_gradients(tmp_path, by_hand):
    first, second = run_workers(nested, 2, tmp_path, by_hand)
    last = 0 if by_hand else 1
    torch.manual_seed(0)
    model = TwoInputs()
    torch.manual_seed(1)
    x, shift, weight = torch.randn(6, 8), torch.randn(6, 8), torch.randn(6)
    for call, mode in enumerate(("a", "b")):
        for m, (a, b) in enumerate(zip(x.chunk(2, 1), shift.chunk(2, 1), strict=True)):
            loss = (model(a.t(), shift=b.t(), mode=mode) * weight).pow(2)
            loss.backward(torch.full_like(loss, 0.5))
            for result in (first, second):
                assert torch.equal(result["losses"][call][m], loss.sum().detach())
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    for result in (first, second):
        assert result["tags"] == [[last, last], [last, last]], "the last rank's own argument"
        for name, grad in result["grads"].items():
            assert grad is None if grads[name] is None else torch.equal(grad, grads[name]), name
        for key, value in model.state_dict().items():
            assert torch.equal(result["state"][key], value), key
    assert set(first["grads"]) | set(second["grads"]) == set(grads)


def unequal_modes(rank, folder):
    _module, model, _optimizer, kwargs = start()
    ids = batches(kwargs)[0]
    if rank == 1:
        model.eval()
    with pytest.raises(StepError, match="same mode on all ranks"):
        train_step(model, feed(ids), 1.0)
    model.train()
    train_step(model, feed(ids), 1.0)
    return True


def test_modes_that_differ_between_ranks_are_an_error(tmp_path):
    assert run_workers(unequal_modes, 2, tmp_path) == [True, True]


def replicas_with_unlike_batches(rank, folder):
    """The replicas' first batches have other lengths: both are cut as replica 0 says, and gradients are averaged."""
    _module, model, _optimizer, kwargs = start(world=4)
    ids = batches(kwargs)[0][:, : 12 - 4 * smp.rdp_rank()].contiguous()
    train_step(model, feed(ids), 1.0)
    grads = {name: parameter.grad for name, parameter in model.local_named_parameters()}
    for grad in grads.values():
        copies = [torch.empty_like(grad) for _ in range(2)]
        dist.all_gather(copies, grad, group=smp.get_dp_process_group())
        assert torch.equal(*copies)
    return grads


def test_replicas_with_unlike_batches(tmp_path):
    results = run_workers(replicas_with_unlike_batches, 4, tmp_path)
    grads = {}
    base, _, kwargs = make_model()
    for replica in range(2):
        model = copy.deepcopy(base)
        ids = batches(kwargs)[0][:, : 12 - 4 * replica].contiguous()
        for part in ids.chunk(MB):
            (model(input_ids=part, labels=part).loss / MB).backward()
        for name, parameter in model.named_parameters():
            grads[name] = grads[name] + parameter.grad / 2 if replica else parameter.grad / 2
    for result in results:
        for name, grad in result.items():
            torch.testing.assert_close(grad, grads[name], rtol=1e-5, atol=1e-8)


OPTIONS = [
    {},
    {"overlapping_allreduce": False, "broadcast_buffers": False},
    {"backward_passes_per_step": 2, "gradient_as_bucket_view": True, "bucket_cap_mb": 1},
    {"hook": True},
]


def halve(state, bucket):
    state.append(bucket.index())
    flat = bucket.buffer() / 2
    dist.all_reduce(flat)
    future = torch.futures.Future()
    future.set_result(flat)
    return future


@smp.step
def small_step(model, x):
    loss = model(x).pow(2).mean()
    model.backward(loss)
    return loss


def small_data(replica):
    generator = torch.Generator().manual_seed(replica)
    return [torch.randn(4, 6, generator=generator) for _ in range(2)]


class Small(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.layers(x)


def replicas_without_pipeline(rank, folder):
    found = []
    for options in OPTIONS:
        options = dict(options)
        hook = options.pop("hook", False)
        smp.init({"pipeline_parallel_degree": 1, "microbatches": 2, "ddp": True})
        model = smp.DistributedModel(Small(rank), **options)  # other weights: those of replica 0 count
        calls = []
        if hook:
            model.register_comm_hook(calls, halve)
        for x in small_data(rank):
            small_step(model, x)
        assert bool(calls) == hook
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
        smp.shutdown()
    return found


def test_replicas_without_pipeline(tmp_path):
    results = run_workers(replicas_without_pipeline, 2, tmp_path)
    grads = []
    for replica in range(2):
        model = Small(0)
        for x in small_data(replica):
            for part in x.chunk(2):
                (model(part).pow(2).mean() / 2).backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name in grads[0]:
        expected = None if grads[0][name] is None else (grads[0][name] + grads[1][name]) / 2
        for result in results:
            for options, found in zip(OPTIONS, result, strict=True):
                if expected is None:
                    assert found[name] is None
                else:
                    torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-7, msg=f"{name} {options}")


def train_tied(rank, folder, name, world=2, by_hand=None):
    _, model, optimizer, kwargs = start(name, world, by_hand)
    losses = []
    for ids in batches(kwargs, smp.rdp_rank()):
        optimizer.zero_grad()
        losses.append(train_step(model, feed(ids), 1.0)["loss"].outputs)
        optimizer.step()
    return losses, model.state_dict(), {name: parameter.detach() for name, parameter in model.local_named_parameters()}


@pytest.mark.parametrize("name", ["gpt2_tied", "t5"])
def test_parameters_that_both_ranks_hold_stay_equal(tmp_path, name):
    results = run_workers(train_tied, 2, tmp_path, name)
    losses, state, _ = reference(name)
    shared = results[0][2].keys() & results[1][2].keys()
    assert shared, "the embedding is used at both ends"
    for key in shared:
        assert torch.equal(results[0][2][key], results[1][2][key])
    for found, merged, _ in results:
        assert all(torch.equal(a, b) for a, b in zip(found[0], losses[0][0], strict=True)), "before any update"
        torch.testing.assert_close(found, losses[0], rtol=1e-4, atol=0.0)
        assert list(merged) == list(state)
        for key, value in state.items():
            torch.testing.assert_close(merged[key], value, rtol=1e-3, atol=1e-4, msg=key)


@pytest.mark.parametrize("world", [2, 4])
def test_a_parameter_on_two_stages_of_one_rank(tmp_path, world):
    """The tied embedding is on the first and the last stage, both on rank 0: one parameter, reduced once over the replicas."""
    results = run_workers(train_tied, world, tmp_path, "gpt2_tied", world, AROUND)
    losses, state, _ = reference("gpt2_tied", world // 2)
    for rank, (found, merged, local) in enumerate(results):
        assert ("transformer.wte.weight" in local) == (rank % 2 == 0)
        assert all(torch.equal(a, b) for a, b in zip(found[0], losses[rank // 2][0], strict=True)), "before any update"
        torch.testing.assert_close(found, losses[rank // 2], rtol=1e-4, atol=0.0)
        for key, value in state.items():
            torch.testing.assert_close(merged[key], value, rtol=1e-3, atol=1e-4, msg=key)
            assert torch.equal(merged[key], results[0][1][key]), "the same on all replicas"
