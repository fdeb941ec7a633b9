"""Names that come from data are never run, and never taken for another: keys of ModuleDicts and inputs, classes, files.

A trained pipeline is compared with eager PyTorch bitwise, so that a name which reads another parameter is found too. Code in a name
would write a canary.
"""

import dataclasses
import enum
from collections import OrderedDict

import parity
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smpc.cli import main
from smpc.codegen.printer import emit_rank
from smpc.codegen.stage import build_stage
from smpc.compile import compile_model
from smpc.errors import CodegenError, TraceError

CANARY = []  # what code in a name would write to
CODE = "__import__('test_hostile_names').CANARY.append(1)"
CALL = f"exec({CODE!r})".replace(".", "\\x2e")  # torch allows no dots in names of modules

NAMES = {
    "item": ("a", "a[0]", "0", "0]"),
    "code": (f"a[{CALL}]", f"[{CALL}", f"x, {CALL}", f"a)\n{CALL}\n("),
    "call": (CODE.replace(".", "\u2024"), "__import__('os')", "self", "F"),
    "quotes": ("it's", 'say "no"', '\'"\'"""', "back\\slash\\"),
    "controls": ("new\nline", "tab\t", "\x1b[31mred", "nul\0"),
    "keywords": ("class", "None", "lambda", "print"),
    "look-alikes": ("\ufb01ne", "fine", "\u212a", "K"),
    "private": ("__x", "_Stage0__x", "_Stage1__x", "__x__"),
    "numbers": ("1", "01", "\u0661", "10"),
    "blanks": (" ", "\u3000", "a b", "#"),
    "surrogates": ("\ud800", "\udcff", "\u202e", "\u2028"),
}


class Named(nn.Module):
    """Calls modules of these names whole, and reads their weights and parameters, buffers and tensors of the same names by itself."""

    def __init__(self, names):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})
        self.scales = nn.ParameterDict({name: nn.Parameter(torch.randn(4)) for name in names})
        self.tables = {name: torch.randn(4) for name in names}
        self.rows = nn.Module()
        for name in names:
            self.rows.register_buffer(name, torch.randn(4))
        self.names = names

    def forward(self, x):
        for name in self.names:
            x = self.layers[name](x) * self.scales[name] + self.tables[name]
            x = F.linear(x, self.layers[name].weight) + getattr(self.rows, name)
        return x


def _check(model, batch, stages=2):
    CANARY.clear()
    compilation = compile_model(model, batch, pipeline_parallel_degree=stages, microbatches=2)
    expected = parity.run_eager(model, batch, 2)
    got = parity.run_loopback(model, compilation, batch)
    parity.assert_same(expected, got, tuple(item.name for item in compilation.plan.shared_parameters))
    for program in compilation.programs:
        exec(compile(emit_rank(program), "rank.py", "exec"), {})
    assert not CANARY
    return compilation


@pytest.mark.parametrize("case", NAMES)
def test_modules_parameters_buffers_and_tensors_of_any_name(case):
    torch.manual_seed(0)
    _check(Named(NAMES[case]), ((torch.randn(4, 4),), {}), stages=3)


def test_the_item_of_a_list_is_not_the_module_of_that_name():
    """`a[0]` is the first of the list `a`; a parameter may be called "a[0]" all the same."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = [torch.randn(4), torch.randn(4)]
            self.register_parameter("a[0]", nn.Parameter(torch.randn(4)))
            self.register_buffer("a[1]", torch.randn(4))
            self.add_module("a[-1]", nn.Linear(4, 4))
            self.last = nn.Linear(4, 4)

        def forward(self, x):
            x = getattr(self, "a[-1]")(x * self.a[0] + getattr(self, "a[0]"))
            return self.last(x * getattr(self, "a[1]") + self.a[1])

    torch.manual_seed(0)
    _check(Both(), ((torch.randn(4, 4),), {}))


def test_numbers_in_modules_that_are_called_whole_are_names_there():
    """`self.pair[0]` of a Sequential is its first, whatever its name; the stage reads a weight inside of a module it calls whole."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair = nn.Sequential(OrderedDict([("1", nn.Linear(4, 4)), ("0", nn.Linear(4, 4))]))
            self.keyed = nn.ModuleDict({"7": nn.Linear(4, 4)})

        def forward(self, x):
            return self.keyed["7"](self.pair(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = Inner(), nn.Linear(4, 4)

        def forward(self, x):
            x = self.inner(x)
            x = F.linear(x, getattr(self.inner.pair, "0").weight) + self.inner.keyed["7"].bias
            return self.last(x)

    torch.manual_seed(0)
    _check(Model(), ((torch.randn(4, 4),), {}), stages=1)


class Color(enum.Flag):
    RED = 1
    BLUE = 2


Data = enum.Enum("Data", {"a b": 1, CODE: 2})


class Text(str):
    def __repr__(self):
        return CODE


class Answer(dict):
    """A dict subclass."""


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


class Returns(nn.Module):
    """Takes odd constants, and returns tensors under odd names."""

    def __init__(self, key):
        super().__init__()
        self.linear, self.key = nn.Linear(4, 4), key

    def forward(self, x, options=None):
        y = self.linear(x)
        holder = Answer()
        holder[self.key], holder["rest"] = y, x + y
        return holder


class Uses(nn.Module):
    def __init__(self, key, options):
        super().__init__()
        self.first, self.second = Returns(key), Returns(key)
        self.key, self.options = key, options

    def forward(self, x):
        x = self.first(x, self.options)
        x = self.second(x[self.key] + x["rest"], options=self.options)
        return x[self.key] * x["rest"]


@pytest.mark.parametrize("key", [CODE, "it's", "a]\n#", Text("k"), Color.RED, 3, (1, "a"), None])
def test_keys_of_what_modules_return(key):
    torch.manual_seed(0)
    _check(Uses(key, None), ((torch.randn(4, 4),), {}), stages=1)


@pytest.mark.parametrize(
    "options",
    [
        {CODE: 1},
        {Text("k"): 1},
        {Color.RED: Color.BLUE},
        Color.RED | Color.BLUE,
        Data["a b"],
        Data(2),
        Text("t"),
        complex("nan"),
        int,
    ],
)
def test_arguments_of_modules(options):
    torch.manual_seed(0)
    _check(Uses("k", options), ((torch.randn(4, 4),), {}), stages=1)


def test_a_class_of_a_function_as_argument():
    class Local:
        pass

    torch.manual_seed(0)
    _check(Uses("k", Local), ((torch.randn(4, 4),), {}), stages=1)


def test_attributes_of_returned_objects():
    class Gives(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            found = Pair(self.linear(x), x)
            setattr(found, "x; " + CODE, x * 2)
            return found

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = Gives(), Gives()

        def forward(self, x):
            a = self.one(x)
            b = self.two(a.left + a.right)
            return b.left + b.right

    torch.manual_seed(0)
    _check(Model(), ((torch.randn(4, 4),), {}), stages=1)


@pytest.mark.parametrize("name", ["a b", "x'y", 'q"', "class", CODE, "new\nline", "\ufb01", "__x", "torch", "\x1b[2J"])
def test_names_of_inputs(name):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, **inputs):
            return self.two(self.one(inputs[name]) + inputs["fi"])

    torch.manual_seed(0)
    _check(Model(), ((), {name: torch.randn(4, 4), "fi": torch.randn(4, 4)}))


def test_names_of_classes_and_of_schedules_stay_in_their_docstrings(tmp_path):
    path = tmp_path / f'"""\n{CODE}\n"""\\.csv'
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")
    evil = type(f'N"""\n{CODE}\n\x1b', (nn.Sequential,), {})
    model, batch = evil(nn.Linear(4, 4), nn.Linear(4, 4)), ((torch.randn(4, 4),), {})
    compilation = compile_model(model, batch, pipeline_parallel_degree=2, microbatches=2, schedule=str(path))
    for program in compilation.programs:
        source = emit_rank(program)
        exec(compile(source, "rank.py", "exec"), {})
        assert "\x1b" not in source
        for code in program.stages:
            build_stage(code, model)
    assert not CANARY


@pytest.mark.parametrize("name", ["a.b", ""])
def test_names_that_no_path_can_hold_are_refused(name):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    setattr(model[1], name, nn.Linear(4, 4))  # torch's own check is in add_module alone
    with pytest.raises(TraceError, match="names of modules are joined by dots"):
        compile_model(model, ((torch.randn(4, 4),), {}), pipeline_parallel_degree=1)


@pytest.mark.parametrize("name", ["checkpoint", "refresh", "_device", "_origin"])
def test_names_that_stages_have_themselves_are_refused(name):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            setattr(self, name, nn.Linear(4, 4))
            self.last = nn.Linear(4, 4)

        def forward(self, x):
            return self.last(self._modules[name](x))

    model, batch = Model(), ((torch.randn(4, 4),), {})
    compilation = compile_model(model, batch, pipeline_parallel_degree=2, microbatches=2)
    with pytest.raises(CodegenError, match="another name"):
        parity.run_loopback(model, compilation, batch)


def test_reports_of_hostile_names_hold_no_escape_codes_and_no_markup(tmp_path, capsys):
    """What is printed and written for a model with such names: nothing steers a terminal, nothing ends a script element."""
    (tmp_path / "hostile.py").write_text(
        "import torch\nfrom torch import nn\n"
        "NAMES = ['\\x1b[31mred', '</script><script>alert(1)</script>', 'new\\nline', '\\u202ereversed', '[bold]', '\\x9b2J', '\\ud800']\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in NAMES})\n"
        "    def forward(self, x):\n"
        "        for layer in self.layers.values():\n"
        "            x = layer(x)\n"
        "        return x\n"
        "Net.__qualname__ = 'Net\\x1b[2J</script>'\n"
        "def build():\n"
        "    return Net(), torch.zeros(4, 4)\n"
    )
    out = tmp_path / "out"
    assert main(["compile", f"{tmp_path}/hostile.py:build", "-p", "3", "-m", "2", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    texts = {"stdout": printed.out, "stderr": printed.err}
    texts |= {path.name: path.read_text() for path in out.iterdir()}
    for name, text in texts.items():
        assert all(c.isprintable() or c == "\n" for c in text), name
    assert texts["report.html"].count("</script>") == 2  # those of the page
    assert "alert(1)</script>" not in texts["report.html"]
