"""Delayed parameters, offloading, random states and what `tsm.init` patches, in one process, beside plain PyTorch."""

import copy
import gc

import pytest
import torch
import transformers
from expert_models import LoopBlock, make
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    OffloadWrapper,
    apply_activation_checkpointing,
    offload_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel

import smpc.v2 as tsm
from smpc.errors import ConfigError, ConfigTypeError, ConfigUnsupportedError, UsageError
from smpc.executor.collectives import TensorGroup
from smpc.executor.layer_offload import LayerOffload
from smpc.experts.stacked import take_role
from smpc.v2.delayed_param import DelayedParamIniter
from smpc.v2.moe.moe_config import MoEConfig
from smpc.v2.session.random_state_tracker import RngStateTracker
from smpc.v2.tensor_parallel.transformer import TransformerLayer
from smpc.v2.transforming.transformed_experts import Shuffled, divide_experts
from smpc.v2.utils.module_utils import empty_module_params, move_buffers_to_device


@pytest.fixture
def session():
    tsm.init()
    yield
    tsm.state.reset()


def llama(**options):
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, pad_token_id=7, **options))


def delayed(make, **options):
    with torch.device("meta"):
        model = make(**options)
    return model, DelayedParamIniter(model)


def fill(model, initer, has_shared=True):
    for module in model.modules():
        initer.get_param_init_fn()(module)
    if has_shared:
        initer.get_post_param_init_fn()()


def test_what_is_drawn_has_the_model_s_own_distribution(session):
    model, initer = delayed(llama)
    with initer.validate_params_and_buffers_inited():
        fill(model, initer)
    drawn, eager = model.state_dict(), llama().state_dict()
    for name, wanted in eager.items():
        assert drawn[name].shape == wanted.shape
        if "norm" in name:
            assert torch.equal(drawn[name], torch.ones_like(wanted))
        else:
            assert abs(float(drawn[name].std()) - 0.02) < 0.002, name
            assert abs(float(drawn[name].mean())) < 0.003, name
    assert torch.equal(drawn["model.embed_tokens.weight"][7], torch.zeros(32))
    rope, again = model.model.rotary_emb.inv_freq, llama().model.rotary_emb.inv_freq
    assert torch.equal(rope, again)


def test_values_depend_on_seed_and_name_alone(session):
    one, first = delayed(llama)
    fill(one, first)
    torch.manual_seed(99)
    other, second = delayed(llama)
    for module in reversed(list(other.modules())):
        second.get_param_init_fn()(module)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_shared_weights_are_tied_again(session):
    model, initer = delayed(llama, tie_word_embeddings=True)
    with initer.validate_params_and_buffers_inited():
        fill(model, initer)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with pytest.raises(AttributeError, match="tie_weights"):
        DelayedParamIniter(nn.Linear(2, 2)).get_post_param_init_fn()


def test_a_function_of_ones_own_initializes_plain_modules(session):
    def init(module):
        empty_module_params(module, device=torch.device("cpu"))
        if isinstance(module, nn.Linear):
            module.weight.data.fill_(2.0)
            module.bias.data.zero_()
        move_buffers_to_device(module, device=torch.device("cpu"))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    initer = DelayedParamIniter(model, init_method_using_config=init)
    with initer.validate_params_and_buffers_inited():
        fill(model, initer, has_shared=False)
    assert model(torch.ones(1, 2)).item() == 24.0


def test_what_nothing_initializes_is_an_assertion_error(session):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))

    model, initer = delayed(lambda: nn.Sequential(nn.Linear(2, 2), Odd()))
    with pytest.raises(AssertionError, match=r"nothing fills 1.weight; give Odd a method reset_parameters"):
        fill(model, initer, has_shared=False)
    model, initer = delayed(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with (
        pytest.raises(
            AssertionError,
            match=r"expected 12 initialized parameters, found 6; nothing has initialized 1.weight, 1.bias",
        ),
        initer.validate_params_and_buffers_inited(),
    ):
        initer.get_param_init_fn()(model[0])
    with initer.validate_params_and_buffers_inited(enabled=False):
        pass


@pytest.mark.parametrize("horizon", [1, 2, 3, 10])
def test_offloading_changes_no_bit_and_holds_the_horizon(horizon):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))
    apply_activation_checkpointing(
        model, check_fn=lambda module: isinstance(module, nn.Sequential) and len(module) == 2
    )
    x = torch.randn(4, 8)
    plain = copy.deepcopy(model)
    plain(x).square().sum().backward()
    offload = LayerOffload(horizon)
    with offload:
        output = model(x)
    kept = [saved().value is not None for saved in offload._saved]
    assert kept == [False] * max(0, len(kept) - horizon) + [True] * min(horizon, len(kept))
    most = []
    load = offload._load

    def count(saved):
        load(saved)
        most.append(sum(each() is not None and each().value is not None for each in offload._saved))

    offload._load = count
    output.square().sum().backward()
    assert max(most) <= horizon
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_offload_wrapper_is_ours_while_there_is_a_session(session, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "smpc.v2.session.fsdp_patch.LayerOffload", lambda horizon: seen.append(horizon) or LayerOffload(horizon)
    )
    model = offload_wrapper(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)))
    model(torch.ones(1, 2)).sum().backward()
    assert seen == [2]
    tsm.state.sm_activation_offloading = False
    model(torch.ones(1, 2)).sum().backward()
    assert seen == [2]


def test_reset_takes_patches_back():
    before = FullyShardedDataParallel.__init__, OffloadWrapper.forward
    tsm.init()
    assert FullyShardedDataParallel.__init__ is not before[0]
    assert OffloadWrapper.forward is not before[1]
    tsm.state.reset()
    assert (FullyShardedDataParallel.__init__, OffloadWrapper.forward) == before


def test_random_states_are_apart():
    tracker = RngStateTracker()
    tracker.add("mine", 5)
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    with tracker.fork("mine"):
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), wanted)
    states = tracker.get_states()
    with tracker.fork("mine"):
        second = torch.rand(3)
    tracker.set_states(states)
    with tracker.fork("mine"):
        assert torch.equal(torch.rand(3), second)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), first)
    with pytest.raises(UsageError, match="expected a new name, found 'mine'"):
        tracker.add("mine", 6)
    with pytest.raises(UsageError, match="expected a new seed, found 5"):
        tracker.add("other", 5)
    with pytest.raises(UsageError, match="there are 'mine'"), tracker.fork("yours"):
        pass


def test_the_session_has_a_state_of_its_seed(session):
    with tsm.state.get_rng_state_tracker().fork():
        found = torch.rand(2)
    torch.manual_seed(12345)
    assert torch.equal(torch.rand(2), found)


def test_transform_leaves_a_model_what_it_is(session):
    model = llama()
    before = copy.deepcopy(model.state_dict())
    made = tsm.transform(model, dtype=torch.float64)
    assert made is model
    assert all(torch.equal(value, before[name].double()) for name, value in made.state_dict().items())
    assert sum(isinstance(module, TransformerLayer) for module in made.modules()) == 2
    with pytest.raises(ValueError, match="cp_comm_type: expected one of p2p"):
        tsm.transform(model, cp_comm_type="ring")
    with pytest.raises(ConfigTypeError, match="config: expected None"):
        tsm.transform(model, config=3)
    with pytest.raises(ConfigError, match="no module looks like experts"):
        tsm.transform(model, config=MoEConfig())
    with pytest.raises(ConfigUnsupportedError, match="found settings of num_layers"):
        tsm.transform(model, config={"num_layers": 2})
    assert tsm.transform(model, config=MoEConfig(smp_moe=False)) is model
    meta, _ = delayed(llama)
    assert next(tsm.transform(meta, device=torch.device("cpu")).parameters()).is_meta
    with pytest.raises(UsageError, match=r"expected rank 0 to have all weights, found model.embed_tokens.weight"):
        tsm.transform(meta, load_state_dict_from_rank0=True)


@pytest.mark.parametrize(
    ("name", "settings", "match"),
    [
        ("MixtralForCausalLM", {"global_token_shuffle": True}, "global_token_shuffle: not with tensor or context"),
        ("loop", {}, "moe_load_balancing: 'sinkhorn' needs experts in one module"),
    ],
)
def test_what_does_not_go_with_slices_of_weights_and_sequences(name, settings, match):
    """Nothing has been changed by then: no group is asked for anything."""
    model = make(name)
    with pytest.raises(ConfigUnsupportedError, match=match):
        divide_experts(model, TensorGroup(), MoEConfig(**settings), None, is_recorded=True)
    assert [p.shape for p in model.parameters()] == [p.shape for p in make(name).parameters()]


def test_shuffled_blocks_take_hidden_states_alone():
    """Tensors beside them stayed in the order of the tokens that other ranks have now, without a word."""
    block = LoopBlock()
    take_role(block, Shuffled)
    with pytest.raises(
        UsageError, match=r"global_token_shuffle: expected blocks .* found LoopBlock called with 1 more tensors"
    ):
        block(torch.ones(2, 16), {"mask": torch.ones(2)})


def test_moe_config_lists_what_is_wrong():
    assert MoEConfig() == MoEConfig(True, 12345, "sinkhorn", False, True, 0.001, 0.001)
    with pytest.raises(
        ValueError, match="moe_load_balancing: expected one of aux_loss, sinkhorn, balanced, none, found 'other'"
    ):
        MoEConfig(moe_load_balancing="other")
    with pytest.raises(ConfigTypeError) as caught:
        MoEConfig(smp_moe=1, moe_z_loss_coeff=-1.0)
    assert str(caught.value).splitlines() == [
        "smp_moe: expected bool, found int 1",
        "moe_z_loss_coeff: expected a finite number of at least 0, found -1.0",
    ]
    assert issubclass(ConfigTypeError, ConfigError)


def test_offloading_frees_what_is_away():
    offload = LayerOffload(1)
    with offload:
        x = torch.ones(4, requires_grad=True) * 2
        y = x.sin().sin().sin()
    gc.collect()
    assert sum(saved().value is not None for saved in offload._saved) == 1
    y.sum().backward()
