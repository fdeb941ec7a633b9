"""Every tensor-parallel module equals its plain reference: outputs, gradients of inputs and of parameters, over the arguments."""

import nn_reference as plain
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tensor_ranks import run_ranks, tensor_groups, whole_parameters
from torch import nn
from torch.utils.checkpoint import checkpoint

from smpc import nn as snn
from smpc.nn.parallel import TensorParallel
from smpc.nn.random import RandomStreams

HEADS, HEAD, HIDDEN, WIDE, BATCH, LENGTH, CROSS = 4, 3, 8, 12, 2, 5, 6
degrees = st.sampled_from([1, 2, 4])
norms = st.sampled_from([(True, False), (False, True), (True, True)])
modes = st.tuples(degrees, st.sampled_from(["memory", "speed"]), st.booleans())
seeds = st.integers(0, 2**16)
few = settings(max_examples=20, deadline=None, phases=[Phase.generate])


def parallels(mode):
    size, optimize, prescaled = mode
    return [TensorParallel(group, optimize, prescaled) for group in tensor_groups(size)]


def build(mode, make):
    """The module on every rank, from one seed; built one after another, as the ranks of this process share a generator."""
    modules = []
    for parallel in parallels(mode):
        torch.manual_seed(7)
        modules.append(make(parallel))
    return modules


def check(mode, make, reference, inputs):
    """Runs and differentiates the module on all ranks and the reference on the whole batch. Floating inputs get gradients too."""
    size, _, prescaled = mode
    modules = build(mode, make)
    torch.manual_seed(11)
    for parameter in whole_parameters(modules):
        assert parameter in dict(reference.named_parameters()) or parameter == "lm_head.weight"
    randomize(modules)
    weights = whole_parameters(modules)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            whole = weights[name]
            parameter.copy_(whole[0] if isinstance(whole, list) else whole)
    leaves = [needs_grad(tensor) for tensor in inputs]
    expected = first(reference(tuple(leaves) if len(leaves) > 1 else leaves[0]))
    upstream = torch.randn_like(expected)
    (expected * upstream).sum().backward()

    def run(rank):
        own = [needs_grad(part(tensor, rank, size, prescaled)) for tensor in inputs]
        output = first(modules[rank](tuple(own) if len(own) > 1 else own[0]))
        (output * part(upstream, rank, size, prescaled)).sum().backward()
        return output.detach(), [tensor.grad if tensor is not None and tensor.requires_grad else None for tensor in own]

    results = run_ranks(size, run)
    for rank, (output, grads) in enumerate(results):
        close(output, part(expected.detach(), rank, size, prescaled))
        for tensor, grad in zip(leaves, grads, strict=True):
            if grad is not None:
                close(grad, part(tensor.grad, rank, size, prescaled))
    found = whole_parameters(modules, lambda parameter: parameter.grad)
    for name, parameter in reference.named_parameters():
        grad = found[name]
        close(sum(grad) if isinstance(grad, list) else grad, parameter.grad)


def randomize(modules):
    """Other numbers than the initial ones, so that biases and norms matter: the same whole values on all ranks."""
    for name, whole in whole_parameters(modules).items():
        values = torch.randn((whole[0] if isinstance(whole, list) else whole).shape) * 0.3
        prefix, _, own = name.rpartition(".")
        with torch.no_grad():
            for module in modules:
                module.get_parameter(name).copy_(module.get_submodule(prefix).slice_of(own, values))


def part(tensor, rank, size, prescaled):
    return tensor if tensor is None or prescaled else tensor.chunk(size)[rank]


def needs_grad(tensor):
    """Hidden and cross states get gradients; masks and ids do not."""
    is_state = tensor is not None and tensor.is_floating_point() and tensor.dim() == 3
    return tensor.detach().clone().requires_grad_() if is_state else tensor


def first(output):
    return output[0] if isinstance(output, tuple) else output


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


def batch_of(mode):
    return BATCH * mode[0]


def mask_of(kind, mode, keys):
    if kind == "none":
        return None
    hidden = torch.rand(batch_of(mode), 1, 1, keys) < 0.3
    hidden[..., 0] = False
    return hidden if kind == "bool" else hidden.long() if kind == "int" else hidden.float() * -3


masks = st.sampled_from(["none", "bool", "int", "float"])


@few
@given(modes, st.booleans(), seeds)
def test_linear(mode, bias, seed):
    torch.manual_seed(seed)
    check(
        mode,
        lambda parallel: snn.DistributedLinear(HIDDEN, 6, bias, parallel=parallel),
        nn.Linear(HIDDEN, 6, bias),
        [torch.randn(batch_of(mode), LENGTH, HIDDEN)],
    )


@few
@given(modes, st.booleans(), st.sampled_from([None, 3, -1]), seeds)
def test_embedding(mode, rows, padding, seed):
    torch.manual_seed(seed)
    padding = None if rows else padding
    check(
        mode,
        lambda parallel: snn.DistributedEmbedding(11, HIDDEN, padding, split_vocabulary=rows, parallel=parallel),
        nn.Embedding(11, HIDDEN, padding),
        [torch.randint(0, 11, (batch_of(mode), LENGTH))],
    )


@few
@given(modes, norms, st.sampled_from([None, 9]), st.booleans(), masks, seeds)
def test_attention(mode, norm, causal, cross, mask, seed):
    torch.manual_seed(seed)
    pre, post = norm
    hidden = torch.randn(batch_of(mode), LENGTH, HIDDEN)
    states = [torch.randn(batch_of(mode), CROSS, HIDDEN)] if cross else []
    check(
        mode,
        lambda parallel: snn.DistributedAttentionLayer(
            HEADS,
            HEAD,
            HIDDEN,
            0.0,
            0.0,
            cross_attention=cross,
            causal_mask_size=causal,
            pre_layernorm=pre,
            post_layernorm=post,
            parallel=parallel,
        ),
        plain.Attention(HEADS, HEAD, HIDDEN, pre, post, causal is not None and not cross, cross),
        [hidden, *states, mask_of(mask, mode, CROSS if cross else LENGTH)],
    )


@few
@given(modes, norms, st.sampled_from(["gelu", "relu"]), seeds)
def test_output_layer(mode, norm, activation, seed):
    torch.manual_seed(seed)
    pre, post = norm
    check(
        mode,
        lambda parallel: snn.DistributedTransformerOutputLayer(
            HIDDEN, WIDE, 0.0, activation, pre_layernorm=pre, post_layernorm=post, parallel=parallel
        ),
        plain.Output(HIDDEN, WIDE, activation, pre, post),
        [torch.randn(batch_of(mode), LENGTH, HIDDEN)],
    )


def layer_arguments(norm, activation, causal, cross):
    return {
        "num_attention_heads": HEADS,
        "attention_head_size": HEAD,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "attention_dropout_prob": 0.0,
        "hidden_dropout_prob": 0.0,
        "activation": activation,
        "causal_mask_size": causal,
        "add_cross_attention": cross,
        "pre_layernorm": norm[0],
        "post_layernorm": norm[1],
    }


def plain_arguments(norm, activation, causal, cross):
    return HEADS, HEAD, HIDDEN, WIDE, activation, *norm, causal is not None, cross


@few
@given(modes, norms, st.sampled_from([None, 9]), st.booleans(), masks, st.sampled_from([None, 1, 2]), seeds)
def test_layer_and_transformer(mode, norm, causal, cross, mask, num_layers, seed):
    torch.manual_seed(seed)
    hidden = torch.randn(batch_of(mode), LENGTH, HIDDEN)
    inputs = [hidden, mask_of(mask, mode, LENGTH)]
    if cross:
        inputs = [
            hidden,
            torch.randn(batch_of(mode), CROSS, HIDDEN),
            inputs[1],
            mask_of(mask, mode, CROSS),
        ]
    ours, theirs = layer_arguments(norm, "gelu", causal, cross), plain_arguments(norm, "gelu", causal, cross)
    if num_layers is None:
        check(mode, lambda p: snn.DistributedTransformerLayer(**ours, parallel=p), plain.Layer(*theirs), inputs)
    else:
        make = lambda p: snn.DistributedTransformer(num_layers, **ours, parallel=p)  # noqa: E731
        check(mode, make, plain.Transformer(num_layers, *theirs), inputs)


@few
@given(
    modes,
    norms,
    st.sampled_from([None, 9]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([16, 19]),
    seeds,
)
def test_lm_head(mode, norm, causal, cross, head, types, vocabulary, seed):
    torch.manual_seed(seed)
    batch = batch_of(mode)
    ids = torch.randint(0, vocabulary, (batch, LENGTH))
    mask = (torch.rand(batch, LENGTH) < 0.2).long()
    mask[:, 0] = 0
    token_types = torch.randint(0, 3, (batch, LENGTH)) if types else None
    cross_inputs = [torch.randn(batch, CROSS, HIDDEN), None] if cross else []
    ours, theirs = layer_arguments(norm, "relu", causal, cross), plain_arguments(norm, "relu", causal, cross)
    check(
        mode,
        lambda parallel: snn.DistributedTransformerLMHead(
            num_layers=1,
            vocab_size=vocabulary,
            num_positions=9,
            num_token_types=3 if types else 0,
            add_lm_head=head,
            **ours,
            parallel=parallel,
        ),
        plain.LMHead(vocabulary, 9, 3 if types else 0, head, 1, *theirs),
        [ids, mask, token_types, None, *cross_inputs, None],
    )


@few
@given(modes, st.sampled_from([None, 9]), st.sampled_from([16, 19]), seeds)
def test_loss_is_the_mean_over_a_ranks_own_samples(mode, causal, vocabulary, seed):
    size, _, prescaled = mode
    modules = build(
        mode,
        lambda parallel: snn.DistributedTransformerLMHead(
            num_layers=1,
            vocab_size=vocabulary,
            num_positions=9,
            **layer_arguments((True, False), "gelu", causal, False),
            parallel=parallel,
        ),
    )
    reference = plain.LMHead(vocabulary, 9, 0, True, 1, *plain_arguments((True, False), "gelu", causal, False))
    torch.manual_seed(seed)
    randomize(modules)
    reference.load_state_dict({k: v for k, v in whole_parameters(modules).items() if k != "lm_head.weight"})
    ids = torch.randint(0, vocabulary, (batch_of(mode), LENGTH))
    labels = torch.where(torch.rand(ids.shape) < 0.2, -100, ids)
    labels[:, 1] = ids[:, 1]

    def own(tensor, rank):
        return part(tensor, rank, size, prescaled)

    def run(rank):
        loss = modules[rank]((own(ids, rank), None, None, None, own(labels, rank)))
        loss.backward()
        return loss.detach()

    losses = run_ranks(size, run)
    expected = [reference((own(ids, rank), None, None, None, own(labels, rank))) for rank in range(size)]
    for loss, wanted in zip(losses, expected, strict=True):
        close(loss, wanted.detach())
    (expected[0] if prescaled else sum(expected)).backward()
    grads = whole_parameters(modules, lambda parameter: parameter.grad)
    for name, parameter in reference.named_parameters():
        close(grads[name], parameter.grad)


def test_same_seed_gives_the_same_weights_and_random_state_for_every_degree():
    found = []
    for size in (1, 2, 4):
        modules = build(
            (size, "memory", False),
            lambda parallel: snn.DistributedTransformerLMHead(
                num_layers=2, vocab_size=1001, num_positions=9, hidden_size=64, parallel=parallel
            ),
        )
        found.append((whole_parameters(modules), torch.rand(3)))
    for weights, after in found[1:]:
        assert torch.equal(after, found[0][1])
        assert all(torch.equal(weights[name], whole) for name, whole in found[0][0].items())


def test_one_rank_starts_from_the_weights_of_torch():
    torch.manual_seed(3)
    ours = snn.DistributedLinear(300, 70)
    torch.manual_seed(3)
    theirs = nn.Linear(300, 70)
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)


def test_parameters_take_their_share_of_memory():
    def count(size):
        module = build((size, "memory", False), lambda p: snn.DistributedTransformer(2, hidden_size=64, parallel=p))[-1]
        return sum(parameter.numel() for parameter in module.parameters())

    for size in (2, 4):
        assert abs(count(size) * size / count(1) - 1) < 0.02


def test_dropout_is_equal_where_data_is_and_differs_where_it_is_split():
    draws = []
    for rank in range(2):
        streams = RandomStreams(5, rank)
        torch.manual_seed(1)
        with streams.replicated(torch.device("cpu")):
            same = torch.rand(4)
        with streams.split(torch.device("cpu")):
            other = torch.rand(4)
        with streams.split(torch.device("cpu")):
            later = torch.rand(4)
        assert not torch.equal(other, later)
        draws.append((same, other, torch.rand(4)))
    assert torch.equal(draws[0][0], draws[1][0])
    assert not torch.equal(draws[0][1], draws[1][1])
    assert torch.equal(draws[0][2], draws[1][2]), "the default generator goes on from where it was"


def test_pipeline_ranks_do_not_drop_the_same_elements():
    """The second stage's layers dropped what the first stage's had dropped."""
    drawn = []
    for pipeline_rank in range(2):
        streams = RandomStreams(5, 1, pipeline_rank)
        for stream in (streams.replicated, streams.split):
            torch.manual_seed(1)
            with stream(torch.device("cpu")):
                drawn.append(torch.rand(4))
    assert len({tuple(each.tolist()) for each in drawn}) == len(drawn)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("optimize", ["memory", "speed"])
def test_checkpointed_layers_draw_the_same_again(optimize, reentrant):
    """Whoever checkpoints: gradients with dropout are those without, bit for bit, and the streams go on alike."""
    layers = []
    for wrap in (False, True):
        torch.manual_seed(7)
        parallel = TensorParallel(optimize=optimize, streams=RandomStreams(3))
        layer = snn.DistributedTransformerLayer(4, 3, 8, 12, 0.3, 0.3, parallel=parallel)
        states = torch.ones(2, 5, 8, requires_grad=True)
        torch.manual_seed(1)
        for _ in range(2):
            call = lambda x, layer=layer: layer((x, None))[0]  # noqa: E731
            output = checkpoint(call, states, use_reentrant=reentrant) if wrap else call(states)
            output.square().sum().backward()
        layers.append([states.grad, *(parameter.grad for parameter in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*layers, strict=True))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda p: snn.DistributedLinear(7, 4, parallel=p),
            "in_features divisible by tensor_parallel_degree 2, found 7",
        ),
        (lambda p: snn.DistributedAttentionLayer(num_attention_heads=3, parallel=p), "num_attention_heads divisible"),
        (lambda p: snn.DistributedTransformerOutputLayer(8, 9, parallel=p), "intermediate_size divisible"),
        (
            lambda p: snn.DistributedTransformerLayer(pre_layernorm=False, post_layernorm=False, parallel=p),
            "both False",
        ),
        (
            lambda p: snn.DistributedTransformerOutputLayer(8, 8, activation="swish", parallel=p),
            "one of gelu, relu, .*found 'swish'",
        ),
        (lambda p: snn.DistributedEmbedding(7, 5, parallel=p), "embedding_dim divisible"),
        (lambda p: snn.DistributedEmbedding(7, 4, 9, parallel=p), "padding_idx within 7"),
    ],
)
def test_sizes_that_cannot_be_split_are_refused(make, expected):
    with pytest.raises(ValueError, match=expected):
        build((2, "memory", False), make)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: snn.DistributedLinear(4, 4)(torch.zeros(2, 3)), "4 features in its last dimension"),
        (lambda: snn.DistributedTransformerLayer(hidden_size=8)(torch.zeros(2, 3, 8)), "one tuple"),
        (lambda: snn.DistributedEmbedding(7, 4)(torch.zeros(2, 3)), "integer ids"),
        (
            lambda: snn.DistributedAttentionLayer(2, 4, 8, causal_mask_size=2)((torch.zeros(1, 3, 8), None)),
            "at most causal_mask_size = 2",
        ),
        (
            lambda: snn.DistributedAttentionLayer(2, 4, 8)((torch.zeros(1, 3, 8), torch.zeros(1, 1, 1, 4))),
            r"a mask \[N, 1, 1, 3\]",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused(call, expected):
    with pytest.raises(ValueError, match=expected):
        call()
