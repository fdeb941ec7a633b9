"""What `DelayedParamIniter` gives models, beside the same ones made by their constructors: spread, constants, buffers, what is shared."""

import copy

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import smpc.v2 as tsm
from smpc.errors import UsageError
from smpc.v2.delayed_param import DelayedParamIniter


@pytest.fixture(autouse=True)
def session():
    tsm.init()
    yield
    tsm.state.reset()


def filled(make):
    """A model that was made on the meta device, and then given values."""
    with torch.device("meta"):
        model = make()
    initer = DelayedParamIniter(model)
    with initer.validate_params_and_buffers_inited():
        for module in model.modules():
            initer.get_param_init_fn()(module)
    return model


def check(make):
    """Drawn values have the spread of the constructors', everything else is equal; what is shared is shared."""
    torch.manual_seed(0)
    eager, model = make(), filled(make)
    assert len({*eager.parameters()}) == len({*model.parameters()})
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    wanted = dict(eager.named_parameters(remove_duplicate=False)) | dict(eager.named_buffers())
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        own, other = found[name].detach(), value.detach()
        if isinstance(value, nn.Parameter) and not torch.equal(other, other.flatten()[0].expand(other.shape)):
            torch.testing.assert_close(own.std(), other.std(), rtol=0.2, atol=0, msg=name)
        else:
            assert torch.equal(own, other), name
    return model


class Small(nn.Module):
    """As many scripts have them: the model draws all of its layers again, and the embedding is the head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def test_a_model_that_draws_its_layers_again():
    """Its layers had the values of `reset_parameters`, of another spread, and the head had a weight of its own."""
    model = check(Small)
    assert model.head.weight is model.embedding.weight


def test_layers_that_the_module_around_them_fills_again():
    """The bias of attention's output layer is zero; it had been drawn, and so had all weights of nn.Transformer."""
    check(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2))
    check(lambda: nn.Transformer(32, 2, 1, 1, 64, batch_first=True))
    assert not filled(lambda: nn.MultiheadAttention(32, 2)).out_proj.bias.any()


def test_norms_without_parameters():
    """Their statistics were what had been in that memory."""
    check(
        lambda: nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False), nn.InstanceNorm1d(8, track_running_stats=True)
        )
    )


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("table", torch.arange(8.0).sin())


class Special(Small):
    def __init__(self):
        super().__init__()
        nn.init.normal_(self.inner.weight, std=0.001)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: nn.Sequential(Positions()),
            r"nothing fills 0\.table; give Positions a method reset_parameters, make it outside",
        ),
        (
            Special,
            r"found that something else has written inner\.weight, of which the meta device keeps nothing; pass init_method",
        ),
    ],
)
def test_what_the_meta_device_has_lost_is_an_error(make, text):
    """A table of positions was memory that nobody had written; a layer that the script had drawn by itself had another spread."""
    with pytest.raises(AssertionError, match=text):
        filled(make)


def test_parameters_that_are_in_parts_already():
    """Each rank drew the same numbers for its part."""
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    initer = DelayedParamIniter(model)
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model, mesh=mesh)
    with pytest.raises(
        UsageError,
        match=r"found weight, bias in the parts of fully_shard; call get_param_init_fn\(\) of each module before",
    ):
        initer.get_param_init_fn()(model)


def test_buffers_that_are_made_elsewhere_stay():
    def make():
        model = nn.Sequential(nn.Linear(2, 2), nn.Module())
        model[1].register_buffer("table", torch.arange(3.0, device="cpu"))
        return model

    assert filled(make)[1].table.tolist() == [0.0, 1.0, 2.0]


def test_what_a_model_of_hugging_face_passes_over():
    """`_init_weights` knows nothing of a PReLU, which has the value of its constructor; that was an error that asked for its method."""
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )

    def make():
        model = transformers.LlamaForCausalLM(copy.deepcopy(config))
        model.model.layers[0].mlp.act_fn = nn.PReLU()
        return model

    check(make)
