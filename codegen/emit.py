"""A rank's program as one Python file that a person can read, import and step through.

The stage classes in the file are, to the letter, the code that the executor runs; INSTRUCTIONS is the program it walks.
"""

from __future__ import annotations

from smpc.codegen.printer import in_text, uses_tensor_ops
from smpc.codegen.program import Channel, RankProgram
from smpc.tracer.targets import TENSOR_OPS

_HEADER = '''"""Rank {rank} of {num_ranks}: {schedule} schedule, {num_microbatches} microbatches.

Written by smpc from plan {fingerprint}. To step through it:

    from smpc.codegen.stage import build_stage   # gives a stage the parameters of your model

{channels}
"""

import importlib

import torch
import torch.nn.functional as F

{tensor_ops}from smpc.codegen.stage import StageModule
from smpc.tracer.targets import function

'''


def emit_rank(program: RankProgram) -> str:
    """The file's text; the same program gives the same bytes."""
    indices = [stage.index for stage in program.stages]
    channels = [c for c in program.channels if c.source in indices or c.destination in indices]
    package, _, tensor_ops = TENSOR_OPS.rpartition(".")
    parallel = any(uses_tensor_ops(stage.source) for stage in program.stages)
    header = _HEADER.format(
        tensor_ops=f"from {package} import {tensor_ops}\n" if parallel else "",
        rank=program.rank,
        num_ranks=program.num_ranks,
        schedule=in_text(program.schedule),
        num_microbatches=program.num_microbatches,
        fingerprint=program.fingerprint,
        channels="\n".join(describe_channel(channel) for channel in channels) or "No edges.",
    )
    classes = "\n\n".join(stage.source for stage in program.stages)
    stages = ", ".join(f"{stage.index}: {stage.class_name}" for stage in program.stages)
    instructions = "".join(f'    "{instruction}",\n' for instruction in program.instructions)
    return f"{header}\n{classes}\n\nSTAGES = {{{stages}}}\n\nINSTRUCTIONS = (\n{instructions})\n"


def describe_channel(channel: Channel) -> str:
    """One line: `edge 1: stage 0 (rank 0) -> stage 1 (rank 1): h_3 float32[4,128,256]`."""
    source = "model inputs" if channel.source < 0 else f"stage {channel.source}"
    values = ", ".join(f"{name} {spec}" for name, spec in zip(channel.values, channel.specs, strict=True))
    return in_text(
        f"edge {channel.index}: {source} (rank {channel.source_rank}) -> "
        f"stage {channel.destination} (rank {channel.destination_rank}): {values}"
    )
