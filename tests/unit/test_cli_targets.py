"""TARGET: factories of files and modules, and one clear line when they are no good."""

import sys
import textwrap

import pytest
import torch
from torch import nn

from smpc.cli.inputs import InputSpec
from smpc.cli.targets import load_target
from smpc.errors import ConfigError


@pytest.fixture(autouse=True)
def _clean_imports(monkeypatch, tmp_path):
    """Targets change what can be imported and what has been: undo it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path):
    def write(text, name="factories.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write


GOOD = """
    import torch
    from torch import nn
    from dataclasses import dataclass

    @dataclass
    class Settings:  # dataclasses look their module up in sys.modules
        size: "int" = 4

    def pair():
        return nn.Linear(Settings().size, 2), torch.ones(3, 4)

    def alone():
        return nn.Linear(4, 2)

    class Holder:
        @staticmethod
        def build():
            return pair()

    model = nn.Linear(4, 2)
    number = 7

    def wrong():
        return 3, 4, 5
"""


def test_file_factory(write):
    path = write(GOOD)
    for name in ("pair", "Holder.build"):
        model, inputs = load_target(f"{path}:{name}", ())
        assert isinstance(model, nn.Linear)
        assert torch.equal(inputs, torch.ones(3, 4))


def test_module_factory_in_the_current_folder(write, tmp_path, monkeypatch):
    write("", "pack/__init__.py")
    write(GOOD, "pack/inner.py")
    monkeypatch.chdir(tmp_path)
    model, inputs = load_target("pack.inner:pair", ())
    assert isinstance(model, nn.Linear)
    assert inputs.shape == (3, 4)


def test_file_imports_its_neighbours(write):
    write("SIZE = 5", "neighbour_of_factory.py")
    path = write("""
        from torch import nn
        import neighbour_of_factory
        def build():
            return nn.Linear(neighbour_of_factory.SIZE, 1), None
    """)
    model, _ = load_target(f"{path}:build", (InputSpec("input", "float32", (2, 5)),))
    assert model.in_features == 5


def test_file_does_not_replace_a_module_of_its_name(write):
    for name in ("types", "time"):
        before = sys.modules[name]
        model, _ = load_target(f"{write(GOOD, f'{name}.py')}:pair", ())
        assert isinstance(model, nn.Linear)
        assert sys.modules[name] is before


def test_inputs_by_shape_replace_those_of_the_factory(write):
    path = write(GOOD)
    for name in ("alone", "pair"):
        _, inputs = load_target(f"{path}:{name}", (InputSpec("input", "float32", (6, 4)),))
        assert list(inputs) == ["input"]
        assert inputs["input"].shape == (6, 4)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("alone", "gives a model without sample inputs: add --input NAME=DTYPE[d0,d1]"),
        ("wrong", "expected wrong to return (model, sample_inputs) or a model, found a tuple of 3"),
        ("bair", "has no 'bair'; did you mean 'pair'?"),
        ("Holder.bild", "has no 'Holder.bild'; did you mean 'build'?"),
        ("number", "expected a function of no arguments, found int 'number'"),
    ],
)
def test_unusable_factories(write, name, says):
    with pytest.raises(ConfigError) as caught:
        load_target(f"{write(GOOD)}:{name}", ())
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise ValueError('no\\nway')", "build raised ValueError: no way ({path}:5)"),
        ("helper()", "build raised ZeroDivisionError: division by zero ({path}:3)"),
        ("raise SystemExit(4)", "build raised SystemExit: 4 ({path}:5)"),
        ("import torch; torch.ones(2) @ torch.ones(3)", "({path}:5)"),
    ],
)
def test_raising_factory_is_named_with_its_line(write, body, says):
    path = write(f"""
        def helper():
            1 / 0
        def build():
            {body}
    """)
    with pytest.raises(ConfigError) as caught:
        load_target(f"{path}:build", ())
    assert says.format(path=path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\ndef build(:\n", "the file raised SyntaxError"),
        ("x = 1\nimport no_such_module_at_all\n", "the file raised ModuleNotFoundError"),
    ],
)
def test_file_that_does_not_import(write, text, says):
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load_target(f"{path}:build", ())
    assert says in str(caught.value)
    assert f"({path}:2)" in str(caught.value)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nothing", "expected module:factory, file.py:factory"),
        (":build", "expected module:factory"),
        ("module:", "expected module:factory"),
        ("missing.py:build", "file 'missing.py' does not exist"),
        ("missing.json", "no such file"),
        ("missing_module:build", "no module 'missing_module'"),
        ("missing_package.module:build", "no module 'missing_package.module'"),
        ("a/b:build", "no module 'a/b'"),
        ("..x:build", "no module '..x'"),
    ],
)
def test_targets_that_are_not_there(target, says):
    with pytest.raises(ConfigError) as caught:
        load_target(target, ())
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
