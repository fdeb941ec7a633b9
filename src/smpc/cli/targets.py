"""TARGET of `smpc compile`: where a model and its sample inputs come from.

    package.module:factory    factory() of an importable module; the current folder is on the path
    path/to/file.py:factory   factory() of a file; its folder is on the path
    path/to/config.json       a Hugging Face model configuration (or the folder that holds it)

factory() returns (model, sample_inputs), or a model alone, which then needs `--input`. Sample inputs are what forward
is called with: a tensor, a tuple or list of positional inputs, a dict of named ones, or both: (tuple, dict).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from smpc.cli.huggingface import load_config_model
from smpc.cli.inputs import FORM, InputSpec, check_names
from smpc.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

FORMS = "module:factory, file.py:factory, or the path of a Hugging Face config.json"


def load_target(target: str, inputs: Sequence[InputSpec]) -> tuple[nn.Module, Any]:
    """The model and its sample inputs; `inputs`, if any, replace those of the factory."""
    path = Path(target)
    if path.is_dir() and (path / "config.json").is_file():
        path = path / "config.json"
    if path.suffix == ".json":
        if not path.is_file():
            raise ConfigError(f"TARGET {target!r}: no such file (looked in {os.getcwd()})")
        model, sample_inputs = load_config_model(path), None
    else:
        model, sample_inputs = _from_factory(target)
    if inputs:
        check_names(inputs, model)
        return model, {spec.name: spec.tensor() for spec in inputs}
    if sample_inputs is None:
        raise ConfigError(f"TARGET {target!r} gives a model without sample inputs: add --input {FORM}")
    return model, sample_inputs


def _from_factory(target: str) -> tuple[nn.Module, Any]:
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise ConfigError(f"TARGET {target!r}: expected {FORMS}")
    module = _load_file(target, where) if where.endswith(".py") else _load_module(target, where)
    factory = _attribute(target, module, name)
    return _unpack(target, name, _guard(target, name, module.__file__ or where, factory))


def _load_file(target: str, where: str) -> ModuleType:
    path = Path(where)
    if not path.is_file():
        raise ConfigError(f"TARGET {target!r}: file {where!r} does not exist (looked in {os.getcwd()})")
    name = path.stem
    taken = sys.modules.get(name)
    if taken is not None and getattr(taken, "__file__", None) != str(path):
        name = f"target_{name}"  # a file called types.py must not replace the module that everything imports
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[name] = module  # dataclasses and pickle look classes up by their module's name
    loader = spec.loader
    _guard(target, "the file", str(path), lambda: loader.exec_module(module))
    return module


def _load_module(target: str, where: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(where)
    except (ImportError, ValueError) as error:  # a parent package is missing, or the name is no module name
        raise ConfigError(f"TARGET {target!r}: no module {where!r} ({error})") from error
    if found is None:
        hint = f"; for a file, write {where}.py:..." if os.path.isfile(f"{where}.py") else ""
        raise ConfigError(f"TARGET {target!r}: no module {where!r} on the path or in {os.getcwd()}{hint}")
    module = _guard(target, "the module", found.origin or where, lambda: importlib.import_module(where))
    assert isinstance(module, ModuleType)
    return module


def _attribute(target: str, module: ModuleType, name: str) -> Callable[[], Any]:
    found: Any = module
    for part in name.split("."):
        if part not in dir(found):
            matches = difflib.get_close_matches(
                part, [n for n in dir(found) if not n.startswith("__")], n=1, cutoff=0.5
            )
            hint = f"; did you mean {matches[0]!r}?" if matches else ""
            raise ConfigError(f"TARGET {target!r}: {module.__file__} has no {name!r}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(
            f"TARGET {target!r}: expected a function of no arguments, found {type(found).__name__} {name!r}"
        )
    factory: Callable[[], Any] = found
    return factory


def _guard(target: str, what: str, path: str, call: Callable[[], Any]) -> Any:
    """Run the user's code; what it raises becomes one line with its type, message and place in the user's file."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        place = _place(error, path)
        raise ConfigError(f"TARGET {target!r}: {what} raised {type(error).__name__}: {text} ({place})") from error


def _place(error: BaseException, path: str) -> str:
    """file:line where the error left the user's file; of a syntax error, where it is."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if os.path.abspath(f.filename) == os.path.abspath(path)
    ]
    return f"{path}:{frames[-1].lineno}" if frames else path


def _unpack(target: str, name: str, result: Any) -> tuple[nn.Module, Any]:
    from torch import nn

    if isinstance(result, nn.Module):
        return result, None
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module):
        return result
    shape = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
    raise ConfigError(f"TARGET {target!r}: expected {name} to return (model, sample_inputs) or a model, found {shape}")
