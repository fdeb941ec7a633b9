"""`fully_shard`: parameters, gradients and optimizer state in parts on the replicas, and the training that of whole ones."""

import pytest
import torch
from executor_harness import run_workers
from torch.distributed.tensor import DTensor
from v1_harness import FOR_THE_STEP, batches, evaluate, feed, start, train_step

import smpc.v1 as smp
from smpc.errors import ConfigUnsupportedError, PeerError
from smpc.sharding.dtensors import whole

# (model, schedule, whether blocks are checkpointed); of gpt2_tied both pipeline ranks hold the embedding
FEW = [("gpt2_tied", "1f1b", True)]
OTHERS = [
    ("gpt2", "interleaved-1f1b", True),
    ("gpt2", "gpipe", False),
    ("gpt2_tied", "gpipe", True),
    ("t5", "1f1b", False),
    ("llama", "interleaved-1f1b", False),
]


def begin(name, schedule, checkpoints, shards):
    module, model, _, kwargs = start(name, world=4, config={"schedule": schedule, "fully_shard": shards})
    for layer in module.transformer.h if checkpoints else ():
        smp.set_activation_checkpointing(layer)
    # Where a gradient is nothing but rounding errors, Adam would make steps of them without so large an eps.
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3))
    return model, optimizer, kwargs


def train(name, schedule, checkpoints, shards):
    model, optimizer, kwargs = begin(name, schedule, checkpoints, shards)
    losses = []
    for step, ids in enumerate(batches(kwargs, smp.rdp_rank())):
        ids = ids[:, : 12 - 4 * (step % 2)].contiguous()  # another program in the second step
        losses += [loss.detach() for loss in train_step(model, feed(ids), 1.0)["loss"].outputs]
        if step == 1:
            with torch.no_grad():
                losses += evaluate(model, feed(ids)).outputs
        norm = optimizer.clip_master_grads(0.5)
        optimizer.step()
        optimizer.zero_grad()
    parameters = list(model.local_parameters())
    return {
        "losses": torch.stack(losses),
        "norm": norm,
        "size": sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters),
        "whole": {name: p.numel() for name, p in model.local_named_parameters()},
        "state": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }


def both(rank, folder, cases):
    found = []
    for name, schedule, checkpoints in cases:
        pair = []
        for shards in (False, True):
            pair.append(train(name, schedule, checkpoints, shards))
            smp.shutdown()
        found.append(pair)
    return found


def assert_close(found, expected, rtol=1e-6, atol=1e-7):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def check(folder, cases):
    found = run_workers(both, 4, folder, cases)
    for kinds in zip(*found, strict=True):  # pipelines may be cut elsewhere where parts weigh less, but nothing is lost
        plain, shards = ({name: n for rank in kinds for name, n in rank[i]["whole"].items()} for i in (0, 1))
        assert shards == plain
    for results in found:
        for plain, shards in results:
            assert_close(shards["losses"], plain["losses"])
            assert_close(shards["norm"], plain["norm"])
            assert plain["size"] == sum(plain["whole"].values())
            assert shards["size"] <= 0.5 * sum(shards["whole"].values()) + 64  # tensors of an odd number of rows
            assert shards["state"].keys() == plain["state"].keys()
            for key, value in plain["state"].items():
                assert_close(shards["state"][key], value, rtol=1e-5, atol=1e-6)
            assert shards["optimizer"]["param_groups"] == plain["optimizer"]["param_groups"]
            assert shards["optimizer"]["state"].keys() == plain["optimizer"]["state"].keys()
            for name, items in plain["optimizer"]["state"].items():
                for key, value in items.items():
                    assert_close(shards["optimizer"]["state"][name][key], value, rtol=1e-4, atol=1e-7)


@pytest.mark.long
def test_training_is_that_of_whole_parameters(tmp_path):
    check(tmp_path, FEW)


@pytest.mark.slow
def test_training_is_that_of_whole_parameters_of_every_kind(tmp_path):
    check(tmp_path, OTHERS)


def hooked(rank, folder):
    module, model, _, kwargs = start("gpt2", world=4, config=FOR_THE_STEP)
    module.transformer.wte.weight.register_hook(lambda grad: grad)
    said = r"fully_shard: transformer\.wte\.weight has a hook on its gradient"
    with pytest.raises((ConfigUnsupportedError, PeerError), match=said):
        train_step(model, feed(batches(kwargs)[0]), 1.0)


@pytest.mark.long
def test_a_hook_on_a_gradient_is_refused_by_the_name_in_the_model(tmp_path):
    """It was named after the modules that hold a rank's stages."""
    run_workers(hooked, 4, tmp_path)


def saved_and_loaded(rank, folder):
    """A checkpoint of parts is one of whole tensors; state dicts go from whole to parts and back."""
    model, optimizer, kwargs = begin("gpt2_tied", "1f1b", False, True)
    data = [feed(ids) for ids in batches(kwargs, smp.rdp_rank())]
    before = dict(model.named_parameters())
    train_step(model, data[0], 1.0)
    old = [name for name, parameter in model.local_named_parameters() if parameter is before[name]]
    assert not old, f"still whole: {old}"
    optimizer.step()
    optimizer.zero_grad()
    smp.save_checkpoint(folder / "saved", "one", model=model, optimizer=optimizer)
    smp.save_checkpoint(folder / "saved", "one", partial=False, model=model, optimizer=optimizer)
    states = model.state_dict(), optimizer.state_dict(), model.local_state_dict(), optimizer.local_state_dict()
    losses = train_step(model, data[1], 1.0)["loss"].outputs
    optimizer.zero_grad()
    refused = []
    for act in (lambda: model.cpu(), lambda: model.register_comm_hook(None, None)):
        with pytest.raises(ConfigUnsupportedError) as error:
            act()
        refused.append(str(error.value))

    def again():
        found = train_step(model, data[1], 1.0)["loss"].outputs
        optimizer.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(found, losses, strict=True))

    def spoil():
        with torch.no_grad():
            for parameter in model.local_parameters():
                parameter.fill_(0.1)

    spoil()
    model.load_state_dict(states[0])
    again()
    spoil()
    model.load_state_dict(states[2])
    optimizer.load_state_dict(states[3])
    again()
    optimizer.load_state_dict(states[1])
    spoil()
    smp.resume_from_checkpoint(folder / "saved", "one")
    again()
    spoil()
    smp.resume_from_checkpoint(folder / "saved", "one", partial=False)
    again()
    for name, items in optimizer.state_dict()["state"].items():
        for key, value in items.items():
            assert torch.equal(value, states[1]["state"][name][key]), (name, key)
    smp.shutdown()
    plain, other, _ = begin("gpt2_tied", "1f1b", False, False)  # from parts to whole parameters, before the first step
    smp.resume_from_checkpoint(folder / "saved", "one")
    found = train_step(plain, data[1], 1.0)["loss"].outputs
    for loss, expected in zip(found, losses, strict=True):
        assert_close(loss, expected)
    assert_close(other.state_dict()["state"], states[1]["state"])
    return refused


@pytest.mark.long
def test_checkpoints_and_state_dicts(tmp_path):
    for refused in run_workers(saved_and_loaded, 4, tmp_path):
        assert all("fully_shard" in text for text in refused)


@smp.step
def step_without_last_backward(model, ids, number):
    loss = model(input_ids=ids, labels=ids).loss
    if int(number[0]) < 3:
        model.backward(loss)
    return loss


def without_last_backward(rank, folder):
    """Gradients are averaged all the same, and the next step goes on; by kind, by name."""
    found = []
    for shards in (False, True):
        model, _, kwargs = begin("gpt2", "interleaved-1f1b", False, shards)
        number = torch.arange(4).repeat_interleave(kwargs["input_ids"].shape[0] // 4)
        steps = [batches(kwargs, smp.rdp_rank())[0] for _ in range(2)]
        for ids in steps:
            step_without_last_backward(model, feed(ids), feed(number))
        train_step(model, feed(steps[0]), 1.0)
        found.append({name: whole(p.grad) for name, p in model.local_named_parameters()})
        smp.shutdown()
    return found


@pytest.mark.slow
def test_a_step_whose_last_microbatch_has_no_backward(tmp_path):
    for expected, found in run_workers(without_last_backward, 4, tmp_path):
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            assert_close(found[name], grad, rtol=1e-5)
