"""Every function gets the name that a person would call it by, and the name leads back to it."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, get_overridable_functions

from smpc.tracer import targets
from smpc.tracer.constants import decode

X = torch.tensor(1.0)  # compared by identity: tuples ask for that first


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (F.linear, "torch.nn.functional.linear"),
        (F.relu, "torch.nn.functional.relu"),
        (torch.cat, "torch.cat"),
        (torch.relu, "torch.relu"),
        (torch.Tensor.view, "torch.Tensor.view"),
        (torch.Tensor.add_, "torch.Tensor.add_"),
        (torch.special.expit, "torch.special.expit"),
        (torch.linalg.norm, "torch.linalg.norm"),
        (torch.fft.rfft, "torch.fft.rfft"),
        (operator.getitem, "_operator.getitem"),
        (torch.ops.aten.add.Tensor, "torch.ops.aten.add.Tensor"),
        (torch.ops.aten.add, "torch.ops.aten.add"),
    ],
)
def test_names(function, name):
    assert targets.name_of(function) == name
    assert targets.function(name) is function


def test_every_overridable_function_with_a_name_can_be_found_by_it():
    lost = []
    for functions in get_overridable_functions().values():
        for function in functions:
            if function.__name__ in ("__get__", "__set__", "__delete__"):
                continue
            try:
                name = targets.name_of(function)
            except KeyError:
                continue
            if targets.function(name) is not function and targets.function(name) != function:
                lost.append((function, name))
    assert not lost


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "expected"),
    [
        (torch.Tensor.sum, (X,), {"axis": 1, "keepdims": True}, ((X,), {"dim": 1, "keepdim": True})),
        (torch.cat, (), {"tensors": [X, X], "axis": -1}, (([X, X],), {"dim": -1})),
        (torch.concatenate, ([X],), {"axis": 1}, (([X],), {"dim": 1})),
        (torch.mul, (), {"x2": X, "x1": X}, ((X, X), {})),
        (torch.add, (), {"input": X, "other": X, "alpha": 2}, ((X, X), {"alpha": 2})),
        (F.linear, (), {"weight": X, "input": X, "bias": None}, ((X, X), {"bias": None})),
        (torch.sum, (), {"input": X, "dim": 0}, ((X,), {"dim": 0})),
        (torch.swapaxes, (X,), {"axis0": 0, "axis1": 1}, ((X,), {"axis0": 0, "axis1": 1})),
        (torch.fake_quantize_per_channel_affine, (X, X, X), {"axis": 0}, ((X, X, X), {"axis": 0})),
        (F.softmax, (X,), {"dim": 1}, ((X,), {"dim": 1})),
    ],
)
def test_arguments_have_torch_s_own_names_and_operands_come_by_place(function, args, kwargs, expected):
    assert targets.plain_arguments(function, args, kwargs) == expected


class Calls(TorchFunctionMode):
    """Collects the name and arguments of every call."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():
            self.found.append(targets.name_call(func, args))
        return func(*args, **(kwargs or {}))


def calls(function, *args):
    with Calls() as mode:
        function(*args)
    return [(name, tuple(a for a in rest if not isinstance(a, torch.Tensor))) for name, rest in mode.found]


def write(x):
    x[0, 1:] = 3


def rebind(x):
    x.data = torch.zeros(2)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.T, ("builtins.getattr", ("T",))),
        (lambda x: x.requires_grad, ("builtins.getattr", ("requires_grad",))),
        (lambda x: x.grad, ("builtins.getattr", ("grad",))),
        (lambda x: x[1, None], ("_operator.getitem", ((1, None),))),
        (write, ("_operator.setitem", ((0, slice(1, None)), 3))),
        (rebind, ("builtins.setattr", ("data",))),
    ],
)
def test_attributes_and_items(function, expected):
    assert expected in calls(function, torch.ones(2, 3))


def test_operators_lead_to_functions_that_do_the_same():
    x, y = torch.tensor([2.0, 3.0]), torch.tensor([4.0, 5.0])
    for operation in (
        lambda: x + y, lambda: 1 - x, lambda: x / y, lambda: 2 / x, lambda: x // y, lambda: 7 // x, lambda: x % y,
        lambda: x**y, lambda: 2**x, lambda: x @ y, lambda: -x, lambda: x < y, lambda: x != y, lambda: abs(x),
        lambda: (x > 1) & (y > 1), lambda: ~(x > 1),
    ):  # fmt: skip
        with Calls() as mode:
            expected = operation()
        name, args = mode.found[-1]
        assert torch.equal(targets.function(name)(*args), expected), name


def test_functions_without_a_name_are_refused():
    def local():
        """Nothing leads here."""

    with pytest.raises(KeyError, match="does not lead to it"):
        targets.name_of(local)
    with pytest.raises(KeyError):
        targets.function("nowhere.at_all")


@pytest.mark.parametrize(
    "name",
    [
        "torch.os.system",
        "torch.sys.exit",
        "canary_module.f",
        "this.s",
        "math",
        "torch",
        "torch.nn.nothing",
        "",
        "..",
        "os",
    ],
)
def test_names_that_lead_out_of_torch_or_need_an_import_are_unknown(name, tmp_path, monkeypatch):
    (tmp_path / "canary_module.py").write_text("raise SystemExit('was imported')\ndef f(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyError, match="import what defines it"):
        targets.function(name)


def test_reading_a_trace_imports_nothing(tmp_path, monkeypatch):
    (tmp_path / "canary_module.py").write_text("raise SystemExit('was imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for value in ({"$": "import", "v": "canary_module:f"}, {"$": "enum", "v": ["canary_module:E", "A"]}):
        with pytest.raises(ModuleNotFoundError, match="is not imported"):
            decode(value)
