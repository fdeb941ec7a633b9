"""Turns a plan into programs: stage code, schedules, instructions, proof."""

if not __name__.startswith("smpc."):
    raise ImportError(
        f"import smpc.codegen, not {__name__}: the folders at the top of the repository are parts of smpc"
    )
