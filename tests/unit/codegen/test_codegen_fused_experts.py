"""Fused experts that ranks may have slices of, and those that only look so; on two pretended ranks beside the whole model."""

import copy

import pytest
import torch
from tensor_ranks import run_ranks, tensor_groups
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from smpc.codegen.rewrite.tensor_parallel.fused_experts import fused_experts
from smpc.tensor_parallel import shard
from smpc.tracer.replay import replay


class Experts(nn.Module):
    """`form`, any of these: turned, weights from the left; alternating, every other column is the gate's, else all of these come first;
    fours, four columns of the gate and four of the rest in turn; added, input and all; biased; bent, not linear in what comes last.
    """

    def __init__(self, form):
        super().__init__()
        self.form = form.split()
        turned = "turned" in self.form
        self.gate_up_proj = nn.Parameter(torch.randn(4, 12, 16) if turned else torch.randn(4, 16, 12))
        self.down_proj = nn.Parameter(torch.randn(4, 8, 12) if turned else torch.randn(4, 12, 8))
        if "biased" in self.form:
            self.gate_up_proj_bias = nn.Parameter(torch.randn(4, 16))
            self.down_proj_bias = nn.Parameter(torch.randn(4, 12))

    def gate(self, both):
        if "alternating" in self.form:
            return both[..., ::2], both[..., 1::2]
        if "fours" in self.form:
            return [part.flatten(-2) for part in both.unflatten(-1, (-1, 2, 4)).unbind(-2)]
        return both.chunk(2, -1)

    def forward(self, hidden, index, weights):
        found = hidden.clone() if "added" in self.form else torch.zeros_like(hidden)
        for expert in range(4):
            row, slot = (index == expert).nonzero(as_tuple=True)
            up, down = self.gate_up_proj[expert], self.down_proj[expert]
            biases = (
                [self.gate_up_proj_bias[expert], self.down_proj_bias[expert]] if "biased" in self.form else [None] * 2
            )
            if "turned" in self.form:
                up, down = up.T, down.T
            gate, rest = self.gate(F.linear(hidden[row], up, biases[0]))
            own = F.linear(F.silu(gate) * rest, down, biases[1])
            own = own.tanh() if "bent" in self.form else own
            found = found.index_add(0, row, own * weights[row, slot, None])
        return found


class Model(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.embedding, self.router, self.head = nn.Embedding(32, 12), nn.Linear(12, 4), nn.Linear(12, 32)
        self.experts = Experts(form)

    def forward(self, ids):
        hidden = self.embedding(ids).view(-1, 12)
        weights, index = self.router(hidden).softmax(-1).topk(2)
        return self.head(hidden + self.experts(hidden, index, weights)).square().mean()


DIVIDED = ("halves", "turned", "alternating", "biased", "biased turned", "biased alternating turned")
WHOLE = ("added", "fours", "biased fours turned", "bent", "biased bent")
AGAIN = ("turned", "biased", "biased fours turned", "bent")  # each word is in another form too


@pytest.mark.long
@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.slow] if form in AGAIN else []) for form in DIVIDED + WHOLE]
)
def test_experts_are_divided_where_slices_add_up(form):
    """Names and shapes alone had decided: a module whose gate and up alternate trained on wrong numbers without a word."""
    torch.manual_seed(0)
    divided = form in DIVIDED
    model, ids = Model(form), torch.randint(0, 32, (2, 8))
    known = fused_experts(model)
    assert known.undivided == (() if divided else ("experts",))
    assert known.alternating == (("experts",) if divided and "alternating" in form else ())
    loss = model(ids)
    loss.backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    modules = [shard(copy.deepcopy(model), {"ids": ids}, group) for group in tensor_groups(2)]

    def work(rank):
        own = modules[rank](ids=ids)
        own.backward()
        again = replay(modules[rank].rewritten.trace, modules[rank].model, (), {"ids": ids})
        return own.detach(), again.detach(), modules[rank].whole_gradients()

    for own, again, gradients in run_ranks(2, work):
        torch.testing.assert_close(own, loss.detach(), rtol=1e-5, atol=0)
        torch.testing.assert_close(again, own, rtol=0, atol=0)
        assert set(gradients) == set(wanted)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=1e-5 * wanted[name].abs().max().item())
    assert (modules[0].model.experts.down_proj.numel() < model.experts.down_proj.numel()) == divided


class Again(Experts):
    """Computes itself again in the backward."""

    def __init__(self, form, reentrant):
        super().__init__(form)
        self.reentrant = reentrant

    def forward(self, hidden, index, weights):
        return checkpoint(super().forward, hidden, index, weights, use_reentrant=self.reentrant)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_experts_with_a_bias_that_compute_themselves_again_stay_whole(reentrant):
    """The second rank had zeros for the last bias in the forward, and the bias itself in the backward: wrong gradients of the router."""
    torch.manual_seed(0)
    modules = nn.ModuleList([Again("biased", reentrant), Again("halves", reentrant)])
    assert fused_experts(modules).undivided == ("0",)
    model, ids = Model("biased"), torch.randint(0, 32, (2, 8))
    model.experts = Again("biased", reentrant)
    model(ids).backward()
    sharded = [shard(copy.deepcopy(model), {"ids": ids}, group) for group in tensor_groups(2)]

    def work(rank):
        sharded[rank](ids=ids).backward()
        return sharded[rank].whole_gradients()

    for gradients in run_ranks(2, work):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)


class Between(Experts):
    """What is between the products is a module of its own; it counts the tokens of each expert."""

    def __init__(self, between):
        super().__init__("halves")
        self.between, self.seen = between, []
        self.register_buffer("count", torch.zeros(4))

    def forward(self, hidden, index, weights):
        self.count += index.flatten().bincount(minlength=4)
        self.seen.append(len(hidden))
        found = torch.zeros_like(hidden)
        for expert in range(4):
            row, slot = (index == expert).nonzero(as_tuple=True)
            gate, rest = F.linear(hidden[row], self.gate_up_proj[expert]).chunk(2, -1)
            inner = F.linear(self.between(gate) * rest, self.down_proj[expert])
            found = found.index_add(0, row, inner * weights[row, slot, None])
        return found


def test_each_is_judged_by_what_is_between_its_products():
    """The class, sizes and numbers of the first had decided for all: a softmax over half of the width gave wrong numbers without a word."""
    between = (nn.SiLU(), nn.Softmax(-1), torch.sigmoid, lambda value: value.softmax(-1), nn.Softmax(-1), nn.SiLU())
    assert fused_experts(nn.ModuleList(map(Between, between))).undivided == ("1", "3", "4")


def test_running_experts_leaves_them_as_they_are():
    """Counts in buffers and lists had gone up by the invented tokens."""
    module = Between(nn.SiLU())
    assert fused_experts(nn.ModuleList([module])).undivided == ()
    assert not module.count.any()
    assert not module.seen


class Adapter(nn.Linear):
    """Across the hidden width of the experts; adds nothing until it is trained."""

    def __init__(self):
        super().__init__(8, 8, bias=False)
        nn.init.zeros_(self.weight)

    def forward(self, gate):
        found = F.silu(gate)
        return found + super().forward(found) if found.shape[-1] == 8 else found


@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("between", [Adapter, lambda: nn.Dropout(0.5)], ids=["adapter", "dropout"])
def test_what_may_not_add_up_later_stays_whole(between, mode):
    """An adapter begins at zero in either mode; in training every rank would draw what it drops by itself."""
    torch.manual_seed(0)
    model = nn.ModuleList([Between(between())]).train(mode)
    is_dropout = not isinstance(model[0].between, Adapter)
    assert fused_experts(model).undivided == (() if is_dropout and not mode else ("0",))


class Counted(Experts):
    """Counts its experts by an attribute, so that it can have fewer; `form` may also have any of these: drawn, what experts return is
    dropped in part; seen, tokens are counted in a buffer.
    """

    def __init__(self, form):
        super().__init__(form)
        self.num_experts = 4
        if "seen" in self.form:
            self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden, index, weights):
        found = torch.zeros_like(hidden)
        if "seen" in self.form:
            self.seen += len(hidden)
        for expert in range(self.num_experts):
            row, slot = (index == expert).nonzero(as_tuple=True)
            if len(row) == 0:
                continue
            gate, rest = F.linear(hidden[row], self.gate_up_proj[expert]).chunk(2, -1)
            own = F.linear(F.silu(gate) * rest, self.down_proj[expert]).tanh()
            own = F.dropout(own, 0.5, self.training) if "drawn" in self.form else own
            found = found.index_add(0, row, own * weights[row, slot, None])
        return found


@pytest.mark.parametrize(("form", "ranks"), [pytest.param("plain", 4, marks=pytest.mark.slow), ("seen", 2)])
def test_ranks_have_some_of_the_experts_where_slices_do_not_add_up(form, ranks):
    """All experts were on every rank, whatever is between the last product and the weights. Hooks of their module see all tokens."""
    torch.manual_seed(0)
    model, ids = Model("plain"), torch.randint(0, 32, (2, 8))
    model.experts = Counted(form)
    with torch.no_grad():
        model.router.weight[1] = -9.0  # an expert without tokens
        model.embedding.weight.abs_()
    loss = model(ids)
    loss.backward()
    modules = [shard(copy.deepcopy(model), {"ids": ids}, group) for group in tensor_groups(ranks)]
    rows = []
    modules[0].model.experts.register_forward_hook(lambda module, args, result: rows.append(len(args[0])))

    def work(rank):
        own = modules[rank](ids=ids)
        own.backward()
        again = replay(modules[rank].rewritten.trace, modules[rank].model, (), {"ids": ids})
        return own.detach(), again.detach(), modules[rank].whole_gradients()

    for own, again, gradients in run_ranks(ranks, work):
        torch.testing.assert_close(own, loss.detach(), rtol=1e-5, atol=0)
        torch.testing.assert_close(again, own, rtol=0, atol=0)
        for name, parameter in model.named_parameters():
            scale = parameter.grad.abs().max().item()
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-5 * scale)
    experts = modules[0].model.experts
    assert len(experts.down_proj) == (4 // ranks if form == "plain" else 4)
    assert experts.num_experts == 4
    assert "forward" not in vars(experts)
    assert rows == [16, 16]


def test_experts_that_draw_random_numbers_stay_whole():
    """Ranks with other rows would draw other numbers, for what comes after them, too."""
    torch.manual_seed(0)
    model, ids = Model("plain"), torch.randint(0, 32, (2, 8))
    model.experts = Counted("drawn")
    (group, _) = tensor_groups(2)
    assert len(shard(model, {"ids": ids}, group).model.experts.down_proj) == 4
