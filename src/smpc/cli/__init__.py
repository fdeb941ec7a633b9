"""The command line: `smpc compile`, `smpc simulate`, `smpc diff`, `smpc run`, `smpc env`."""

from smpc.cli.app import main

__all__ = ["main"]
