"""Runs programs: the interpreter and its transports."""

if not __name__.startswith("smpc."):
    raise ImportError(f"import smpc.executor, not {__name__}: the folders at the top of the repository are parts of smpc")
