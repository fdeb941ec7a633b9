"""The pages of the reference: one for each public module, made of its docstrings by mkdocstrings."""

from __future__ import annotations

MODULES = {
    "smpc": "plans, compilations, runtimes, callbacks",
    "smpc.v1": "training scripts",
    "smpc.v1.nn": "distributed layers",
    "smpc.v1.amp": "loss scaling",
    "smpc.v1.optimizers": "optimizers that scripts take by these names",
    "smpc.v2": "scripts for SMP v2",
    "smpc.composer": "the Trainer",
    "smpc.integrations.huggingface": "Hugging Face's Trainer",
    "smpc.integrations.accelerate": "accelerate",
    "smpc.integrations.lightning": "Lightning",
    "smpc.dist": "ranks and collectives",
    "smpc.fsdp": "FSDP and ZeRO configurations",
    "smpc.checkpoint": "checkpoints of any training loop",
    "smpc.tensor_parallel": "tensor parallelism over a group",
    "smpc.context_parallel": "context parallelism over a group",
    "smpc.expert_parallel": "expert parallelism over a group",
    "smpc.experts": "parts of expert parallelism",
    "smpc.nn": "layers in one process",
    "smpc.optimizers": "fused optimizers",
    "smpc.kernels.attention": "attention",
    "smpc.kernels.layer_norm": "layer norm",
    "smpc.kernels.rms_norm": "RMS norm",
    "smpc.kernels.activations": "activations",
    "smpc.kernels.bias_dropout_add": "bias, dropout and residual",
    "smpc.kernels.rotary": "rotary positions",
    "smpc.kernels.cross_entropy": "cross entropy",
    "smpc.kernels.linear_cross_entropy": "linear layer and cross entropy",
    "smpc.kernels.vocab_parallel_cross_entropy": "cross entropy over slices of a vocabulary",
    "smpc.partitioner": "the planner by itself",
    "smpc.tracer": "recording a model",
    "smpc.config": "configurations",
    "smpc.errors": "all errors",
}


def navigation() -> list[tuple[str, str]]:
    """Title and path of every page, the index first."""
    return [("Modules", "api/index.md"), *((name, _path(name)) for name in MODULES)]


def pages() -> dict[str, str]:
    """The text of every page, by its path."""
    rows = "\n".join(f"| [{name}]({name}.md) | {what} |" for name, what in MODULES.items())
    found = {"api/index.md": f"# Python\n\n| module | |\n| --- | --- |\n{rows}\n"}
    for name in MODULES:
        found[_path(name)] = f"# {name}\n\n::: {name}\n"
    return found


def _path(name: str) -> str:
    return f"api/{name}.md"
