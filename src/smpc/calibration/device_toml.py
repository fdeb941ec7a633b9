"""Writes what a calibration found as the file that `--device` takes.

The file has the keys of `smpc.partitioner.costs.device`, and numbers with four digits. `calibrate_to` calibrates and writes it: every rank
runs this.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from smpc.calibration.measure_device import calibrate
from smpc.calibration.ranks import Ranks
from smpc.errors import ConfigError
from smpc.partitioner.costs.device import Curve, Device, Wire


def to_toml(device: Device, source: str) -> str:
    """The text of the file."""
    return "\n".join(_toml_lines(device, source)) + "\n"


def _toml_lines(device: Device, source: str) -> Iterator[str]:
    """The lines of the file of a device."""
    yield f"name = {json.dumps(device.name, ensure_ascii=False)}"
    yield f"memory_bandwidth = {_toml_number(device.memory_bandwidth)}"
    yield f"memory = {device.memory_bytes}"
    yield f'transport = "{device.transport}"'
    yield f"source = {json.dumps(source, ensure_ascii=False)}"
    yield from ("", "[peak_flops]", *(f"{name} = {_toml_number(peak)}" for name, peak in device.peak_flops.items()))
    yield from ("", "[inside_host]", f"devices = {device.devices_per_host}", *_toml_wire(device.inside_host))
    yield from ("", "[between_hosts]", *_toml_wire(device.between_hosts))
    yield from ("", "[host]", *_toml_wire(device.host))
    if device.collectives:
        yield from (
            "",
            "[collectives]",
            *(f"{kind} = {_toml_curve(curve)}" for kind, curve in device.collectives.items()),
        )
    kernels = device.kernels
    yield from ("", "[kernels]", f"launch = {_toml_number(kernels.launch)}", f"view = {_toml_number(kernels.view)}")
    program = {name: getattr(kernels, name) for name in ("action", "step", "unit", "unit_step")}
    yield from (f"{name} = {_toml_number(seconds)}" for name, seconds in program.items() if seconds)
    yield f"optimizer = {_toml_number(kernels.optimizer)}"
    yield f"memory = {_toml_curve(kernels.memory)}"
    yield f"attention = [{', '.join(map(_toml_number, kernels.attention))}]"
    yield from ("", "[kernels.products]", *(f"{key} = {_toml_curve(curve)}" for key, curve in kernels.products.items()))
    if kernels.deferred:
        yield from (
            "",
            "[kernels.deferred]",
            *(f"{name} = {_toml_curve(curve)}" for name, curve in kernels.deferred.items()),
        )
    if kernels.views:
        yield from ("", "[kernels.views]")
        yield from (
            f"{json.dumps(name)} = [{_toml_number(forward)}, {_toml_number(backward)}]"
            for name, (forward, backward) in kernels.views.items()
        )
    for name, (forward, backward) in kernels.operations.items():
        yield from ("", f"[kernels.operations.{json.dumps(name)}]")
        yield from (f"forward = {_toml_curve(forward)}", f"backward = {_toml_curve(backward)}")


def _toml_wire(wire: Wire) -> Iterator[str]:
    """The lines of a wire in the file."""
    yield f"bandwidth = {_toml_number(wire.bandwidth)}"
    yield f"latency = {_toml_number(wire.latency)}"
    if wire.efficiency != 1.0:
        yield f"efficiency = {_toml_number(wire.efficiency)}"
    if wire.hop:
        yield f"hop = {_toml_number(wire.hop)}"


def _toml_curve(curve: Curve) -> str:
    return f"[{', '.join(f'[{_toml_number(size)}, {_toml_number(share)}]' for size, share in curve)}]"


def _toml_number(value: float) -> str:
    """Four digits, as TOML writes a fraction."""
    text = f"{value:.4g}"
    return text if any(sign in text for sign in ".e") else f"{text}.0"


def calibrate_to(path: str, seconds: float, show: Callable[..., None] = lambda *_: None) -> None:
    """Measure this machine in about so many seconds; rank 0 writes the file and says so. ConfigError where it cannot be written."""
    ranks = Ranks.here()
    device = calibrate(ranks, seconds, show)
    if ranks.rank == 0:
        text = to_toml(device, _toml_source(ranks))
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--out {path!r}: cannot write it: {error.strerror}") from error
    ranks.end()


def _toml_source(ranks: Ranks) -> str:
    """What the file says of how it was measured."""
    day = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    at_once = "one process" if ranks.size == 1 else f"{ranks.size} processes at once"
    threads = torch.get_num_threads()
    return f"smpc calibrate, {day}: torch {torch.__version__}, {at_once}, {threads} thread{'s' * (threads > 1)} each"
