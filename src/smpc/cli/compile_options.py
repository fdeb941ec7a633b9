"""The options of `smpc compile`: the planner's, as `CompilationKeys` declares them, and the command's own, one name each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import typer

from smpc.compile.keys import CompilationKeys
from smpc.config import KEYS
from smpc.config.key import Flag, Key, keys_of

F = TypeVar("F", bound=Callable[..., Any])
FLAGS: dict[str, tuple[Key, Flag]] = {
    field.name: (known, known.flag) for field, known in keys_of(CompilationKeys) if known.flag is not None
}
_DEFAULTS = {field.name: field.default for field, _ in keys_of(CompilationKeys)}
_TYPES = {field.name: str(field.type) for field, _ in keys_of(CompilationKeys)}


def takes_flags(command: F) -> F:
    """Gives a command, whose `**flags` are the planner's options, the signature that typer reads."""
    kinds = inspect.Parameter
    shown = inspect.signature(command, eval_str=True)
    target, *own = (p for p in shown.parameters.values() if p.kind is not kinds.VAR_KEYWORD)
    found = [
        kinds(name, kinds.KEYWORD_ONLY, default=_unset_compile_option(name), annotation=_compile_option(name))
        for name in FLAGS
    ]
    vars(command)["__signature__"] = inspect.Signature([target, *found, *own])
    command.__annotations__ = {p.name: p.annotation for p in (target, *found, *own)}
    return command


def given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that the user has set, in the order in which they are declared."""
    return {name: flags[name] for name in FLAGS if flags[name] not in (None, [], _unset_compile_option(name))}


def is_setting(name: str) -> bool:
    """Whether the rules between settings of a script apply to an option."""
    return name in KEYS and not FLAGS[name][1].is_apart


def _compile_option(name: str) -> Any:
    """The type that typer shows and parses."""
    _, flag = FLAGS[name]
    kind: Any = next((kind for kind in (bool, int, float) if _TYPES[name].startswith(kind.__name__)), str)
    long = f"--{name.replace('_', '-')}"
    names = [flag.short, long] if flag.short else [long]
    shape = kind if kind is bool or flag.shows_default else list[str] | None if flag.repeatable else kind | None
    return Annotated[shape, typer.Option(*names, metavar=flag.metavar or None, help=flag.help)]


def _unset_compile_option(name: str) -> Any:
    """The value for an option that the user does not give: the default if the help shows it."""
    return _DEFAULTS[name] if FLAGS[name][1].shows_default or _TYPES[name] == "bool" else None


Target = Annotated[
    str,
    typer.Argument(
        help="module:factory or file.py:factory, which returns (model, sample_inputs) or a model; "
        "or a Hugging Face config.json.",
        show_default=False,
    ),
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="Run a microbatch in plain PyTorch and by the programs, and compare; exit status 1 if they differ. The model gets values. "
        "With -t, -c or -e: a step on so many ranks of this machine.",
    ),
]
Auto = Annotated[
    bool,
    typer.Option(
        "--auto", help="Search for the fastest way to train on --world-size ranks; the inputs are the global batch."
    ),
]
WorldSize = Annotated[int | None, typer.Option(metavar="N", help="Ranks in all, with --auto.")]
Effort = Annotated[
    float | None,
    typer.Option(
        metavar="X", help="With --auto, how long to search: 10 is ten times as long as by default, inf to the end."
    ),
]
Config = Annotated[
    str | None, typer.Option(metavar="FILE", help="Settings, .json or .toml; options given here win over it.")
]
Inputs = Annotated[
    list[str] | None,
    typer.Option("--input", metavar="NAME=DTYPE[d0,d1]", help="A sample input by shape, the whole batch. Repeatable."),
]
JsonOnly = Annotated[bool, typer.Option("--json", help="Print the plan as JSON and nothing else.")]
Out = Annotated[str | None, typer.Option(metavar="DIR", help="Write the plan, its report and the programs there.")]
Plot = Annotated[
    str | None, typer.Option(metavar="FILE.png", help="Draw the step and its memory there; needs matplotlib.")
]
