"""Checks of values that raise an error and have no other result are made by the programs."""

import runpy

import parity
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smpc import compile_model
from smpc.tracer import record
from smpc.tracer.ir import NodeKind
from smpc.tracer.operations.value_queries import REQUIRE, _lines_of_checks


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    """torch.distributions checks its arguments, also where something in this process has called torch.compile, which turns that off."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)


class Normal(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 8)
        self.decoder = nn.Linear(4, 6)

    def forward(self, x):
        mean, log_std = self.encoder(x).chunk(2, -1)
        found = torch.distributions.Normal(mean, log_std.exp())
        decoded = self.decoder(found.rsample())
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        unlikely = -torch.distributions.Normal(decoded, 1.0).log_prob(x).mean()
        return unlikely + torch.distributions.kl_divergence(found, prior).mean()


class Asserts(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 6)
        self.decoder = nn.Linear(6, 6)

    def forward(self, x):
        x = self.encoder(x)
        torch._assert_async((x.abs() < 1e6).all(), "x is too large")
        return self.decoder(x).sum()


class Gaussian(Asserts):
    def forward(self, x):
        h = self.encoder(x)
        return F.gaussian_nll_loss(self.decoder(h), x, 1e6 - h)


def compiled(model):
    torch.manual_seed(0)
    batch = ((torch.randn(4, 6),), {})
    return batch, compile_model(model, batch, pipeline_parallel_degree=2, microbatches=2)


@pytest.mark.parametrize("make", [Normal, Gaussian])
def test_checked_models_train_like_in_eager(make):
    model = make()
    batch, compilation = compiled(model)
    torch.manual_seed(1)
    expected = parity.run_eager(model, batch, 2)
    torch.manual_seed(1)
    parity.assert_same(expected, parity.run_loopback(model, compilation, batch))


def test_checks_are_nodes_of_the_trace_and_ask_for_no_values():
    nodes = record(Normal(), (torch.zeros(4, 6),)).nodes
    checks = [node for node in nodes if node.target == REQUIRE]
    assert (
        sum("parameter loc" in node.args[1] for node in checks) == 3
    )  # the prior's is known: nothing asks at run time
    assert sum("the value" in node.args[1] for node in checks) == 1  # of log_prob
    assert not any(node.kind is NodeKind.CALL_MODULE for node in nodes)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [(Normal, ValueError, "scale|loc"), (Asserts, RuntimeError, "large"), (Gaussian, ValueError, "var has negative")],
)
def test_invalid_values_are_the_error_that_they_are_in_eager(make, error, words):
    model = make()
    batch, compilation = compiled(model)
    parity.run_loopback(model, compilation, batch)
    nn.init.constant_(model.encoder.bias, 1e9)
    with pytest.raises(error, match=words):
        model(*batch[0])
    with pytest.raises(error, match=words):
        parity.run_loopback(model, compilation, batch)


@pytest.mark.parametrize(
    ("test", "answer"),
    [
        ("torch.any(x < 0)", False),
        ("not x.all()", True),
        ("x.item() < 1", None),
        ("float(x) < 1", None),
        ("x.any() or x.all()", None),
    ],
)
def test_only_questions_whether_a_tensor_is_true_are_answered(tmp_path, test, answer):
    """A number in place of the answer could have raised the error."""
    (tmp_path / "asking.py").write_text(f"def ask(x):\n    if {test}:\n        raise ValueError\n")
    code = runpy.run_path(tmp_path / "asking.py")["ask"].__code__
    assert _lines_of_checks(code) == ({} if answer is None else {2: answer})
