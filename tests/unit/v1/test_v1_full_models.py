"""Full models as scripts save and load them: without an optimizer, over what is there, with a configuration beside them."""

import argparse

import pytest
import torch
from torch import nn

import smpc.v1 as smp
from smpc.errors import CheckpointError


@pytest.fixture
def model():
    smp.init()
    torch.manual_seed(0)
    yield smp.DistributedModel(nn.Linear(2, 3))
    smp.shutdown()


def changed(model):
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.get_module().weight.zero_()
    return saved


def same(model, saved):
    return all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


def test_a_model_is_loaded_before_there_is_an_optimizer(model, tmp_path):
    smp.save_checkpoint(str(tmp_path), "fullmodel.pt", partial=False, model=model, user_content={"step": 3})
    saved = changed(model)
    with pytest.warns(UserWarning, match=r"there is no smp.DistributedOptimizer yet, so the model is loaded alone"):
        content = smp.resume_from_checkpoint(str(tmp_path), tag="fullmodel.pt", partial=False)
    assert content == {"step": 3}
    assert same(model, saved)


def test_a_partial_checkpoint_is_loaded_before_there_is_an_optimizer_if_it_has_none_either(model, tmp_path, recwarn):
    smp.save_checkpoint(str(tmp_path), "alone", model=model)
    saved = changed(model)
    smp.resume_from_checkpoint(str(tmp_path))
    assert same(model, saved)
    assert not [each for each in recwarn if "optimizer" in str(each.message)]
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    smp.save_checkpoint(str(tmp_path), "both", model=model, optimizer=optimizer)
    smp.state.optimizer = None
    with pytest.raises(CheckpointError, match=r"both_partial has the state of an optimizer, and there is no smp\.Dist"):
        smp.resume_from_checkpoint(str(tmp_path))
    smp.resume_from_checkpoint(str(tmp_path), load_optimizer=False)


def test_a_number_of_partial_checkpoints_says_nothing_of_full_ones(model, tmp_path):
    with pytest.warns(UserWarning, match="num_kept_partial_checkpoints has no effect"):
        smp.save_checkpoint(str(tmp_path), "one", partial=False, model=model, num_kept_partial_checkpoints=1)
    with pytest.warns(UserWarning, match="num_kept_partial_checkpoints has no effect") as told:
        smp.save_checkpoint(str(tmp_path), "two", partial=False, model=model, num_kept_partial_checkpoints=1)
    assert [each.filename for each in told] == [__file__]  # it names the script's line
    assert (tmp_path / "one").is_file()
    assert (tmp_path / "two").is_file()


@pytest.mark.parametrize("partial", [True, False])
def test_a_model_that_was_saved_alone_is_loaded_beside_an_optimizer(model, tmp_path, partial):
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    smp.save_checkpoint(str(tmp_path), "model", partial, model=model)
    state, saved = optimizer.state_dict()["state"]["weight"]["exp_avg"].clone(), changed(model)
    with pytest.warns(UserWarning, match="has no optimizer state: the optimizer begins anew"):
        smp.resume_from_checkpoint(str(tmp_path), partial=partial)
    assert same(model, saved)
    assert torch.equal(optimizer.state_dict()["state"]["weight"]["exp_avg"], state)
    smp.resume_from_checkpoint(str(tmp_path), partial=partial, load_optimizer=False)


@pytest.mark.parametrize("partial", [True, False])
def test_a_tag_is_saved_over_and_its_content_is_the_new_one(model, tmp_path, partial):
    smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    for lr in (0.1, 0.2):
        content = {"cli_args": argparse.Namespace(lr=lr, layers=[1, 2]), "config": vars}
        smp.save_checkpoint(
            str(tmp_path), "same", partial, model=model, optimizer=smp.state.optimizer, user_content=content
        )
    found = smp.resume_from_checkpoint(str(tmp_path), tag="same", partial=partial)
    assert found["cli_args"] == {"lr": 0.2, "layers": [1, 2]}
    assert (found["cli_args"].lr, found["cli_args"].class_name) == (0.2, "argparse.Namespace")
    assert found["config"].text == "<built-in function vars>"
    with pytest.raises(CheckpointError, match="exists and is not overwritten"):
        smp.save_checkpoint(str(tmp_path), "same", partial, model=model, force=False)
