"""A DistributedModel shows what code that looks at a model looks for, and its errors show the script's lines."""

import inspect
import traceback

import pytest
import torch
from executor_harness import run_workers
from v1_harness import STEPS, batches, evaluate, feed, make_model, reference, start, train_step

import smpc.v1 as smp
from smpc.errors import PeerError, StepError

NEW = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def look(rank, folder):
    module, model, optimizer, kwargs = start()
    assert model.config is module.config
    assert inspect.signature(model) == inspect.signature(model.forward) == inspect.signature(module.forward)
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    assert not hasattr(model, "surely_not")
    with pytest.raises(AttributeError, match=r"model.get_module\(\).resize_token_embeddings, .* before smp.Dist"):
        model.resize_token_embeddings(3)
    prompt = kwargs["input_ids"][:2, :4]
    first = model.generate(prompt, **NEW)
    losses = []
    for ids in batches(kwargs):
        optimizer.zero_grad()
        losses.append(train_step(model, feed(ids), 1.0)["loss"].item())
        model.generate(prompt, **NEW)  # between the backward and the update, which it must not change
        optimizer.step()
    with pytest.raises((ValueError, PeerError)[rank], match="no_argument"):
        model.generate(prompt, no_argument=1)
    last = model.generate(feed(prompt), **NEW)
    evaluate(model, feed(batches(kwargs)[0]))
    return first, losses, last, model.state_dict()


@pytest.mark.long
def test_a_model_in_a_pipeline_generates_what_it_would_in_one_process(tmp_path):
    losses, trained, _ = reference("gpt2")
    module, _, kwargs = make_model("gpt2")
    prompt = kwargs["input_ids"][:2, :4]
    first = module.generate(prompt, **NEW)
    module.load_state_dict(trained)
    last = module.generate(prompt, **NEW)
    for found in run_workers(look, 2, tmp_path):
        assert torch.equal(found[0], first)
        assert found[1] == [torch.stack(losses[0][step]).sum().item() / 4 for step in range(STEPS)]
        assert torch.equal(found[2], last)
        assert all(torch.equal(value, found[3][name]) for name, value in trained.items())


def called_by_the_step(model, ids):
    return model(input_ids=ids, labels=ids).loss


@smp.step
def calls_twice(model, ids):
    return called_by_the_step(model, ids) + called_by_the_step(model, ids)


def fail(rank, folder):
    _, model, _, kwargs = start()
    train_step(model, feed(batches(kwargs)[0]), 1.0)
    with pytest.raises(StepError, match="calls the model twice") as caught:
        calls_twice(model, feed(batches(kwargs)[0]))
    return traceback.format_exception(caught.value)


def test_a_step_error_shows_the_lines_of_the_script_and_none_of_ours(tmp_path):
    for lines in run_workers(fail, 2, tmp_path):
        text = "".join(lines)
        assert "calls_twice(model, feed(batches(kwargs)[0]))" in text
        assert "return called_by_the_step(model, ids) + called_by_the_step(model, ids)" in text or (
            "in called_by_the_step: return model(input_ids=ids, labels=ids).loss" in text
        )
        assert "smpc/v1/steps/" not in text
