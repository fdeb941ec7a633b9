"""A device as the file that `--device` takes: the keys of `smpc.partitioner.costs.device`, numbers with four digits."""

from __future__ import annotations

import json
from collections.abc import Iterator

from smpc.partitioner.costs.description import Curve, Device, Wire


def to_toml(device: Device, source: str) -> str:
    """The text of the file."""
    return "\n".join(_lines(device, source)) + "\n"


def _lines(device: Device, source: str) -> Iterator[str]:
    yield f"name = {json.dumps(device.name, ensure_ascii=False)}"
    yield f"memory_bandwidth = {_number(device.memory_bandwidth)}"
    yield f"memory = {device.memory_bytes}"
    yield f'transport = "{device.transport}"'
    yield f"source = {json.dumps(source, ensure_ascii=False)}"
    yield from ("", "[peak_flops]", *(f"{name} = {_number(peak)}" for name, peak in device.peak_flops.items()))
    yield from ("", "[inside_host]", f"devices = {device.devices_per_host}", *_wire(device.inside_host))
    yield from ("", "[between_hosts]", *_wire(device.between_hosts))
    yield from ("", "[host]", *_wire(device.host))
    if device.collectives:
        yield from ("", "[collectives]", *(f"{kind} = {_curve(curve)}" for kind, curve in device.collectives.items()))
    kernels = device.kernels
    yield from ("", "[kernels]", f"launch = {_number(kernels.launch)}", f"view = {_number(kernels.view)}")
    program = {name: getattr(kernels, name) for name in ("action", "step", "unit", "unit_step")}
    yield from (f"{name} = {_number(seconds)}" for name, seconds in program.items() if seconds)
    yield f"optimizer = {_number(kernels.optimizer)}"
    yield f"memory = {_curve(kernels.memory)}"
    yield f"attention = [{', '.join(map(_number, kernels.attention))}]"
    yield from ("", "[kernels.products]", *(f"{key} = {_curve(curve)}" for key, curve in kernels.products.items()))
    if kernels.deferred:
        yield from (
            "",
            "[kernels.deferred]",
            *(f"{name} = {_curve(curve)}" for name, curve in kernels.deferred.items()),
        )
    if kernels.views:
        yield from ("", "[kernels.views]")
        yield from (
            f"{json.dumps(name)} = [{_number(forward)}, {_number(backward)}]"
            for name, (forward, backward) in kernels.views.items()
        )
    for name, (forward, backward) in kernels.operations.items():
        yield from ("", f"[kernels.operations.{json.dumps(name)}]")
        yield from (f"forward = {_curve(forward)}", f"backward = {_curve(backward)}")


def _wire(wire: Wire) -> Iterator[str]:
    yield f"bandwidth = {_number(wire.bandwidth)}"
    yield f"latency = {_number(wire.latency)}"
    if wire.efficiency != 1.0:
        yield f"efficiency = {_number(wire.efficiency)}"
    if wire.hop:
        yield f"hop = {_number(wire.hop)}"


def _curve(curve: Curve) -> str:
    return f"[{', '.join(f'[{_number(size)}, {_number(share)}]' for size, share in curve)}]"


def _number(value: float) -> str:
    """Four digits, as TOML writes a fraction."""
    text = f"{value:.4g}"
    return text if any(sign in text for sign in ".e") else f"{text}.0"
