"""Models whose experts are found and cut, on ranks that are threads, against one process with all experts."""

import copy
import functools

import pytest
import torch
from expert_models import HAND_WRITTEN, SETTINGS, HandWritten, LoopBlock, Stack, StackBlock, make, one_process, tokens
from tensor_ranks import run_ranks, tensor_groups
from torch import nn
from torch.utils.checkpoint import checkpoint

from smpc.errors import ConfigError, UsageError
from smpc.expert_parallel import register_experts, shard
from smpc.experts.find_experts import find_experts

ALL = [*SETTINGS, *HAND_WRITTEN]


def on_ranks(name, dtype, batches, more=None, **options):
    groups, models = tensor_groups(len(batches)), [make(name, dtype, **(more or {})) for _ in batches]
    modules = [shard(model, group, **options) for model, group in zip(models, groups, strict=True)]

    def work(rank):
        module = modules[rank]
        loss = module(**batches[rank])["loss"]
        loss.backward()
        module.average_gradients()
        return loss.detach(), module.whole_gradients(), module.whole_state_dict()

    return modules, run_ranks(len(batches), work)


def check(name, dtype, batches, rtol, **options):
    model = make(name, dtype, **options.get("more", {}))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    loss, gradients = one_process(model, batches)
    modules, results = on_ranks(name, dtype, batches, **options)
    torch.testing.assert_close(sum(own for own, _, _ in results) / len(results), loss, rtol=rtol / 10, atol=0)
    for _, found, whole in results:
        assert list(found) == list(gradients)
        for key, expected in gradients.items():
            torch.testing.assert_close(
                found[key],
                expected,
                rtol=rtol,
                atol=rtol * float(expected.abs().max()),
                msg=lambda m, k=key: f"{k}: {m}",
            )
        assert list(whole) == list(state)
        for key, expected in state.items():
            assert torch.equal(whole[key], expected) or "load" in key, key
    return modules


@pytest.mark.parametrize("name", ALL)
def test_each_rank_has_its_own_tokens(name):
    modules = check(name, torch.float64, [tokens(0), tokens(1)], 1e-10)
    total = sum(p.numel() for p in make(name).parameters())
    held = [sum(p.numel() for p in module.parameters()) for module in modules]
    assert modules[0].experts
    assert not modules[0].left_whole
    assert max(held) < total


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "GptOssForCausalLM", "loop", "stack"])
@pytest.mark.parametrize("seeds", [(0, 0), (0, 1, 2)])
def test_the_same_tokens_and_three_ranks(name, seeds):
    check(name, torch.float64, [tokens(seed) for seed in seeds], 1e-10)


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "Qwen3MoeForCausalLM", "sorted"])
def test_tokens_by_all_gather(name):
    check(name, torch.float64, [tokens(0), tokens(1)], 1e-10, dispatch="all_gather")


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "GptOssForCausalLM", "OlmoeForCausalLM"])
def test_grouped_matrix_products(name):
    check(name, torch.float32, [tokens(0), tokens(1)], 1e-5, more={"implementation": "grouped_mm"})


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "loop"])
def test_sums_of_gradients_are_left_alone(name):
    _, gradients = one_process(make(name), [tokens(0), tokens(1)])
    modules, results = on_ranks(name, torch.float64, [tokens(0), tokens(1)], gradients="sum")
    experts = {key for module in modules for key, _ in module.expert_parameters()}
    assert 0 < len(experts) < len(gradients)
    for key, found in results[0][1].items():
        factor = 2 if key in experts else 1
        torch.testing.assert_close(found, factor * gradients[key], rtol=1e-9, atol=1e-12)


def test_state_of_a_whole_model_is_taken_and_given():
    for name in ("MixtralForCausalLM", "loop", "SwitchTransformersForConditionalGeneration"):
        other = {key: torch.randn(value.shape) for key, value in make(name, torch.float32).state_dict().items()}
        for key in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"):
            if "shared.weight" in other and key in other:
                other[key] = other["shared.weight"]
        modules = [shard(make(name, torch.float32), group) for group in tensor_groups(2)]
        for module in modules:
            module.load_whole_state_dict(other)
        states = run_ranks(2, lambda rank, ranks=modules: ranks[rank].whole_state_dict())
        for state in states:
            assert list(state) == list(other)
            assert all(torch.equal(state[key], value) for key, value in other.items())


def test_a_state_that_does_not_fit_changes_nothing():
    module = shard(make("MixtralForCausalLM"), tensor_groups(2)[1])
    state = make("MixtralForCausalLM").state_dict()
    del state["lm_head.weight"]
    state["model.norm.weight"] = torch.zeros(3)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises(
        UsageError, match=r"model.norm.weight: expected shape \(32,\), found \(3,\); lm_head.weight: expected it"
    ):
        module.load_whole_state_dict(state)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def test_a_model_on_the_meta_device():
    whole = make("MixtralForCausalLM", torch.float32)
    with torch.device("meta"):
        shape = HandWritten(StackBlock)
    module = shard(shape, tensor_groups(2)[0])
    assert {p.device.type for p in module.parameters()} == {"meta"}
    assert module.model.blocks[0].inner.w1.shape == (2, 16, 20)
    assert whole.device.type == "cpu"


def test_a_rank_without_tokens_waits_for_nobody():
    """Padded to nothing on one rank: its backward runs the same collectives."""
    for name in ("stack", "loop"):
        empty = {key: value[:0] for key, value in tokens(0).items()}
        batches = [tokens(1), empty]
        groups = tensor_groups(2)
        modules = [shard(make(name), group) for group in groups]

        def work(rank, modules=modules, batches=batches):
            module, batch = modules[rank], batches[rank]
            x = module.model.embed(batch["input_ids"])
            found = module.model.blocks[0](x)
            (found[0] if isinstance(found, tuple) else found).square().sum().backward()
            return module.whole_gradients()

        whole = make(name)
        found = whole.blocks[0](whole.embed(batches[0]["input_ids"]))
        ((found[0] if isinstance(found, tuple) else found).square().sum() / 2).backward()
        for gradients in run_ranks(2, work):
            experts = {key for module in modules for key, _ in module.expert_parameters()}
            for key, parameter in whole.named_parameters():
                if key in experts and parameter.grad is not None:
                    torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "SwitchTransformersForConditionalGeneration"])
def test_layers_that_are_computed_again(name):
    """Recomputation runs the collectives again, in the same order on all ranks."""

    def checkpointed():
        model = make(name)
        for module in model.modules():
            module.train()
        model._set_gradient_checkpointing(
            enable=True, gradient_checkpointing_func=functools.partial(checkpoint, use_reentrant=False)
        )
        return model

    loss, gradients = one_process(make(name), [tokens(0), tokens(1)])
    modules = [shard(checkpointed(), group) for group in tensor_groups(2)]

    def work(rank):
        own = modules[rank](**tokens(rank))["loss"]
        own.backward()
        modules[rank].average_gradients()
        return own.detach(), modules[rank].whole_gradients()

    results = run_ranks(2, work)
    torch.testing.assert_close((results[0][0] + results[1][0]) / 2, loss, rtol=1e-11, atol=0)
    for key, expected in gradients.items():
        torch.testing.assert_close(results[0][1][key], expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))


def test_the_block_runs_twice_and_shows_it_once():
    """Hooks, buffers, random numbers and attributes are as after one run."""
    modules, calls = [shard(make("loop"), group) for group in tensor_groups(2)], [[], []]
    for module, own in zip(modules, calls, strict=True):
        module.model.blocks[0].router.register_forward_hook(lambda *args, own=own: own.append(args[2].detach()))
        module.model.blocks[0].experts[0].register_forward_hook(lambda *args, own=own: own.append("expert"))
    run_ranks(2, lambda rank: modules[rank](**tokens(rank)))
    for rank, (module, own) in enumerate(zip(modules, calls, strict=True)):
        assert len([call for call in own if not isinstance(call, str)]) == 1
        assert own.count("expert") == 1
        whole = make("loop")
        whole(**tokens(rank))
        assert torch.equal(module.model.blocks[0].load, whole.blocks[0].load)


def test_balanced_sends_round_robin():
    class Even(StackBlock):
        def forward(self, x):
            flat = x.reshape(-1, x.shape[-1])
            weights, index = self.router(flat).topk(2)
            index = torch.arange(index.numel()).remainder(4).view_as(index)
            return self.inner(flat, index, weights.softmax(-1)).view_as(x)

    whole = make("stack")
    for block in whole.blocks:
        block.__class__ = Even
    loss, _ = one_process(whole, [tokens(0), tokens(1)])
    _, results = on_ranks("stack", torch.float64, [tokens(0), tokens(1)], router="balanced")
    torch.testing.assert_close((results[0][0] + results[1][0]) / 2, loss, rtol=1e-11, atol=0)


def test_a_large_capacity_drops_nothing_and_a_small_one_something():
    loss, _ = one_process(make("stack"), [tokens(0), tokens(1)])
    for factor, is_equal in ((4.0, True), (0.25, False)):
        _, results = on_ranks("stack", torch.float64, [tokens(0), tokens(1)], capacity_factor=factor)
        found = (results[0][0] + results[1][0]) / 2
        assert torch.allclose(found, loss, rtol=1e-11, atol=0) is is_equal


def check_refused(model, match, **options):
    group = tensor_groups(2)[0]
    with pytest.raises(ConfigError, match=match):
        shard(model, group, **options)


def test_what_cannot_be_cut_is_refused_before_anything_is():
    check_refused(nn.Sequential(nn.Linear(2, 2)), "no module looks like experts")
    check_refused(
        make("stack"),
        "dispatch: expected one of all_to_all, all_gather, found 'ring'; gradients: .*'max'",
        dispatch="ring",
        gradients="max",
    )
    check_refused(make("stack"), "capacity_factor: expected a number above 0", capacity_factor=0)
    check_refused(make("loop"), "router 'balanced' needs experts in one module", router="balanced")
    check_refused(make("loop"), "no module looks like experts", experts=["*.nothing"])
    model = make("stack", num_experts=1)
    check_refused(model, "no module looks like experts")
    hooked = make("stack")
    hooked.blocks[0].inner.forward = hooked.blocks[1].inner.forward = lambda *args: args[0]
    check_refused(hooked, "no module looks like experts|replaced the forward")
    normed = make("loop")
    for expert in (e for block in normed.blocks for e in block.experts):
        expert.up = nn.Sequential(nn.Linear(16, 20), nn.BatchNorm1d(20))
    check_refused(normed, "BatchNorm")


class Chain(nn.Module):
    """Layers one after the other, beside something that looks like a router."""

    def __init__(self):
        super().__init__()
        self.router, self.layers = nn.Linear(16, 4), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        for part in self.layers:
            x = part(x) + 1
        return x


def test_modules_that_feed_each_other_are_no_experts():
    modules = [shard(Chain(), group) for group in tensor_groups(2)]
    with pytest.raises(UsageError, match="layers: expected what one expert gets not to depend on what another returns"):
        run_ranks(2, lambda rank: modules[rank](torch.randn(3, 16)))


class Layers(nn.Module):
    """Blocks of experts in a list, beside lists of as many norms and layers as there are experts."""

    def __init__(self, block):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(4))
        self.mixers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))


class InOneTensor(nn.Module):
    """Experts that are not known as such: their forward takes hidden states alone."""

    def __init__(self):
        super().__init__()
        self.router, self.weights = nn.Parameter(torch.randn(16, 4)), nn.Parameter(torch.randn(4, 16, 16))


class SeveralRouters(nn.Module):
    """One router for each of two tasks, as in multi-gate mixtures."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.routers = nn.ModuleList(nn.Linear(16, 4) for _ in range(2))


def test_layers_beside_blocks_of_experts_are_no_experts():
    """The norms were taken for experts of the model, which then could not be divided: it would have been called whole."""
    found = find_experts(Layers(LoopBlock))
    assert [one.name for one in found] == [f"blocks.{layer}.experts" for layer in range(4)]
    assert not find_experts(Layers(InOneTensor))
    assert [one.name for one in find_experts(SeveralRouters())] == ["experts"]


class InTwoLists(nn.Module):
    """The two layers of each expert in lists of their own."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.ups = nn.ModuleList(nn.Linear(16, 20) for _ in range(4))
        self.downs = nn.ModuleList(nn.Linear(20, 16) for _ in range(4))

    def forward(self, x):
        index = self.router(x).argmax(-1)
        result = torch.zeros_like(x)
        for number, (up, down) in enumerate(zip(self.ups, self.downs, strict=True)):
            result[index == number] = down(up(x[index == number]).relu())
        return result


def test_a_block_with_two_lists_of_experts_is_whole():
    """It was a TypeError about the order of base classes."""
    check_refused(InTwoLists(), "ups: its block calls downs, too.*downs: its block calls ups, too")
    block, rows = InTwoLists(), torch.randn(8, 16)
    expected = block(rows)
    modules = [shard(copy.deepcopy(block), group, experts=["ups"]) for group in tensor_groups(2)]
    for found in run_ranks(2, lambda rank: modules[rank](rows)):
        torch.testing.assert_close(found, expected)


class Unasked(LoopBlock):
    """Calls all experts, though it be without rows; no token chooses the first or the last."""

    def __init__(self, width, num_experts):
        super().__init__(width, num_experts)
        self.experts[3].spare = nn.Parameter(torch.ones(3))
        for expert in self.experts[:3]:
            expert.spare = nn.Parameter(torch.ones(3))

    def forward(self, x):
        index = self.router(x).argmax(-1) % 2 + 1
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            result[index == number] = expert(x[index == number])
        return result


@pytest.mark.parametrize("frozen", [(), (0, 2)], ids=["", "frozen"])
@pytest.mark.parametrize("block", [Unasked, LoopBlock])
def test_experts_called_without_rows_have_gradients_of_zero(block, frozen):
    """They had none, so no decay of weights either; experts that are not called have none. Frozen ones had them, and decayed."""
    torch.manual_seed(0)
    whole = block(16, 4)
    with torch.no_grad():
        whole.router.bias = nn.Parameter(torch.tensor([0.0, 0, 0, -1e9]))
    for number in frozen:
        whole.experts[number].requires_grad_(False)
    modules = [shard(copy.deepcopy(whole), group) for group in tensor_groups(2)]
    batches = [torch.randn(6, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]

    def train(module, *given):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            for x in given:
                found = module(x)
                (found[0] if isinstance(found, tuple) else found).square().sum().div(len(given)).backward()
            if module is not whole:
                module.average_gradients()
            optimizer.step()

    run_ranks(2, lambda rank: train(modules[rank], batches[rank]))
    train(whole, *batches)
    expected = {name: value for name, value in whole.state_dict().items() if name != "load"}
    for found in run_ranks(2, lambda rank: modules[rank].whole_state_dict()):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


class Recomputed(LoopBlock):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def test_blocks_recompute_all_of_their_forward_or_nothing():
    modules = [shard(Recomputed(), group) for group in tensor_groups(2)]
    found = run_ranks(2, lambda rank: modules[rank](torch.randn(6, 16))[0].sum())
    for loss in found:
        with pytest.raises(UsageError, match="found a call in a backward: recompute the whole block"):
            loss.backward()


def test_what_no_backward_reaches_has_no_gradient():
    """An evaluation with gradients enabled counted as a backward: experts that it alone calls had zeros, and decayed."""
    torch.manual_seed(0)
    whole = LoopBlock(16, 4)
    modules = [shard(copy.deepcopy(whole), group) for group in tensor_groups(2)]
    batches, many = [torch.randn(1, 16)] * 2, torch.randn(64, 16)  # two experts of four, and all

    def train(module, *given):
        module(many)  # no loss
        for x in given:
            found = module(x)
            (found[0] if isinstance(found, tuple) else found).square().sum().div(len(given)).backward()

    def gradients(rank):
        train(modules[rank], batches[rank])
        modules[rank].average_gradients()
        return modules[rank].whole_gradients()

    train(whole, *batches)
    expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    assert {name.split(".")[1] for name in expected if name.startswith("experts")} < set("0123")
    for found in run_ranks(2, gradients):
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-6, msg=name)


class Depths(nn.Module):
    """Layers in lists, with as many heads; the lists have no forward that a block could call."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList(nn.ModuleList([nn.Linear(16, 16), nn.PReLU(16)]) for _ in range(4))
        self.heads = nn.ModuleDict({str(i): nn.ModuleDict({"own": nn.Linear(16, 2)}) for i in range(4)})
        self.last = nn.Linear(16, 4)


def test_lists_of_modules_are_no_experts():
    """They were taken for experts, and a rank called layers of another rank, which had no rows."""
    assert not find_experts(Depths())


class Scaled(nn.Module):
    """Experts in one module, beside a parameter that all of them share."""

    def __init__(self):
        super().__init__()
        self.n, self.w, self.shared = (
            4,
            nn.Parameter(torch.randn(4, 16, 16)),
            nn.Parameter(torch.randn(16), requires_grad=False),
        )

    def forward(self, x, index, gates):
        return torch.einsum("nk,nkhw,nh->nw", gates, self.w[index], x * self.shared)


class ScaledBlock(StackBlock):
    def __init__(self):
        super().__init__()
        self.inner = Scaled()


def test_a_registered_class():
    check_refused(HandWritten(ScaledBlock), "no module looks like experts")
    register_experts(Scaled, ["w"])
    torch.manual_seed(0)
    whole = HandWritten(ScaledBlock).double()
    models = [copy.deepcopy(whole) for _ in range(2)]
    modules = [shard(model, group) for model, group in zip(models, tensor_groups(2), strict=True)]
    assert modules[0].experts == {"blocks.0.inner": 4, "blocks.1.inner": 4}
    losses = run_ranks(2, lambda rank: modules[rank](**tokens(rank))["loss"].detach())
    for rank, loss in enumerate(losses):
        torch.testing.assert_close(loss, whole(**tokens(rank))["loss"].detach(), rtol=1e-12, atol=0)
    for block in whole.blocks:
        block.inner.shared.requires_grad_()
    check_refused(whole, "all experts share shared; freeze it")


class Averaging(Stack):
    """Looks like experts, but its weights do not multiply what an expert returns."""

    def forward(self, tokens, chosen, gates):
        return super().forward(tokens * gates.sum(-1, keepdim=True), chosen, torch.ones_like(gates))


def test_experts_are_run_before_they_are_cut():
    model = make("stack")
    for block in model.blocks:
        block.inner.__class__ = Averaging
    check_refused(model, "Averaging returned something else than the sum of weight times expert")


class Mixing(nn.Linear):
    """An expert that does something to its rows after a linear layer."""

    def __init__(self, change):
        super().__init__(16, 16)
        self.change = change

    def forward(self, x):
        return self.change(super().forward(x))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda h: h.cumsum(1) if h.dim() == 3 else h, "in two sequences"),
        (lambda h: h.softmax(-2), "in a call of fewer"),
        (lambda h: h - h.mean(0, keepdim=True), "in a call of fewer"),
        (lambda h: h / h.abs().max(), "in another order, beside one that is larger"),
        (lambda h: torch.cat((h[:99], h[99:] * 0)), "in a call of 258"),
        (lambda h: h.transpose(1, 2).cumsum(2).transpose(1, 2), "could not be run on rows"),
    ],
)
def test_experts_in_a_list_that_mix_rows_stay_whole(change, match):
    """They were cut: the rows of all ranks were mixed, without a word."""
    model = make("loop", torch.float32)
    for block in model.blocks:
        block.experts = nn.ModuleList([Mixing(nn.functional.relu) for _ in range(3)] + [Mixing(change)])
    check_refused(model, f"Mixing.* {match}")
    check_refused(model, f"Mixing.* {match}", experts=["*.experts"])


class OneScale(Stack):
    """8-bit activations, with one scale for all rows of a call."""

    def forward(self, tokens, chosen, gates):
        scale = tokens.abs().max() / 7
        return super().forward((tokens / scale).round() * scale, chosen, gates)


class Capped(Stack):
    """An expert takes so many rows of a call."""

    def forward(self, tokens, chosen, gates):
        shown = nn.functional.one_hot(chosen, self.n)
        is_kept = (shown.sum(1).cumsum(0).unsqueeze(1) * shown).sum(-1) <= 99
        return super().forward(tokens, chosen, gates * is_kept)


@pytest.mark.parametrize("kind", [OneScale, Capped])
def test_stacked_experts_that_depend_on_other_rows_stay_whole(kind):
    """They were cut: a rank's scale and capacity counted the rows of all ranks, without a word."""
    model = make("stack", torch.float32)
    for block in model.blocks:
        block.inner.__class__ = kind
    check_refused(model, f"{kind.__name__} returned something else for the same rows")
