"""Every name that users import, with its signature, and every option of the command line, as one text.

    python tests/support/public_names.py --record       writes tests/golden/names.txt again

Annotations and defaults are printed by the last part of their names, so that moving a class inside smpc changes nothing here. Of a class
the members are listed that it has from smpc, by whichever of its bases; bases that are not public are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

GOLDEN = Path(__file__).parents[1] / "golden" / "names.txt"
FAMILIES = ("bert", "gpt2", "gptj", "gptneo", "gptneox", "roberta", "t5", "vit")
# What the documentation and the SMP API name as paths to import from. Where a module has no __all__: its own public names.
MODULES = (
    "smpc", "smpc.errors", "smpc.config", "smpc.checkpoint", "smpc.nn", "smpc.nn.parallel",
    "smpc.optimizers", "smpc.context_parallel", "smpc.tensor_parallel", "smpc.tracer", "smpc.partitioner",
    "smpc.kernels.activations", "smpc.kernels.attention", "smpc.kernels.bias_dropout_add", "smpc.kernels.cross_entropy",
    "smpc.kernels.layer_norm", "smpc.kernels.linear_cross_entropy", "smpc.kernels.rms_norm", "smpc.kernels.rotary",
    "smpc.kernels.vocab_parallel_cross_entropy",
    "smpc.v1", "smpc.v1.amp", "smpc.v1.model", "smpc.v1.nn", "smpc.v1.nn.huggingface",
    *(f"smpc.v1.nn.huggingface.{family}" for family in FAMILIES),
    "smpc.v1.optimizers", "smpc.v1.patches", "smpc.v1.patches.checkpoint",
    "smpc.v1.state_mod", "smpc.v1.utils",
    "smpc.v2",
    "smpc.v2.checkpoint.constants",
    "smpc.v2.checkpoint.utils",
    "smpc.v2.context_parallel.utils",
    "smpc.v2.delayed_param",
    "smpc.v2.distributed.checkpoint.async_utils",
    "smpc.v2.distributed.checkpoint.filesystem",
    "smpc.v2.distributed.checkpoint.s3_filesystem",
    "smpc.v2.distributed.checkpoint.state_dict_loader",
    "smpc.v2.distributed.checkpoint.state_dict_saver",
    "smpc.v2.distributed.checkpoint.state_dict_utils",
    "smpc.v2.grad_norm",
    "smpc.v2.logger",
    "smpc.v2.moe.moe_config",
    "smpc.v2.nn.attn",
    "smpc.v2.nn.huggingface.llama_flashattn",
    "smpc.v2.state_handler",
    "smpc.dist",
    "smpc.fsdp",
    "smpc.composer",
    "smpc.v2.tensor_parallel.transformer",
    "smpc.v2.utils.module_utils",
    "smpc.v2.utils.process_group_utils",
    "smpc.v2.utils.utils",
)  # fmt: skip
HEADER = """\
# Public names, signatures and command-line options: tests/behaviour/test_public_names.py. A change here is a change of the interface.
# Write this file again, deliberately: python tests/support/public_names.py --record
# The command line as typer {version} describes it
"""
_PROTOCOLS = ("__call__", "__contains__", "__enter__", "__exit__", "__getattr__", "__getitem__", "__iter__", "__len__")
_WIDTH = 120


def describe() -> str:
    """The whole text."""
    header = HEADER.format(version=importlib.metadata.version("typer"))
    return header + "".join(f"{line}\n" for line in (*_all_modules(), *_command_line()))


def parts(text: str) -> tuple[str, str, str]:
    """A whole text as header, names and command line."""
    header, blank, rest = text.partition("\n\n")
    names, command, commands = rest.partition("\n$ ")
    return header, blank + names, command + commands


def names_of(module: ModuleType) -> list[str]:
    """The public names of a module."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return sorted(n for n, v in vars(module).items() if n[0] != "_" and getattr(v, "__module__", "") == module.__name__)


def _all_modules() -> Iterator[str]:
    modules = [importlib.import_module(name) for name in MODULES]
    listed = [(module, name, getattr(module, name)) for module in modules for name in names_of(module)]
    public = {id(value) for _, _, value in listed if inspect.isclass(value)}
    seen: dict[int, str] = {}
    for module in modules:
        yield f"\n{module.__name__}"
        for owner, name, value in listed:
            if owner is not module:
                continue
            known = seen.get(id(value))
            if known is not None and (inspect.isclass(value) or inspect.isroutine(value)):
                yield f"    {name}: {known}"  # described above
                continue
            seen[id(value)] = f"{module.__name__}.{name}"
            yield from (f"    {line}" for line in _described(name, value, public))


def _described(name: str, value: Any, public: set[int]) -> Iterator[str]:
    if inspect.ismodule(value):
        yield f"{name}: module"
    elif inspect.isclass(value):
        yield from _class(name, value, public)
    elif inspect.isroutine(value):
        yield from _function(f"def {name}", value)
    elif _is_own(type(value)) and not isinstance(value, enum.Enum):
        yield f"{name}: {type(value).__name__}"
        yield from (f"    {line}" for line in _members(type(value)))
    else:
        yield f"{name}: {type(value).__name__}" + (f" = {shown(value)}" if name != "__version__" else "")


def _class(name: str, cls: type, public: set[int]) -> Iterator[str]:
    bases = [b.__name__ for b in cls.__mro__[1:-1] if id(b) in public or not _is_own(b)]
    yield f"class {name}" + (f" of {', '.join(bases)}" if bases else "")
    if issubclass(cls, enum.Enum):
        yield from (f"    {member.name} = {shown(member.value)}" for member in cls)
    elif any(_is_own(base) and "__init__" in vars(base) for base in cls.__mro__):
        yield from (f"    {line}" for line in _function("def __init__", cls))
    yield from (f"    {line}" for line in _members(cls))


def _members(cls: type) -> Iterator[str]:
    """Methods, properties and other attributes that a class has from smpc."""
    found: dict[str, Any] = {}
    annotated: dict[str, Any] = {}
    for base in reversed([base for base in cls.__mro__ if _is_own(base)]):
        found |= {n: v for n, v in vars(base).items() if n[0] != "_" or n in _PROTOCOLS}
        annotated |= {n: v for n, v in inspect.get_annotations(base).items() if n[0] != "_"}
    fields = {f.name for f in dataclasses.fields(cls) if f.init} if dataclasses.is_dataclass(cls) else set()
    members = set(cls.__members__) if issubclass(cls, enum.Enum) else set()
    for name in sorted((found.keys() | annotated.keys()) - fields - members):
        yield from _member(name, found.get(name), annotated.get(name))


def _member(name: str, value: Any, annotation: Any) -> Iterator[str]:
    if isinstance(value, (staticmethod, classmethod)):
        yield from _function(f"{type(value).__name__} {name}", value.__func__)
    elif isinstance(value, property) or hasattr(value, "func"):  # cached_property has its function in `func`
        getter = value.fget if isinstance(value, property) else value.func
        settable = isinstance(value, property) and value.fset is not None
        yield f"{name}: {short(inspect.signature(getter).return_annotation)}, {'settable ' if settable else ''}property"
    elif inspect.isroutine(value):
        yield from _function(f"def {name}", value)
    elif annotation is not None:
        yield f"{name}: {short(annotation)}"
    elif not inspect.ismemberdescriptor(value):
        yield f"{name} = {shown(value)}"
    else:
        yield f"{name}: attribute"


def _function(head: str, function: Any) -> Iterator[str]:
    """On one line where that is short enough, else a line for each parameter."""
    signature = inspect.signature(function)
    parts = list(_parameters(signature))
    end = (
        ")" if signature.return_annotation is inspect.Signature.empty else f") -> {short(signature.return_annotation)}"
    )
    line = f"{head}({', '.join(parts)}{end}"
    if len(line) <= _WIDTH:
        yield line
        return
    yield f"{head}("
    yield from (f"    {part}," for part in parts)
    yield end


def _parameters(signature: inspect.Signature) -> Iterator[str]:
    kinds = inspect.Parameter
    parameters = list(signature.parameters.values())
    stars = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}
    for before, parameter in zip([None, *parameters], parameters, strict=False):
        earlier = None if before is None else before.kind
        if earlier is kinds.POSITIONAL_ONLY and parameter.kind is not earlier:
            yield "/"
        if parameter.kind is kinds.KEYWORD_ONLY and earlier not in (kinds.KEYWORD_ONLY, kinds.VAR_POSITIONAL):
            yield "*"
        text = stars.get(parameter.kind, "") + parameter.name
        if parameter.annotation is not kinds.empty:
            text += f": {short(parameter.annotation)}"
        yield text if parameter.default is kinds.empty else f"{text} = {shown(parameter.default)}"
    if parameters and parameters[-1].kind is kinds.POSITIONAL_ONLY:
        yield "/"


def short(annotation: Any) -> str:
    """An annotation without the modules of its names."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])", "", text)


def shown(value: Any) -> str:
    """A default, without modules and addresses."""
    if inspect.isclass(value) or inspect.isroutine(value):
        return str(value.__name__)
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, (list, tuple, dict, frozenset)) and not value:
        return repr(value)
    if value is None or isinstance(value, (str, int, float, list, tuple)):
        return repr(value)
    return f"<{type(value).__name__}>"


def _is_own(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "smpc"


def _command_line() -> Iterator[str]:
    import typer.main

    from smpc.cli.app import app
    from smpc.cli.lazy import COMMANDS, load

    group: Any = typer.main.get_command(app)
    group.commands = {name: load(name) for name in COMMANDS}
    yield from _command("smpc", group)


def _command(path: str, command: Any) -> Iterator[str]:
    """A command with its arguments and options in their order, and its subcommands."""
    yield f"\n$ {path}"
    yield from (f"    | {line}".rstrip() for line in inspect.cleandoc(command.help or "").splitlines())
    for parameter in command.params:
        names = ", ".join((*parameter.opts, *parameter.secondary_opts))
        facts = ["argument" if "Argument" in type(parameter).__name__ else "option", _type_of(parameter)]
        facts += [word for word, said in _flags(parameter) if said]
        if isinstance(parameter.default, (str, int, float, bool, list, tuple)):
            facts.append(f"default {shown(parameter.default)}")
        yield f"    {names}: {', '.join(facts)}"
        yield f"        {getattr(parameter, 'help', None) or ''}".rstrip()
    for name in sorted(getattr(command, "commands", {})):
        yield from _command(f"{path} {name}", command.commands[name])


def _type_of(parameter: Any) -> str:
    """The type of a value; typer before 0.29 has click's name for it."""
    descriptor = getattr(parameter, "type_descriptor", None)
    return str(parameter.type.name) if descriptor is None else short(descriptor.annotation)


def _flags(parameter: Any) -> list[tuple[str, bool]]:
    return [
        (f"shown as {parameter.metavar}", bool(parameter.metavar)),
        ("required", bool(parameter.required)),
        ("repeatable", bool(getattr(parameter, "multiple", False))),
        ("several values", parameter.nargs != 1),
        ("hidden", bool(getattr(parameter, "hidden", False))),
    ]


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the text again, instead of printing it")
    if parser.parse_args().record:
        GOLDEN.write_text(describe(), encoding="utf-8")
    else:
        print(describe(), end="")


if __name__ == "__main__":
    main()
