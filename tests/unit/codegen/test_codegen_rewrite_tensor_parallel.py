"""The compiler path of tensor parallelism against the whole model: outputs, loss and gathered gradients, on ranks that are threads."""

import contextlib
import copy
import functools
import re

import pytest
import torch
from tensor_models import (
    BATCH,
    HIDDEN,
    SEQUENCE,
    SIZES,
    MixerBlock,
    aria,
    bert,
    gpt2,
    llama,
    mixer,
    mixtral,
    neox,
    t5,
    vit,
)
from tensor_ranks import run_ranks, tensor_groups
from torch import nn
from torch.utils.checkpoint import checkpoint

from smpc.codegen.rewrite.tensor_parallel.layouts import REPLICATED, Layout, LayoutKind
from smpc.compile import compile_model
from smpc.config.numbers import format_bytes
from smpc.errors import ConfigError, TraceError, UsageError
from smpc.executor.parameter_slices import slice_of, whole_of
from smpc.runtime import LoopbackRuntime
from smpc.tensor_parallel import describe, place, shard


class Named(nn.Module):
    """Operations with numpy's names for arguments, and with operands by name."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(64, 16)
        self.scale = nn.Parameter(torch.rand(16))

    def forward(self, x):
        joined = torch.cat(tensors=(self.left(x), self.right(x)), axis=-1)
        y = nn.functional.linear(input=torch.tanh(input=joined), weight=self.down.weight, bias=self.down.bias)
        y = torch.reshape(input=torch.mul(y, other=2.0).div(other=3.0), shape=(-1, SEQUENCE, 16)).view(dtype=x.dtype)
        y = nn.functional.layer_norm(weight=self.scale, normalized_shape=(16,), input=y)
        y = torch.stack([torch.add(input=y, other=x), torch.mul(x1=y, x2=x)], axis=0).sum(axis=0)
        centred = y - y.mean(axis=-1, keepdims=True)
        scores = torch.matmul(input=centred, other=torch.transpose(input=y, dim0=1, dim1=2)).softmax(axis=-1)
        return torch.mean(input=torch.concatenate([scores @ y, y], axis=2).cumsum(axis=2).amax(axis=2))


def sharded(model, inputs, degree, plan="auto", outputs=None):
    return [shard(copy.deepcopy(model), inputs, group, plan, outputs) for group in tensor_groups(degree)]


def loss_of(output):
    return output if isinstance(output, torch.Tensor) else output.loss


def results(modules, inputs):
    """By rank: loss, whole gradients, whole state."""

    def work(rank):
        loss = loss_of(modules[rank](**inputs))
        loss.backward()
        return loss.detach(), modules[rank].whole_gradients(), modules[rank].whole_state_dict()

    return run_ranks(len(modules), work)


def assert_equal_to_whole(model, inputs, modules):
    whole = copy.deepcopy(model)
    loss = loss_of(whole(**inputs))
    loss.backward()
    gradients = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    for own_loss, own_gradients, state in results(modules, inputs):
        torch.testing.assert_close(own_loss, loss.detach(), rtol=1e-5, atol=1e-6)
        assert list(own_gradients) == list(gradients)
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                own_gradients[name], gradient, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
        for name, tensor in whole.state_dict().items():
            assert torch.equal(state[name], tensor), name


def share_of_parameters(module, model):
    return sum(p.numel() for p in module.parameters()) / sum(p.numel() for p in model.parameters())


def block_bytes(module, prefix):
    """Bytes sent for a block, forward and backward."""
    own = [item for item in module.rewritten.collectives if item.module.startswith(prefix)]
    return [sum(item.forward_bytes for item in own), sum(item.backward_bytes for item in own)]


def check(make, degree):
    torch.manual_seed(0)
    model, inputs = make()
    modules = sharded(model, inputs, degree)
    assert_equal_to_whole(model, inputs, modules)
    assert share_of_parameters(modules[0], model) < 1 / degree + 0.04  # norms and biases are whole
    assert modules[0].rewritten.proven
    return modules[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "block"), [pytest.param(gpt2, "transformer.h.1", marks=pytest.mark.slow), (llama, "model.layers.1")]
)
def test_blocks_are_as_megatron_has_them(make, block):
    """One all-reduce for the attention and one for the MLP in each direction, each of 2 (t - 1) / t of the hidden state's bytes."""
    module = check(make, 2)
    hidden_state = BATCH * SEQUENCE * HIDDEN * 4
    assert block_bytes(module, block) == [2 * hidden_state, 2 * hidden_state]


def test_parallel_residual_needs_one_all_reduce_not_two():
    """GPT-NeoX adds up attention and MLP: fixed rules reduce both, the sum of the summands is enough."""
    module = check(neox, 2)
    functions = [
        c.function for c in module.rewritten.collectives if c.module.startswith("gpt_neox.layers.1") and c.forward_bytes
    ]
    assert functions == ["all_reduce"]
    assert block_bytes(module, "gpt_neox.layers.1")[0] == BATCH * SEQUENCE * HIDDEN * 4


def test_arguments_with_numpy_s_names_and_operands_by_name():
    torch.manual_seed(1)
    modules = sharded(model := Named(), inputs := {"x": torch.randn(BATCH, SEQUENCE, 16)}, 2)
    assert_equal_to_whole(model, inputs, modules)
    assert all(dict(module.rewritten.layouts)["left.weight"] == Layout.sharded(0) for module in modules)


def test_mixer():
    check(mixer, 2)


@pytest.mark.long
def test_experts_whose_weights_are_multiplied_from_the_left_are_split():
    layouts = check(aria, 2).layouts
    own = {name.rpartition(".")[2]: str(layout) for name, layout in layouts.items() if ".mlp.experts." in name}
    assert own == {"gate_up_proj": "S(2|64,64)", "down_proj": "S(1)"}


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("make", [gpt2, llama, bert, neox, t5, vit, mixer, mixtral, aria])
def test_models_without_annotations(make, degree):
    check(make, degree)


class Widths(nn.Module):
    """Numbers for every feature, of which it asks for the number alone."""

    def forward(self, hidden):
        return torch.arange(hidden.shape[-1], dtype=hidden.dtype) / hidden.shape[-1]


class Weighed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.widths, self.down = nn.Linear(HIDDEN, 8 * HIDDEN), Widths(), nn.Linear(8 * HIDDEN, HIDDEN)

    def forward(self, hidden):
        hidden = self.up(hidden)
        return self.down(torch.tanh(hidden + self.widths(hidden))).square().mean()


def test_a_module_that_asks_for_the_width_alone_is_not_called_with_a_slice():
    """Nothing inside of it differs between ranks, so it was called as it is, and gave the numbers of half of the features."""
    check(lambda: (Weighed(), {"hidden": torch.randn(BATCH, HIDDEN)}), 2)


class Gathering(nn.Module):
    """Its second layer needs all columns of what the first one makes, and the last one sums."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, hidden):
        hidden = self.first(hidden).cumsum(-1)
        return self.third(torch.relu(self.second(hidden))).square().mean()


def test_what_moves_slices_is_told_from_sums():
    """They have other curves of a calibrated device: by what they make of slices, and not by the names of their functions."""
    (module, _) = sharded(Gathering(), {"hidden": torch.randn(BATCH, 64)}, 2)
    sent = [item for item in module.rewritten.collectives if item.forward_bytes or item.backward_bytes]
    cut = [LayoutKind.SHARDED in (item.source.kind, item.target.kind) for item in sent]
    assert [item.moves for item in sent] == cut
    assert {*cut} == {True, False}


def functions_of(module):
    return [item.function for item in module.rewritten.collectives if item.forward_bytes]


def check_loss_on_slices(make, degree, monkeypatch):
    """With a vocabulary large enough for it, which is also the embedding's if the two are tied."""
    monkeypatch.setitem(SIZES, "vocab_size", 1 << 16)
    monkeypatch.setattr("tensor_models.VOCABULARY", 1 << 16)
    torch.manual_seed(0)
    model, inputs = make()
    inputs["labels"][0, :3] = -100
    modules = sharded(model, inputs, degree, outputs=("loss",))
    assert "cross_entropy" in functions_of(modules[0])
    (loss,) = (item for item in modules[0].rewritten.collectives if item.function == "cross_entropy")
    logits = BATCH * SEQUENCE * (1 << 16) * 4 * (degree - 1) // degree
    assert 0 < loss.forward_bytes < 1000
    assert loss.forward_bytes + loss.saved_bytes == pytest.approx(logits, rel=0.07)  # T5 and BERT do not shift
    assert sum(item.forward_bytes for item in modules[0].rewritten.collectives) < logits / 10
    head = model.get_output_embeddings().weight
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if p is head]
    assert {str(modules[0].layouts[name]) for name in names} == {"S(0)"}
    assert f"{loss.saved_bytes / 2**20:.1f} MiB less than gathering" in describe(modules[0].rewritten)
    assert_equal_to_whole(model, inputs, modules)


def test_loss_of_tied_logits_is_computed_on_slices(monkeypatch):
    check_loss_on_slices(gpt2, 2, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("make", [gpt2, llama, t5, bert])
def test_losses_are_computed_on_slices(make, degree, monkeypatch):
    check_loss_on_slices(make, degree, monkeypatch)


class Classifier(nn.Module):
    """Cross-entropy with everything that it can be asked for; the labels by name, first."""

    def __init__(self, **options):
        super().__init__()
        self.head, self.options = nn.Linear(8, 1 << 17), options

    def forward(self, x, labels):
        logits = self.head(x)
        return nn.functional.cross_entropy(target=labels, input=logits.float(), **self.options), logits


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({"reduction": "none", "ignore_index": 7}, [3, 7, 1 << 16, (1 << 17) - 1]),
        ({"reduction": "sum", "label_smoothing": 0.1}, [0, -100, 5, 70000]),
        ({}, [-100] * 4),
    ],
)
def test_cross_entropy_on_slices_is_torch_s(options, labels):
    torch.manual_seed(0)
    model, inputs = Classifier(**options), {"x": torch.randn(4, 8), "labels": torch.tensor(labels)}
    modules = sharded(model, inputs, 2, outputs=("[0]",))
    assert functions_of(modules[0]) == ["cross_entropy"]
    expected, _ = model(**inputs)
    expected.sum().backward()

    def work(rank):
        loss, logits = modules[rank](**inputs)
        assert logits is None
        loss.sum().backward()
        return loss.detach(), modules[rank].whole_gradients()

    for loss, gradients in run_ranks(2, work):
        torch.testing.assert_close(loss, expected.detach(), equal_nan=True)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("options", [{"weight": torch.ones(1 << 17)}, {"reduce": False}])
def test_other_losses_are_computed_of_gathered_logits(options):
    inputs = {"x": torch.randn(4, 8), "labels": torch.arange(4)}
    with pytest.warns() if "reduce" in options else contextlib.nullcontext():
        module = sharded(Classifier(**options), inputs, 2, outputs=("[0]",))[0]
    assert "cross_entropy" not in functions_of(module)


def test_outputs_that_a_model_does_not_have_are_refused():
    model, x = small()
    with pytest.raises(ConfigError, match=r"expected names among \[0\], \[1\], found logits"):
        sharded(Classifier(), {"x": torch.randn(4, 8), "labels": torch.arange(4)}, 2, outputs=("[0]", "logits"))
    with pytest.raises(ConfigError, match="tensor_parallel_outputs have no effect"):
        compile_model(model, x, pipeline_parallel_degree=1, tensor_parallel_outputs=("loss",))


def small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    return model, torch.randn(4, 8)


def test_program_is_readable():
    model, x = small()
    module = sharded(model, x, 2)[0]
    assert "_sum = tensor_ops.all_reduce(" in module.source
    text = describe(module.rewritten)
    assert f"{format_bytes(module.rewritten.sent_bytes)} sent by each" in text
    assert re.search(r"^0\n    weight +S\(0\)$", text, re.MULTILINE)
    assert re.search(r"all_reduce P -> R +128 B forward, 0 B backward", text)


def test_trains_as_the_whole_model():
    model, x = small()
    whole = copy.deepcopy(model)
    modules = sharded(model, x, 2)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = whole(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    def work(rank):
        own, found = torch.optim.AdamW(modules[rank].parameters(), lr=0.01), []
        for _ in range(5):
            own.zero_grad()
            loss = modules[rank](x).square().mean()
            loss.backward()
            own.step()
            found.append(loss.item())
        return found

    for found in run_ranks(2, work):
        assert found == pytest.approx(losses, rel=1e-5)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([MixerBlock(16, HIDDEN) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


def test_checkpointed_blocks():
    """What is computed again communicates again."""
    torch.manual_seed(0)
    model, inputs = Checkpointed(), {"x": torch.randn(BATCH, 16, HIDDEN)}
    modules = sharded(model, inputs, 2)
    assert "self.checkpoint(" in modules[0].source
    assert_equal_to_whole(model, inputs, modules)


class Watched(nn.Module):
    """Without gradients, it looks at the whole of what gradients flow through afterwards, as PEGASUS-X does at its embeddings."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        h = self.up(x)
        with torch.no_grad():
            seen = torch.fft.fft(h).real
        return (self.down(torch.fft.fft(h).imag) + seen).square().mean()


class LooksAtItself(nn.Module):
    """Python that depends on a parameter: this module is called whole."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x @ self.weight if self.weight.sum() > -1e9 else x


class SharesWithWhole(nn.Module):
    """A weight that operations read, and so does a module that is called whole, as BigBird-Pegasus's encoder reads the embeddings."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(HIDDEN, HIDDEN)
        self.inner = LooksAtItself(self.up.weight)

    def forward(self, x):
        return self.inner(torch.relu(self.up(x))).square().mean()


@pytest.mark.long
def test_a_weight_of_a_module_called_whole_stays_whole():
    torch.manual_seed(0)
    model, inputs = SharesWithWhole(), {"x": torch.randn(BATCH, HIDDEN)}
    modules = sharded(model, inputs, 2)
    assert not modules[0].layouts.keys() & {"up.weight", "inner.weight"}
    assert_equal_to_whole(model, inputs, modules)


def test_what_is_gathered_without_gradients_has_one_later():
    torch.manual_seed(0)
    model, inputs = Watched(), {"x": torch.randn(BATCH, HIDDEN)}
    modules = sharded(model, inputs, 2)
    assert str(modules[0].layouts["up.weight"]) == "S(0)"
    assert_equal_to_whole(model, inputs, modules)


def test_evaluation_mode_uses_the_same_slices():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8))
    x = torch.randn(4, 8)
    modules = sharded(model, x, 2)
    before = modules[0].layouts
    expected = model.eval()(x)
    outputs = run_ranks(2, lambda rank: modules[rank].eval()(x))
    assert modules[0].layouts == before
    for output in outputs:
        torch.testing.assert_close(output, expected)


class Dropping(nn.Module):
    """Dropout of what is split, then of what is whole."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        inner = nn.functional.dropout(torch.relu(self.up(x)), 0.5)
        return nn.functional.dropout(self.down(inner), 0.5), inner


def test_dropout_differs_where_data_is_split():
    modules = sharded(Dropping(), torch.randn(4, 64), 2)
    assert modules[0].source.count("tensor_ops.draw_apart('torch.nn.functional.dropout'") == 1
    with torch.no_grad():
        for module in modules:
            module.model.up.weight.zero_()
            module.model.up.bias.fill_(1.0)

    def work(rank):
        return modules[rank](torch.ones(4, 64))

    _, inner = zip(*run_ranks(2, work), strict=True)
    assert torch.equal(inner[0], inner[1])
    kept = inner[0].bool()
    assert 0.3 < kept.float().mean() < 0.7
    assert not torch.equal(kept[:, :32], kept[:, 32:])


def test_loads_a_whole_state():
    model, x = small()
    modules = sharded(model, x, 2)
    other, _ = small()
    with torch.no_grad():
        other[0].weight.mul_(2)
    run_ranks(2, lambda rank: modules[rank].load_whole_state_dict(other.state_dict()))
    for output in run_ranks(2, lambda rank: modules[rank](x)):
        torch.testing.assert_close(output, other(x))
    with pytest.raises(UsageError, match=r"0\.weight: expected it in the state"):
        modules[0].load_whole_state_dict({})


def test_model_on_the_meta_device_gets_slices_there():
    model, x = small()
    with torch.device("meta"):
        empty, _ = small()
    modules = [shard(copy.deepcopy(empty), x, group) for group in tensor_groups(2)]
    assert {p.device.type for p in modules[0].parameters()} == {"meta"}
    assert share_of_parameters(modules[0], model) < 0.6


def test_other_inputs_and_a_second_sharding_are_refused():
    model, x = small()
    module = sharded(model, x, 2)[0]
    with pytest.raises(TraceError, match="trace again"):
        module(torch.randn(5, 8))
    with pytest.raises(ConfigError, match="sharded before"):
        shard(module.model, x, tensor_groups(2)[0])


def test_gradients_of_inputs():
    """Each rank had its summand, without a word: a pipeline, for which recordings were made, has no inputs that require grad."""
    model, x = small()
    whole = x.clone().requires_grad_()
    copy.deepcopy(model)(whole).square().mean().backward()
    modules = sharded(model, x.clone().requires_grad_(), 2)

    def work(rank):
        own = x.clone().requires_grad_()
        modules[rank](own).square().mean().backward()
        return own.grad

    for gradient in run_ranks(2, work):
        torch.testing.assert_close(gradient, whole.grad, rtol=1e-5, atol=1e-6)
    with pytest.raises(
        UsageError, match="expected inputs that do not require grad, as the sample's, found args_0 that do"
    ):
        sharded(model, x, 2)[0](x.clone().requires_grad_())


class Padding(nn.Module):
    """Asks for a size that is computed once, in the first call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    @functools.cached_property
    def left(self):
        return self.linear.in_features // 4

    def forward(self, x):
        return nn.functional.pad(self.linear(x), (self.left, 0)).tanh()


def test_what_the_first_step_caches_is_there_in_the_second():
    """The second step was refused: an attribute had come. On some ranks alone it was the first, and the others waited for them."""
    model, x = Padding(), torch.randn(4, 8)
    modules = sharded(model, x, 2)

    def work(rank):
        return [modules[rank](x) for _ in range(3)]

    for outputs in run_ranks(2, work):
        for output in outputs:
            torch.testing.assert_close(output, model(x))


@pytest.mark.parametrize("layout", [Layout.sharded(0), Layout.sharded(1), Layout.sharded(1, (4, 8))])
def test_slices_make_up_the_whole(layout):
    tensor = torch.arange(48.0).reshape(4, 12)
    groups = tensor_groups(2)
    for found in run_ranks(2, lambda rank: whole_of(slice_of(tensor, layout, groups[rank]), layout, groups[rank])):
        assert torch.equal(found, tensor)


def test_explicit_plan_decides():
    model, x = small()
    assert_layouts = {"0.weight": "S(0)", "0.bias": "S(0)", "2.weight": "S(1)"}
    module = sharded(model, x, 2, {"0": "colwise", "2": "rowwise"})[0]
    assert {name: str(layout) for name, layout in module.layouts.items()} == assert_layouts
    module = sharded(model, x, 2, {"2": "colwise"})[0]
    assert {name: str(layout) for name, layout in module.layouts.items()} == {"2.weight": "S(0)", "2.bias": "S(0)"}
    assert not sharded(model, x, 2, "off")[0].layouts


@pytest.mark.parametrize("plan", ["auto", {"0": "colwise", "2": "rowwise"}])
def test_a_group_of_one_rank_has_the_whole_model(plan):
    """Every number of groups divides by one rank: operations that have none were given their own instead of their first input."""
    model, x = small()
    (module,) = sharded(model, x, 1, plan)
    assert torch.equal(module(x), model(x))
    assert not module.rewritten.sent_bytes


@pytest.mark.long
def test_hugging_face_plan():
    torch.manual_seed(0)
    model, inputs = llama()
    modules = sharded(model, inputs, 2, "huggingface")
    layouts = {name: str(layout) for name, layout in modules[0].layouts.items()}
    assert layouts["model.layers.0.self_attn.k_proj.weight"] == "S(0)"
    assert layouts["model.layers.1.mlp.down_proj.weight"] == "S(1)"
    assert "model.norm.weight" not in layouts
    assert_equal_to_whole(model, inputs, modules)


def check_pipeline(model, inputs, on_output):
    """Two stages by two tensor-parallel ranks: the pipeline of each tensor-parallel rank is a thread."""
    whole = copy.deepcopy(model)
    on_output(whole(**inputs))[0][0].mul(2).backward()
    compilation = compile_model(
        model, inputs, pipeline_parallel_degree=2, microbatches=2, tensor_parallel_degree=2, device="cpu", kernels="off"
    )
    layouts = dict(compilation.sharded.layouts)
    with pytest.raises(UsageError, match="found a whole one"):
        LoopbackRuntime(model).install(compilation)
    parts = [{}, {}]
    for name, value in inputs.items():
        halves = value.chunk(2) if isinstance(value, torch.Tensor) else [value] * 2
        parts = [part | {name: half} for part, half in zip(parts, halves, strict=True)]
    groups, models = tensor_groups(2), [copy.deepcopy(model) for _ in range(2)]

    def work(rank):
        place(models[rank], compilation.sharded, groups[rank])
        runtime = LoopbackRuntime(models[rank])
        program = runtime.install(compilation)
        runtime.run(program, [((), part) for part in parts], lambda _, output: on_output(output), training=True)
        own = models[rank].named_parameters()
        return {name: whole_of(p.grad, layouts.get(name, REPLICATED), groups[rank]) for name, p in own}

    for gradients in run_ranks(2, work):
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-6)


def test_with_a_pipeline():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    check_pipeline(model, {"input": torch.randn(4, 64)}, lambda output: [(output.square().mean() / 2, None)])


@pytest.mark.slow
def test_with_a_pipeline_and_weights_on_both_ends():
    """GPT-2's embedding is its head: slices of it are on both stages."""
    torch.manual_seed(0)
    model, inputs = gpt2()
    check_pipeline(model, inputs, lambda output: [(output.loss / 2, None)])


def test_plan_counts_slices_and_collectives():
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), torch.randn(4, 64)
    options = {"pipeline_parallel_degree": 1, "kernels": "off"}
    whole, half = (compile_model(model, x, tensor_parallel_degree=degree, **options) for degree in (1, 2))
    (before,), (after,) = whole.plan.stages, half.plan.stages
    assert before.parameter_bytes / 2 <= after.parameter_bytes < before.parameter_bytes / 2 + 4 * 64 * 4
    collectives = sum(item.forward_bytes > 0 for item in half.sharded.collectives)
    assert after.forward_time > collectives * 20e-6  # the latency inside a host of H100s
    assert whole.sharded is None


def test_a_table_split_by_rows():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8, padding_idx=11), nn.Linear(8, 8))
    ids = torch.tensor([[0, 5, 8, 11], [15, 11, 7, 3]])
    whole = copy.deepcopy(model)
    whole(ids).square().mean().backward()
    modules = sharded(model, ids, 2, {"0": "rowwise"})
    assert str(modules[0].layouts["0.weight"]) == "S(0)"

    def work(rank):
        modules[rank](ids).square().mean().backward()
        return modules[rank].whole_gradients()

    for gradients in run_ranks(2, work):
        torch.testing.assert_close(gradients["0.weight"], whole[0].weight.grad)
        assert not gradients["0.weight"][11].any()


def test_styles_of_a_model_that_are_not_known_are_named():
    model, x = small()
    model.tp_plan = {"0": "colwise", "2": "diagonal"}
    with pytest.warns(UserWarning, match=r"2 \(diagonal\)"):
        module = shard(model, x, tensor_groups(2)[0], "huggingface")
    assert list(module.layouts) == ["0.weight", "0.bias"]


def test_wrong_plans_name_every_mistake():
    model, x = small()
    with pytest.raises(ConfigError, match=r"found 'diagonal'.*'7': expected the name of a module"):
        sharded(model, x, 2, {"0": "diagonal", "7": "colwise"})
    with pytest.raises(ConfigError, match="needs a model with a tp_plan"):
        sharded(model, x, 2, "huggingface")
