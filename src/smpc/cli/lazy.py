"""The subcommands, each imported when it is called: `smpc --help` and a wrong name answer without torch.

`COMMANDS` has of each the module, the function or application there, its line in the list, and how it parses.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

# Arguments after the script of `run` belong to the script, also `--help`.
COMMANDS: Mapping[str, tuple[str, str, str, Mapping[str, Any]]] = {
    "compile": ("compile", "compile_command", "Split a model into pipeline stages and report what each will cost.", {}),
    "simulate": (
        "plans",
        "simulate_command",
        "Predict step time, bubble and memory of a plan under another schedule.",
        {},
    ),
    "diff": (
        "plans",
        "diff_command",
        "Show what changed between two plans: modules, memory, time, messages, objective, schedule.",
        {},
    ),
    "calibrate": (
        "calibrate",
        "calibrate_command",
        "Measure this machine, and describe it in a file that --device takes.",
        {},
    ),
    "solve": (
        "solve",
        "solve_command",
        "Place the nodes of a graph on devices, so that the largest load is smallest, with a proven bound.",
        {},
    ),
    "run": ("run", "run_command", "Start a script on N ranks of this host.", {"allow_interspersed_args": False}),
    "env": ("env", "env_command", "Print versions, devices and backends.", {}),
    "checkpoint": (
        "checkpoint",
        "checkpoint_app",
        "Look at checkpoints, verify them, convert them between forms, and remove old ones.",
        {},
    ),
}


class LazyGroup(TyperGroup):
    """The commands by name: their lines for a list of them, and themselves for a call."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The text of a command in the list of commands."""
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name][2]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is called, and its arguments."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, load(name) if name is not None and name in COMMANDS else command, rest


def load(name: str) -> Any:
    """A command with its options."""
    module, attribute, _, settings = COMMANDS[name]
    found = getattr(importlib.import_module(f"smpc.cli.{module}"), attribute)
    if not isinstance(found, typer.Typer):
        application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        application.command(name, context_settings=dict(settings))(found)
        found = application
    command = typer.main.get_command(found)
    command.name = name
    return command
