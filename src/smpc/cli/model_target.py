"""TARGET of `smpc compile`: where a model and its sample inputs come from.

    package.module:factory    factory() of an importable module; the current folder is on the path
    path/to/file.py:factory   factory() of a file; its folder is on the path
    path/to/config.json       a Hugging Face model configuration (or the folder that holds it)

factory() returns (model, sample_inputs), or a model alone, which then needs `--input`. Sample inputs are what forward
is called with: a tensor, a tuple or list of positional inputs, a dict of named ones, or both: (tuple, dict).

`--input NAME=DTYPE[d0,d1]`: sample inputs given by shape.

    input_ids=int64[8,512]     NAME is a parameter of the model's forward, DTYPE a dtype of torch, [] a scalar

The values are zeros, ones for masks (a mask of zeros hides everything): a trace depends on shapes, and on values only
where the model's own Python looks at them.

`load_config_model`: models from a Hugging Face `config.json`, built on the meta device, so that no weights are allocated, unless somebody
is to run them.

Nothing is fetched and no code from the file runs: the class is transformers' for `architectures[0]`, or, if the file
names none that transformers has, the one that fits `model_type` (see `_TASKS`). `use_cache` is switched off: a training
step keeps no cache.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.util
import inspect
import math
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from smpc.cli.verify import check_fits
from smpc.config import parse_json, read_text
from smpc.config.numbers import MAX_BYTES, MAX_INPUT_BYTES, MAX_MASK_BYTES, MAX_MICROBATCH_BYTES, shown
from smpc.errors import ConfigError, printable

if TYPE_CHECKING:
    import torch
    from torch import nn


FORMS = "module:factory, file.py:factory, or the path of a Hugging Face config.json"


def load_target(target: str, inputs: Sequence[InputSpec], *, real: bool = False) -> tuple[nn.Module, Any]:
    """The model and its sample inputs; `inputs`, if any, replace the factory's. `real`: a configuration's model has values, too."""
    path = check_target(target)
    if path is not None:
        model, sample_inputs = load_config_model(path, real=real), None
    else:
        model, sample_inputs = _from_factory(target)
    if inputs:
        check_names(inputs, model)
        return model, {spec.name: spec.tensor() for spec in inputs}
    if sample_inputs is None:
        raise ConfigError(f"TARGET {shown(target)} gives a model without sample inputs: add --input {FORM}")
    return model, sample_inputs


def check_target(target: str) -> Path | None:
    """The configuration that is meant; None for a factory. ConfigError for anything but a target, and for missing files."""
    inside = os.path.join(target, "config.json")
    path = Path(inside if os.path.isfile(inside) else target)
    if path.suffix == ".json":
        if not os.path.exists(path):
            raise ConfigError(f"TARGET {shown(target)}: no such file (looked in {os.getcwd()})")
        return path
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise ConfigError(f"TARGET {shown(target)}: expected {FORMS}")
    if where.endswith(".py") and not os.path.isfile(where):
        what = "is no file" if os.path.lexists(where) else f"does not exist (looked in {os.getcwd()})"
        raise ConfigError(f"TARGET {shown(target)}: file {shown(where)} {what}")
    return None


def _from_factory(target: str) -> tuple[nn.Module, Any]:
    where, _, name = target.rpartition(":")
    module = _load_file(target, where) if where.endswith(".py") else _load_module(target, where)
    factory = _target_attribute(target, module, name)
    return _model_and_inputs(
        target, name, _guard_user_code(target, shown(name)[1:-1], _file_of(module, where), factory)
    )


def _load_file(target: str, where: str) -> ModuleType:
    path = Path(where)
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
    _guard_user_code(target, "the file", str(path), lambda: loader.exec_module(module))
    return module


def _load_module(target: str, where: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(where)
    except KeyboardInterrupt:
        raise
    except (
        BaseException
    ) as error:  # a parent package is missing, or what is in it raises; or the name is no module name
        why = shown(_text_of(error))[1:-1]
        raise ConfigError(f"TARGET {shown(target)}: no module {shown(where)} ({why})") from error
    if found is None:
        hint = f"; for a file, write {where}.py:..." if os.path.isfile(f"{where}.py") else ""
        raise ConfigError(f"TARGET {shown(target)}: no module {shown(where)} on the path or in {os.getcwd()}{hint}")
    module = _guard_user_code(target, "the module", found.origin or where, lambda: importlib.import_module(where))
    assert isinstance(module, ModuleType)
    return module


def _target_attribute(target: str, module: ModuleType, name: str) -> Callable[[], Any]:
    """The function that a target names in its module."""
    found: Any = module
    file = _file_of(module, module.__name__)
    for part in name.split("."):
        names = _guard_user_code(target, shown(name)[1:-1], file, functools.partial(dir, found))
        if part not in names:
            matches = difflib.get_close_matches(
                part[:100], [n for n in names if not n.startswith("__")], n=1, cutoff=0.5
            )
            hint = f"; did you mean {matches[0]!r}?" if matches else ""
            raise ConfigError(f"TARGET {shown(target)}: {file} has no {shown(name)}{hint}")
        found = _guard_user_code(target, shown(name)[1:-1], file, functools.partial(getattr, found, part))
    if not callable(found):
        raise ConfigError(
            f"TARGET {shown(target)}: expected a function of no arguments, found {type(found).__name__} {shown(name)}"
        )
    factory: Callable[[], Any] = found
    return factory


def _guard_user_code(target: str, what: str, path: str, call: Callable[[], Any]) -> Any:
    """Run the user's code; what it raises becomes one line with its type, message and place in the user's file."""
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        text = " ".join(_text_of(error).split())
        place = _place_of_error(error, path)
        raise ConfigError(f"TARGET {shown(target)}: {what} raised {type(error).__name__}: {text} ({place})") from error


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"<{type(broken).__name__} while formatting it>"


def _file_of(module: ModuleType, otherwise: str) -> str:
    """The file of a module; those that are built in have none."""
    return getattr(module, "__file__", None) or otherwise


def _place_of_error(error: BaseException, path: str) -> str:
    """file:line where the error left the user's file; of a syntax error, where it is."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if os.path.abspath(f.filename) == os.path.abspath(path)
    ]
    return f"{path}:{frames[-1].lineno}" if frames else path


def _model_and_inputs(target: str, name: str, result: Any) -> tuple[nn.Module, Any]:
    """The model and sample inputs that a target's function has returned."""
    from torch import nn

    if isinstance(result, nn.Module):
        return result, None
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module):
        return result
    shape = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
    raise ConfigError(
        f"TARGET {shown(target)}: expected {name} to return (model, sample_inputs) or a model, found {shape}"
    )


FORM = "NAME=DTYPE[d0,d1], for example input_ids=int64[8,512]"
_SYNTAX = re.compile(r"(?P<name>[A-Za-z_]\w{0,199})\s*=\s*(?P<dtype>\w+)\s*\[(?P<shape>[\d\s,]*)\]")
_WHOLE = re.compile(r"[0-9]{1,15}")
_MOST_DIMENSIONS = 16
_COMMON_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One sample input. `dtype` is torch's name without the prefix."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        """A tensor of that shape on the CPU. Raises ConfigError where there is no memory for it."""
        import torch

        make = torch.ones if self.is_mask else torch.zeros
        try:
            return make(self.shape, dtype=getattr(torch, self.dtype))
        except (RuntimeError, MemoryError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"--input {self.name}: torch cannot make it: {shown(reason)}") from None

    def __str__(self) -> str:
        """As `--input` takes it."""
        return f"{self.name}={self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def is_mask(self) -> bool:
        """Whether the values are ones."""
        return self.name.endswith("mask")

    @property
    def num_bytes(self) -> int:
        """The tensor's bytes."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize


def parse_inputs(texts: Sequence[str], microbatches: int = 1) -> tuple[InputSpec, ...]:
    """The specs of all `--input` options, a batch of so many microbatches; ConfigError lists everything that is wrong with any."""
    specs: list[InputSpec] = []
    violations: list[str] = []
    for text in texts:
        try:
            spec = _parsed_input(text)
        except ConfigError as error:
            violations.append(f"--input {shown(text)}: {error}")
            continue
        if spec.name in [other.name for other in specs]:
            violations.append(f"--input {shown(text)}: {spec.name!r} is given twice; keep one")
        specs.append(spec)
    whole = sum(spec.num_bytes for spec in specs)
    sizes = (
        ("inputs", whole, MAX_INPUT_BYTES),
        ("microbatches", whole // max(microbatches, 1), MAX_MICROBATCH_BYTES),
        ("masks", sum(spec.num_bytes for spec in specs if spec.is_mask), MAX_MASK_BYTES),
    )
    violations += [
        f"--input: expected {what} of at most {most} bytes together, found {shown(total)}; plan for a smaller batch"
        for what, total, most in sizes
        if total > most
    ][:1]
    if violations:
        raise ConfigError("\n".join(violations))
    return tuple(specs)


def check_forms(texts: Sequence[str]) -> None:
    """Raise ConfigError for `--input` options that are none by their form, without torch."""
    wrong = [f"--input {shown(text)}: expected {FORM}" for text in texts if _SYNTAX.fullmatch(text.strip()) is None]
    if wrong:
        raise ConfigError("\n".join(wrong))


def check_names(specs: Sequence[InputSpec], model: nn.Module) -> None:
    """Raise ConfigError if the model's forward cannot be called with these inputs by name."""
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        raise ConfigError(
            f"--input: what {type(model).__name__}.forward takes cannot be known; let the factory return (model, sample_inputs)"
        ) from None
    kinds = inspect.Parameter
    known = [p.name for p in parameters.values() if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in parameters.values()) and not _is_transformers(model)
    given = [spec.name for spec in specs]
    violations = []
    for name in given:
        if name not in known and not takes_any:
            hint = _closest_target_name(name, known)
            takes = ", ".join(known) or "no named inputs"
            violations.append(
                f"--input {name}: {type(model).__name__}.forward has no input {name!r}{hint}; it takes {takes}"
            )
    missing = [
        p.name for p in parameters.values() if p.default is kinds.empty and p.name in known and p.name not in given
    ]
    if missing and not violations:
        violations.append(f"--input: {type(model).__name__}.forward also needs {', '.join(missing)}; give {FORM}")
    if violations:
        raise ConfigError("\n".join(violations))


def _parsed_input(text: str) -> InputSpec:
    """An input that `--input` gives by dtype and shape."""
    import torch

    match = _SYNTAX.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"expected {FORM}")
    dtype = getattr(torch, match["dtype"], None)
    if not isinstance(dtype, torch.dtype) or not _can_be_made(dtype):
        hint = _closest_target_name(match["dtype"][:100], _COMMON_DTYPES)
        raise ConfigError(f"unknown dtype {shown(match['dtype'])}{hint}; expected one of {', '.join(_COMMON_DTYPES)}")
    sizes = [size.strip() for size in match["shape"].split(",")] if match["shape"].strip() else []
    if len(sizes) > _MOST_DIMENSIONS:
        raise ConfigError(f"expected at most {_MOST_DIMENSIONS} sizes, found {len(sizes)}")
    if not all(_WHOLE.fullmatch(size) and int(size) > 0 for size in sizes):
        raise ConfigError(f"expected sizes of at least 1 in [{shown(match['shape'])[1:-1]}], as in {FORM}")
    return InputSpec(match["name"], str(dtype).removeprefix("torch."), tuple(int(size) for size in sizes))


def _can_be_made(dtype: torch.dtype) -> bool:
    """Whether there are plain tensors of that dtype; quantized ones need scales, and some of few bits have no operations."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized ones are deprecated
        try:
            return bool(torch.zeros(1, dtype=dtype).dtype is dtype and torch.ones(1, dtype=dtype).dtype is dtype)
        except (RuntimeError, TypeError):
            return False


def _is_transformers(model: nn.Module) -> bool:
    # Its models' **kwargs carry options for attention kernels, never inputs.
    return any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__)


def _closest_target_name(name: str, known: Sequence[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""


# Tried in order for a config without a known architecture; the first task that has the model type wins.
_TASKS = (
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_MAPPING",
)


# Numbers of parts, which Python makes one by one, by the names that configurations have for them.
_LAYERS = re.compile(r"layer|block|depth|stage", re.IGNORECASE)
_MANY = re.compile(r"^n_|^num|_num|count|head|expert|group|label|level|codebook", re.IGNORECASE)
_MOST_LAYERS = 1_024
_MOST_PARTS = 4_194_304
_MOST_MODULES = 200_000
_UNBOUNDED = (float("inf"), float("-inf"))  # ends of intervals, as in `time_step_limit`


def load_config_model(path: Path, *, real: bool = False) -> nn.Module:
    """The model that the file describes, in training mode, on the meta device; ConfigError if the file is no good.

    `real`: on the CPU, with random weights, always the same; ConfigError where there is no memory for it.
    """
    fields = _read_config_json(path)
    _check_sizes(str(path), fields)
    os.environ["HF_HUB_OFFLINE"] = "1"  # some configurations name weights to start from
    try:
        import transformers
    except ImportError:
        raise ConfigError(f"{path}: a Hugging Face config needs transformers: pip install 'smpc[hf]'") from None
    with _silenced_target(transformers):
        _import_models()
        model = _model_of_config(path, fields, transformers, "meta")
        if real:
            check_fits(model, path.name)
            import torch

            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = _model_of_config(path, fields, transformers, "cpu")
        return model


def _import_models() -> None:
    """Import the package of transformers' models without another look through its 3,000 files, of 0.3 s.

    The class index that `import transformers` builds from them is cached by folder; the package looks it up by its file.
    """
    from transformers.utils import import_utils

    name = "create_import_structure_from_path"
    found = getattr(import_utils, name, None)
    if found is None:  # another version
        return
    setattr(import_utils, name, lambda path: found(Path(path).parent if os.path.isfile(path) else path))
    try:
        importlib.import_module("transformers.models")
    finally:
        setattr(import_utils, name, found)


def _model_of_config(path: Path, fields: dict[str, Any], transformers: Any, device: str) -> nn.Module:
    """The model that a Hugging Face model's config.json describes."""
    import torch

    config = _transformers_config(path, fields)
    if "use_cache" in config.to_dict():
        config.use_cache = False
    model_class = _model_class(path, fields, config, transformers)
    try:
        with torch.device(device), _limited_modules():
            model: nn.Module = model_class._from_config(config)
    except Exception as error:
        text = " ".join(str(error).split())
        raise ConfigError(
            f"{printable(str(path))}: {model_class.__name__} raised {type(error).__name__}: {text}"
        ) from error
    return model.train()


def _read_config_json(path: Path) -> dict[str, Any]:
    """The fields of a config.json."""
    fields = parse_json(read_text(path, str(path)), str(path), infinite=True)
    if not isinstance(fields.get("model_type"), str):
        raise ConfigError(f"{printable(str(path))}: no 'model_type': expected the config.json of a Hugging Face model")
    return fields


def _check_sizes(path: str, fields: dict[str, Any]) -> None:
    """Raise ConfigError for numbers that a model would be made of for ever. `read_text` and `parse_json` bound how deep fields nest."""
    for name, value in fields.items():
        layers, many = _LAYERS.search(name), _MANY.search(name)
        most = _MOST_LAYERS if layers else _MOST_PARTS if many else MAX_BYTES
        for item in _leaves_of_target_lists(value):
            if isinstance(item, dict):
                _check_sizes(path, item)
            elif isinstance(item, (int, float)) and not -most <= item <= most and item not in _UNBOUNDED:
                raise ConfigError(f"{printable(path)}: {shown(name)}: expected at most {most}, found {shown(item)}")


def _leaves_of_target_lists(value: Any) -> Iterator[Any]:
    """The leaves of nested lists; the value itself if it is not a list."""
    if isinstance(value, list):
        for item in value:
            yield from _leaves_of_target_lists(item)
    else:
        yield value


@contextlib.contextmanager
def _silenced_target(transformers: Any) -> Iterator[None]:
    """Without what transformers logs and warns of: what is wrong is in the error, the rest is about running the model."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(before)


@contextlib.contextmanager
def _limited_modules() -> Iterator[None]:
    """Raises ValueError when more modules are made than any model has."""
    made = 0

    def count(*_: Any) -> None:
        nonlocal made
        made += 1
        if made > _MOST_MODULES:
            raise ValueError(f"expected a model of at most {_MOST_MODULES} modules, found more")

    from torch.nn.modules.module import register_module_module_registration_hook

    handle = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def _transformers_config(path: Path, fields: dict[str, Any]) -> Any:
    """The configuration object of the fields."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    name = fields["model_type"]
    if name not in CONFIG_MAPPING_NAMES:
        matches = difflib.get_close_matches(name[:100], sorted(CONFIG_MAPPING_NAMES), n=1, cutoff=0.5)
        hint = f"; did you mean {matches[0]!r}?" if matches else ""
        raise ConfigError(f"{printable(str(path))}: transformers knows no model_type {shown(name)}{hint}")
    try:
        return CONFIG_MAPPING[name].from_dict(fields)
    except Exception as error:  # transformers checks fields with errors of several unrelated types
        text = " ".join(str(error).split())
        raise ConfigError(f"{printable(str(path))}: transformers refuses it: {type(error).__name__}: {text}") from error


def _model_class(path: Path, fields: dict[str, Any], config: Any, transformers: Any) -> Any:
    from transformers.models.auto import modeling_auto

    architectures = fields.get("architectures") or []
    for name in architectures[:1] if isinstance(architectures, list) else []:
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    tasks = ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", *_TASKS) if config.is_encoder_decoder else _TASKS
    for task in tasks:
        mapping = getattr(modeling_auto, task)
        if type(config) in mapping:
            classes = mapping[type(config)]
            return classes[0] if isinstance(classes, tuple) else classes
    raise ConfigError(
        f"{printable(str(path))}: transformers has no model class for architectures {shown(architectures)} "
        f"or model_type {shown(fields['model_type'])}"
    )
