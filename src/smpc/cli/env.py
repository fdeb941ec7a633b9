"""`smpc env`: the versions and devices that a bug report needs."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import typer

_PACKAGES = ("smpc", "torch", "transformers", "triton", "numpy", "networkx", "pulp", "highspy", "safetensors")


def env_command() -> None:
    """Print versions, devices and backends."""
    rows = list(_environment_rows())
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"{name:<{width}}  {value}")


def _environment_rows() -> Iterator[tuple[str, str]]:
    """What `smpc env` shows, row by row."""
    for package in _PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, "not installed"
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "platform", platform.platform()
    yield "cpus", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"
    import torch
    from torch import distributed

    yield "cuda", torch.version.cuda or "none (torch was built without it)"
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield "devices", ", ".join(devices) or "none (ranks run on the CPU)"
    backends = {"gloo": distributed.is_gloo_available(), "nccl": distributed.is_nccl_available()}
    yield "backends", ", ".join(name for name, available in backends.items() if available) or "none"
    import pulp

    yield "solvers", ", ".join(pulp.listSolvers(onlyAvailable=True)) or "none"
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        yield name, os.environ.get(name, "not set")
