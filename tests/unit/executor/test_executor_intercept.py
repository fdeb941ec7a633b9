"""A split backward gives the gradients of a whole one, bit for bit, the parameters' in its second half."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from smpc.executor.split_backward.deferred_calls import Pending
from smpc.executor.split_backward.intercept import WORTHWHILE, Deferral


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Conv1D(nn.Module):
    """Hugging Face's: addmm with the weight transposed."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, 6), self.weight).view(*x.shape[:-1], 8)


class Tied(nn.Module):
    """One weight in an embedding, a linear, a product, and in functions that are not deferred."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 5, padding_idx=0)
        self.scale = nn.Parameter(torch.randn(5))

    def forward(self, ids):
        x = self.embed(ids) * self.scale
        y = F.linear(x, self.embed.weight) + self.embed.weight.sum() + x @ self.embed.weight.T
        return torch.einsum("bld,vd->blv", x, self.embed.weight) * y + torch.cat([self.scale, self.scale[:4]])


class Products(nn.Module):
    """Parameters in products of every kind, on either side."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(2, 6, 5))
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x):
        y = torch.bmm(x, self.right) @ torch.eye(5) + torch.matmul(x, self.right)
        return torch.addmm(self.bias, self.left.mm(y[0]), torch.eye(5), beta=0.5, alpha=2.0) + self.left @ y


class Frozen(nn.Module):
    """A parameter without gradient, one that is not used, and statistics of no gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.first.weight.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            scale = self.second.weight.abs().max()
        assert self.second.weight.shape == (4, 4)
        return self.second(F.relu(self.first(x), inplace=True)) / scale.clamp(min=1.0)


class Transformed(nn.Module):
    """Parameters in what torch.func transforms: row by row, and of what is differentiated there."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def energy(self, row):
        return self.down(torch.tanh(self.up(row))).square().sum()

    def forward(self, x):
        slopes = torch.func.vmap(torch.func.grad(self.energy))(x)
        return torch.func.vmap(lambda row: self.down(self.up(row)))(x + slopes) + torch.func.grad(self.energy)(x)


def images():
    return torch.randn(3, 4, 8, 8, requires_grad=True)


def tokens():
    return torch.randint(0, 9, (2, 4))


def rows(width):
    return lambda: torch.randn(2, 3, width, requires_grad=True)


CASES = {
    "linear": (lambda: nn.Linear(6, 5), rows(6)),
    "linear without bias": (lambda: nn.Linear(6, 5, bias=False), rows(6)),
    "linear of a vector": (lambda: nn.Linear(6, 5), lambda: torch.randn(6, requires_grad=True)),
    "linear of what needs no gradient": (lambda: nn.Linear(6, 5), lambda: torch.randn(4, 6)),
    "addmm": (Conv1D, rows(6)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, groups=2), lambda: torch.randn(2, 4, 9, requires_grad=True)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1, stride=2), images),
    "conv2d, padded by reflection": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), images),
    "conv2d, channels last": (
        lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
        lambda: torch.randn(3, 4, 8, 8).to(memory_format=torch.channels_last).requires_grad_(),
    ),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), lambda: torch.randn(1, 2, 4, 4, 4, requires_grad=True)),
    "conv2d without bias": (lambda: nn.Conv2d(4, 6, 3, bias=False, dilation=2, padding="same"), images),
    "conv2d of an image without a batch": (
        lambda: nn.Conv2d(4, 6, 3),
        lambda: torch.randn(4, 8, 8, requires_grad=True),
    ),
    "transposed conv1d": (
        lambda: nn.ConvTranspose1d(4, 6, 3, groups=2, stride=2, output_padding=1),
        lambda: torch.randn(2, 4, 9, requires_grad=True),
    ),
    "transposed conv2d": (lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), images),
    "transposed conv3d": (
        lambda: nn.ConvTranspose3d(2, 3, 2, bias=False),
        lambda: torch.randn(1, 2, 4, 4, 4, requires_grad=True),
    ),
    "embedding": (lambda: nn.Embedding(9, 5), tokens),
    "embedding, padded": (lambda: nn.Embedding(9, 5, padding_idx=-9), tokens),
    "embedding, scaled by frequency": (lambda: nn.Embedding(9, 5, scale_grad_by_freq=True), tokens),
    "embedding, sparse": (lambda: nn.Embedding(9, 5, sparse=True), tokens),
    "embedding, of a bounded norm": (lambda: nn.Embedding(9, 5, max_norm=0.5), tokens),
    "matrix product of batches": (Products, rows(6)),
    "convolutions, in place": (
        lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Conv2d(6, 2, 1)),
        images,
    ),
    "in place on the result": (lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 2)), rows(6)),
    "tied": (Tied, lambda: torch.randint(0, 9, (2, 4))),
    "frozen": (Frozen, rows(4)),
    "transformed": (Transformed, rows(6)),
    "lstm": (lambda: nn.LSTM(6, 5, batch_first=True), rows(6)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), rows(8)),
}


def first(value):
    return value[0] if isinstance(value, tuple) else value


def whole(module, inputs, grads):
    for value, grad in zip(inputs, grads, strict=True):
        first(module(value)).backward(grad)


def halves(module, inputs, grads, worthwhile=0):
    """All forwards, all first halves, all second halves."""
    pending, outputs = [Pending() for _ in inputs], []
    for left, value in zip(pending, inputs, strict=True):
        with Deferral(left, worthwhile):
            outputs.append(first(module(value)))
    for output, grad in zip(outputs, grads, strict=True):
        output.backward(grad)
    assert all(parameter.grad is None for parameter in module.parameters())
    for left in pending:
        assert len(left)
        left.run()
        assert not len(left)


def small_halves(module, inputs, grads):
    """The same, where no call is worth deferring."""
    halves(module, inputs, grads, WORTHWHILE)


@pytest.mark.parametrize("name", CASES)
def test_both_halves_equal_the_whole(name):
    torch.manual_seed(0)
    make, inputs_of = CASES[name]
    module = make()
    inputs = [inputs_of() for _ in range(3)]
    grads = [torch.randn_like(first(module(value))) for value in inputs]
    found = {}
    for run in (whole, halves, small_halves):
        copied = copy.deepcopy(module)
        own = [value.detach().clone().requires_grad_(value.requires_grad) for value in inputs]
        run(copied, [value * 1 if value.is_floating_point() else value for value in own], grads)
        found[run] = ([value.grad for value in own], {n: p.grad for n, p in copied.named_parameters()})
    for run in (halves, small_halves):
        (inputs_whole, whole_grads), (inputs_halves, halves_grads) = found[whole], found[run]
        for a, b in zip([*inputs_whole, *whole_grads.values()], [*inputs_halves, *halves_grads.values()], strict=True):
            assert (a is None) == (b is None)
            if a is not None and a.is_sparse:
                assert b.is_sparse
                assert torch.equal(a._indices(), b._indices())
                assert torch.equal(a._values(), b._values())
            else:
                assert a is None or (torch.equal(a, b) and a.stride() == b.stride())


def test_deferred_work_is_not_done_in_the_first_half():
    """Of a linear, B computes one matrix product, W the other."""
    module, x, pending = nn.Linear(64, 64, bias=False), torch.randn(8, 64, requires_grad=True), Pending()
    with Deferral(pending, worthwhile=0):
        y = module(x)
    counts = []
    for half in (lambda: y.sum().backward(), pending.run):
        with torch.profiler.profile() as profile:
            half()
        counts.append(sum(event.count for event in profile.key_averages() if event.key == "aten::mm"))
    assert counts == [1, 1]


def transposed(rows, columns):
    return nn.Parameter(torch.randn(columns, rows).t())


OPERANDS = {
    "weight by rows": lambda: (nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(5))),
    "weight by columns": lambda: (transposed(5, 6), nn.Parameter(torch.randn(5))),
    "one output": lambda: (nn.Parameter(torch.randn(1, 6)), None),
    "frozen bias": lambda: (nn.Parameter(torch.randn(5, 6)), torch.randn(5)),
    "trained bias, frozen weight": lambda: (torch.randn(5, 6), nn.Parameter(torch.randn(5))),
    "weight within another": lambda: (nn.Parameter(torch.randn(5, 9)[:, 1:7]), None),
}
ROWS = {
    "matrix": lambda: torch.randn(7, 6),
    "columns": lambda: torch.randn(6, 7).t(),
    "batch": lambda: torch.randn(2, 7, 6),
    "batch with gaps": lambda: torch.randn(2, 7, 9)[..., :6],
    "four dimensions": lambda: torch.randn(2, 2, 3, 6),
    "no rows": lambda: torch.randn(0, 6),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("operands", OPERANDS)
def test_products_of_operands_in_any_layout(operands, rows, dtype):
    """F.linear and torch.addmm as autograd does them, with gradients that are contiguous, transposed and expanded."""
    torch.manual_seed(0)
    parameters = [p if p is None else _cast(p, dtype) for p in OPERANDS[operands]()]
    value = ROWS[rows]().to(dtype)
    for multiply in (F.linear, _addmm):
        operands_of = parameters
        if multiply is _addmm:
            if value.dim() > 2 or parameters[1] is None:
                continue
            operands_of = [_cast(parameters[0], dtype, turned=True), parameters[1]]
        shape = (*value.shape[:-1], parameters[0].shape[0])
        plain = torch.randn(shape, dtype=dtype)
        turned = torch.randn((*shape[:-2], shape[-1], shape[-2]), dtype=dtype).transpose(-1, -2)
        for grad in (plain, turned, torch.ones((), dtype=dtype).expand(shape)):
            found = []
            for run in (whole, halves):
                own = [p if p is None else _cast(p, dtype) for p in operands_of]
                leaf = value.detach().requires_grad_()
                module = Call(multiply, own)
                run(module, [leaf * 1], [grad])
                found.append([leaf.grad, *(p.grad for p in own if p is not None)])
            for a, b in zip(*found, strict=True):
                assert (a is None) == (b is None)
                assert a is None or (torch.equal(a, b) and a.stride() == b.stride())


def _cast(value, dtype, *, turned=False):
    """A parameter, or a tensor, of its own with the same layout; `turned`: of the other one."""
    old = value.detach().t() if turned else value.detach()
    copied = torch.empty_strided(old.shape, old.stride(), dtype=dtype).copy_(old)
    return nn.Parameter(copied) if isinstance(value, nn.Parameter) else copied


def _addmm(rows, weight, bias):
    return torch.addmm(bias, rows, weight)


class Call(nn.Module):
    """A function of rows and operands."""

    def __init__(self, function, operands):
        super().__init__()
        self.function, self.operands = function, operands

    def parameters(self, recurse=True):
        return iter([p for p in self.operands if isinstance(p, nn.Parameter)])

    def forward(self, x):
        return self.function(x, *self.operands)


def test_an_argument_that_is_changed_in_place_is_an_error_as_without_the_split():
    x = torch.randn(4, 6, requires_grad=True)
    for deferred in (False, True):
        module, pending = nn.Linear(6, 5), Pending()
        rows = x * 1
        if deferred:
            with Deferral(pending, worthwhile=0):
                y = module(rows)
            rows.relu_()
            y.sum().backward()
            with pytest.raises(
                RuntimeError, match=r"in place: expected the argument of linear, of shape .4, 6., at version 0"
            ):
                pending.run()
        else:
            y = module(rows)
            rows.relu_()
            with pytest.raises(RuntimeError, match="inplace operation"):
                y.sum().backward()


@pytest.mark.parametrize("uses", [2, 3, 5])
@pytest.mark.parametrize("dims", [(7,), (2, 7)])
def test_a_parameter_that_is_used_again_with_hooks_and_in_place_operations_on_the_results(uses, dims):
    class Repeated(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.scale = nn.Linear(6, 6), nn.Parameter(torch.randn(6))

        def forward(self, x):
            for index in range(uses):
                x = self.inner(x)
                x.register_hook(lambda grad: grad * 1.5)  # what the gradient of the weight is computed from, too
                x.mul_(self.scale) if index % 2 else x.tanh_()
                x = x + self.inner.bias
            return x

    torch.manual_seed(0)
    module, x, grad = Repeated(), torch.randn(*dims, 6), torch.randn(*dims, 6)
    found = []
    for run in (whole, halves, small_halves):
        copied, leaf = copy.deepcopy(module), x.clone().requires_grad_()
        run(copied, [leaf * 1, leaf * 2], [grad, grad])
        found.append([leaf.grad, *(p.grad for p in copied.parameters())])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_what_is_checkpointed_is_not_kept_for_the_second_half():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    x, grad = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)
    found = []
    for deferred in (False, True):
        copied, pending = copy.deepcopy(module), Pending()
        if deferred:
            with Deferral(pending):
                y = checkpoint(copied, x, use_reentrant=False)
            y.backward(grad)
            assert all(parameter.grad is None for parameter in copied.parameters())
            pending.run()
        else:
            checkpoint(copied, x, use_reentrant=False).backward(grad)
        found.append([x.grad, *(p.grad for p in copied.parameters())])
        x.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_hooks_of_parameters_run_in_the_second_half():
    module, pending, calls = nn.Linear(3, 2), Pending(), []
    module.weight.register_hook(lambda grad: calls.append("grad"))
    module.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("accumulated"))
    with Deferral(pending):
        y = module(torch.randn(5, 3))
    y.sum().backward()
    assert calls == []
    pending.run()
    assert calls == ["grad", "accumulated"]


def test_only_large_work_on_a_cpu_is_deferred():
    counts = []
    for rows in (1, 64):
        module, x, pending = nn.Linear(256, 256, bias=False), torch.randn(rows, 256, requires_grad=True), Pending()
        with Deferral(pending):
            y = module(x)
        with torch.profiler.profile() as profile:
            y.sum().backward()
        counts.append(sum(event.count for event in profile.key_averages() if event.key == "aten::mm"))
        assert pending.run() == (rows == 64)
        assert pending.run() is None
    assert counts == [2, 1]


def test_without_gradients_nothing_is_kept():
    module, pending = nn.Linear(3, 2), Pending()
    with Deferral(pending), torch.no_grad():
        assert not module(torch.randn(5, 3)).requires_grad
    assert not len(pending)
    with Deferral(pending):
        module(torch.randn(5, 3)).sum().backward()
    pending.clear()
    pending.run()
    assert module.weight.grad is None
