"""The command line: `smpc compile`, `smpc simulate`, `smpc diff`, `smpc run`,
`smpc env`, `smpc checkpoint`."""

from smpc.cli.app import main

__all__ = ["main"]
