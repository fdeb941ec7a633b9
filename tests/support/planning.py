"""Compilations of traces that are recorded already."""

from smpc.compile import plan_trace, rewrite_trace, write_programs


def compile_trace(trace, options, like=None):
    """All passes after the recording; with `like`, every module stays on the stage that it has there."""
    return write_programs(plan_trace(rewrite_trace(trace, options), options, like=like))
