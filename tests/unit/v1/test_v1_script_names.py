"""Names that scripts for SMP use beside the reference's: what they give, and that it is right."""

import hugging_face
import pytest
import torch
from torch import nn

import smpc.v1 as smp
from smpc.errors import UsageError
from smpc.v1.state_mod import state


@pytest.fixture
def session():
    smp.init({"partitions": 1, "ddp": True})
    yield
    smp.shutdown()


def test_namespaces_have_what_scripts_import_from_them():
    assert smp.model.DistributedModel is smp.DistributedModel
    assert smp.state_mod.state is smp.state is state
    assert smp.delayed_parameter_initialization is smp.delay_param_initialization


def test_translations_are_those_of_the_layers_that_are_distributed(session):
    assert state.module_manager.translate_functions == []
    with smp.tensor_parallelism():
        torch.manual_seed(0)
        module = hugging_face.build("gptneo")
    theirs = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.warns(UserWarning, match="shares weight with another module"):
        model = smp.DistributedModel(module)
    [(to_theirs, to_ours)] = state.module_manager.translate_functions
    ours = model.state_dict()
    back = to_theirs(ours)
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], value) for name, value in theirs.items())
    assert to_ours(theirs).keys() == ours.keys()
    fresh = hugging_face.build("gptneo", seed=3)
    fresh.load_state_dict(back)
    batch = hugging_face.batch("gptneo", 2)
    torch.testing.assert_close(model(**batch).logits, fresh(**batch).logits, rtol=1e-5, atol=1e-6)
    smp.shutdown()
    assert state.module_manager.translate_functions == []


def test_parameters_by_number_and_by_name(session):
    with pytest.raises(UsageError, match=r"smp.state.param_index_to_name_tp_group: expected a smp.DistributedModel"):
        _ = state.param_index_to_name_tp_group
    smp.DistributedModel(nn.Linear(2, 3))
    assert state.param_index_to_name_tp_group == [{0: "weight", 1: "bias"}]
    assert state.param_name_to_index_tp_group == [{"weight": 0, "bias": 1}]
    state.param_index_to_name_tp_group = state.param_name_to_index_tp_group = [{}]
    assert state.param_index_to_name_tp_group == state.param_name_to_index_tp_group == [{}]


def test_what_is_asked_of_a_parameter(session):
    with pytest.raises(UsageError, match=r"get_distribution_axis: expected a smp.DistributedModel"):
        smp.utils.get_distribution_axis(torch.ones(1))
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    smp.set_tensor_parallelism(module[0])
    model = smp.DistributedModel(module)
    for parameter in model.parameters():
        assert smp.utils.get_distribution_axis(parameter) is None, "one rank has all of it"
    assert smp.utils.get_distribution_axis(nn.Parameter(torch.ones(1))) is None


def test_messages_say_who_prints_them():
    assert smp.utils.rmsg("hello") == "hello"
    smp.init({"partitions": 1})
    assert smp.utils.rmsg(3) == "[rank 0, local 0, pp 0, tp 0, rdp 0] 3"
    smp.shutdown()


def test_the_older_functions_for_optimizers(session):
    model = smp.DistributedModel(nn.Linear(2, 3))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = optimizer.save_optimizer_backcompat(gather_if_shard=False)
    assert saved.keys() == optimizer.local_state_dict().keys()
    other = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    other.load_optimizer_backcompat(saved, False)
    for name, items in saved["state"].items():
        for key, value in items.items():
            assert torch.equal(torch.as_tensor(other.local_state_dict()["state"][name][key]), torch.as_tensor(value))


def test_a_loss_scale_that_a_post_step_hook_loads_is_not_that_of_the_gradients_before_it():
    """The hook runs after the first backward: its gradients were of the scale that the optimizer began with."""
    smp.init({"partitions": 1, "microbatches": 1, "fp16": True})
    try:
        torch.manual_seed(0)
        model = smp.DistributedModel(nn.Linear(2, 3))
        optimizer = smp.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 4.0}
        )

        def load(model, optimizer):
            saved = optimizer.save_optimizer_backcompat()
            saved["loss_scaler"]["scale"] = 64.0
            optimizer.load_optimizer_backcompat(saved)

        model.register_post_step_hook(load)

        @smp.step
        def train(model, x):
            loss = model(x).sum()
            model.backward(loss)
            return loss

        for scale in (64.0, 64.0):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            optimizer.zero_grad()
            train(model, torch.ones(1, 2, dtype=torch.float16))
            assert optimizer.loss_scale == scale
            norm = optimizer.clip_master_grads(100.0)
            assert norm.item() == pytest.approx(3.0)  # nine gradients of one
            optimizer.step()
            for old, new in zip(before, model.parameters(), strict=True):
                torch.testing.assert_close(new, old - 1, rtol=1e-3, atol=1e-3)
    finally:
        smp.shutdown()
