"""Checkpoints of parts: saved at one (pipeline, tensor, sharded) arrangement, loaded at any other, in whole and as Hugging Face's."""

import copy

import pytest
import torch
from executor_harness import run_workers
from test_v1_degrees import MB, STEPS, batches, make, optimizer_of, settings, train_step

import smpc.v1 as smp
from smpc.errors import ConfigUnsupportedError

# (pipeline degree, tensor degree, what tensor ranks split, sharding, schedule, whether each tensor rank has samples of its own)
PARTS, REPLICAS, SLICES = (1, 1, "", 4, "", False), (1, 1, "", "no", "", False), (1, 2, "auto", "all", "", False)
STAGES, HYBRID = (2, 1, "", 2, "1f1b", False), (1, 1, "", 2, "", False)


def begin(case):
    smp.init(settings(*case))
    model = smp.DistributedModel(make())
    return model, smp.DistributedOptimizer(optimizer_of(model))


def train(model, optimizer, first, last):
    losses = []
    for step, batch in enumerate(batches()):
        if first <= step < last:
            optimizer.zero_grad()
            loss = train_step(model, *(t.chunk(smp.rdp_size())[smp.rdp_rank()] for t in batch)).reduce_mean()
            losses.append(torch.stack(smp.allgather(loss, smp.RDP_GROUP)).double().mean().item())
            optimizer.step()
    return losses


def saved_and_loaded(rank, folder, source, targets):
    model, optimizer = begin(source)
    train(model, optimizer, 0, 2)
    where = folder / "checkpoints"
    smp.save_checkpoint(where, "two", model=model, optimizer=optimizer)
    smp.save_checkpoint(where, "whole", partial=False, model=model, optimizer=optimizer)
    states = model.state_dict(), optimizer.state_dict()
    if source[3] != "no":
        with pytest.raises(ConfigUnsupportedError, match="fully_shard"):
            model.cpu()
    smp.shutdown()
    losses = []
    for target in targets:
        for how in ("parts", "whole", "states"):
            model, optimizer = begin(target)
            if how == "states":
                model.load_state_dict(states[0])
                optimizer.load_state_dict(copy.deepcopy(states[1]))  # as in torch, its tensors become the optimizer's
            else:
                smp.resume_from_checkpoint(where, {"parts": "two", "whole": "whole"}[how], partial=how == "parts")
            losses.append((target, how, smp.rdp_size(), train(model, optimizer, 2, STEPS)))
            smp.shutdown()
    return losses


def reference(first_parts, later_parts):
    """Losses of the last steps in one process. Samples differ in length, so it matters over which parts losses are averaged."""
    model = make()
    optimizer = optimizer_of(model)
    losses = []
    for step, batch in enumerate(batches()):
        optimizer.zero_grad()
        number = (first_parts if step < 2 else later_parts) * MB
        parts = zip(*(tensor.chunk(number) for tensor in batch), strict=True)
        loss = sum(model(input_ids=i, attention_mask=m, labels=y).loss for i, m, y in parts) / number
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses[2:]


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "targets"),
    [
        (PARTS, [REPLICAS]),
        pytest.param(SLICES, [SLICES, STAGES, HYBRID], marks=pytest.mark.slow),
        pytest.param(STAGES, [PARTS, SLICES], marks=pytest.mark.slow),
        pytest.param(REPLICAS, [PARTS, HYBRID], marks=pytest.mark.slow),
    ],
    ids=["parts", "slices", "stages", "replicas"],
)
def test_saved_at_one_arrangement_and_loaded_at_another(tmp_path, source, targets):
    results = run_workers(saved_and_loaded, 4, tmp_path, source, targets)
    for losses in results:
        for target, how, num_parts, found in losses:
            expected = reference(4 // (source[0] * source[1]), num_parts)
            assert found == pytest.approx(expected, rel=5e-6), (target, how)
