"""All measurements, put together as a device: see `smpc.calibration`.

Writes what a calibration found as the file that `--device` takes.

The file has the keys of `smpc.partitioner.costs.device`, and numbers with four digits. `calibrate_to` calibrates and writes it: every rank
runs this.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from smpc.calibration.communication import Wires, assumed, measure_host, measure_wires
from smpc.calibration.measuring_processes import CalibrationRanks
from smpc.calibration.operations import Rates, measure, rates, repeated, views
from smpc.calibration.programs import measure_programs
from smpc.errors import ConfigError
from smpc.partitioner.costs.device import ALL, NONE, Curve, Device, Kernels, Wire

_MEASURED = 0.65  # of the time is for operations
_PROGRAMS = 0.15  # and that part for what programs do beside them
_SIDE = 512  # of the products that dtypes are compared by
_LEAST = 1e-6  # share that a device file may have
_PLAIN = ("add", "mul", "contiguous")  # operations that do nothing but move bytes
_STATE = 28  # bytes that AdamW reads and writes for each float32 element: parameter and two moments both ways, gradient
_OPTIMIZED = 1 << 21  # elements


def calibrate(ranks: CalibrationRanks, seconds: float = 60.0, show: Callable[..., None] = lambda *_: None) -> Device:
    """This machine as a device, measured in about so many seconds. Collective over the ranks; the same on each."""
    dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
    samples = measure(ranks, _MEASURED * seconds, dtype, show)
    found, unmoved = rates(samples), views(samples)
    show("Timing programs, other dtypes, the optimizer and messages")
    wires = measure_wires(ranks) if ranks.size > 1 else Wires(None, None, {})
    programs = measure_programs(ranks, dtype, _PROGRAMS * seconds, wires)
    bandwidth = max(rate for name in _PLAIN if name in found for _, rate in found[name].forward)
    peaks = _peak_flops(
        ranks, dtype, max(rate for item in found.values() if item.is_product for _, rate in item.forward)
    )
    name = str(dtype).removeprefix("torch.")
    kernels = Kernels(
        launch=_launch_seconds(ranks),
        products=MappingProxyType(
            {name: _measured_shares(found["linear"].forward, peaks[name])} if "linear" in found else {}
        ),
        memory=_measured_shares(found["add"].forward, bandwidth) if "add" in found else ALL,
        attention=_measured_attention(found, peaks[name]),
        operations=MappingProxyType(
            {
                key: (_measured_curve_shares(item.forward, top), _measured_curve_shares(item.backward, top))
                for key, item in found.items()
                for top in (peaks[name] if item.is_product else bandwidth,)
            }
        ),
        view=_view_seconds(ranks),
        views=MappingProxyType(unmoved),
        action=programs.action,
        step=programs.step,
        unit=programs.unit,
        unit_step=programs.unit_step,
        deferred=MappingProxyType(dict(programs.deferred)),
        optimizer=_optimizer_share(ranks, bandwidth),
    )
    inside = wires.inside or wires.between or assumed(bandwidth)
    return Device(
        _measured_device_name(ranks.device),
        MappingProxyType(peaks),
        bandwidth,
        _memory_bytes(ranks),
        max(ranks.per_host, torch.cuda.device_count() if ranks.device.type == "cuda" else 1),
        inside,
        wires.between or inside,
        transport="nccl" if ranks.device.type == "cuda" else "gloo",
        kernels=kernels,
        collectives=MappingProxyType(dict(wires.collectives)),
        host=measure_host(ranks),
    )


def _measured_shares(curve: Curve, top: float) -> Curve:
    return tuple((size, min(1.0, max(_LEAST, rate / top))) for size, rate in curve)


def _measured_curve_shares(curve: Curve, top: float) -> Curve:
    return tuple((size, min(1e6, max(1e-12, rate / top))) for size, rate in curve)


def _measured_attention(found: Mapping[str, Rates], peak: float) -> tuple[float, float]:
    """Shares of large ones."""
    if "attention" not in found:
        return 1.0, 1.0
    item = found["attention"]
    forward, backward = (_measured_shares(curve, peak)[-1][1] for curve in (item.forward, item.backward))
    return forward, backward


def _mean_measure_of_ranks(ranks: CalibrationRanks, value: float) -> float:
    """The mean over the ranks."""
    return ranks.mean([value])[0]


def _peak_flops(ranks: CalibrationRanks, base: torch.dtype, peak: float) -> dict[str, float]:
    """FLOP/s by dtype: the peak in the probes' dtype; others by the time of one product in both dtypes."""
    dtypes = dict.fromkeys((base, torch.float32, torch.bfloat16, torch.float16, torch.float64))
    times = {str(dtype).removeprefix("torch."): _product_seconds(ranks, dtype) for dtype in dtypes}
    own = times[str(base).removeprefix("torch.")]
    return {name: peak * own / seconds for name, seconds in times.items()}


def _launch_seconds(ranks: CalibrationRanks) -> float:
    """Seconds of an operation on next to nothing."""
    tensor = torch.zeros(8, device=ranks.device)
    return _mean_measure_of_ranks(ranks, repeated(lambda: tensor.add(1), ranks))


def _view_seconds(ranks: CalibrationRanks) -> float:
    """Seconds of a view that autograd records."""
    tensor = torch.zeros(8, 8, device=ranks.device, requires_grad=True)
    return _mean_measure_of_ranks(ranks, repeated(lambda: tensor.view(64), ranks))


def _product_seconds(ranks: CalibrationRanks, dtype: torch.dtype) -> float:
    """Seconds of a product of two square matrices."""
    side = _SIDE if ranks.device.type == "cpu" else 8 * _SIDE
    a, b = (torch.ones(side, side, device=ranks.device, dtype=dtype) for _ in range(2))
    ranks.together()
    return _mean_measure_of_ranks(ranks, repeated(lambda: a @ b, ranks))


def _optimizer_share(ranks: CalibrationRanks, bandwidth: float) -> float:
    """What a step of AdamW gets of the bandwidth, by the bytes that it has to move."""
    parameter = torch.nn.Parameter(torch.zeros(_OPTIMIZED, device=ranks.device))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW([parameter])
    ranks.together()
    seconds = _mean_measure_of_ranks(ranks, repeated(optimizer.step, ranks, least=0.03))
    return min(1.0, max(_LEAST, _STATE * _OPTIMIZED / seconds / bandwidth))


def _memory_bytes(ranks: CalibrationRanks) -> int:
    """What a rank may have."""
    if ranks.device.type == "cuda":
        return int(torch.cuda.get_device_properties(ranks.device).total_memory)
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) // ranks.per_host


def _measured_device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


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
    program = {name: getattr(kernels, name) for name in ("action", "step")}
    yield from (f"{name} = {_toml_number(seconds)}" for name, seconds in program.items() if seconds)
    units = {name: getattr(kernels, name) for name in ("unit", "unit_step")}
    yield from (f"{name} = {_toml_curve(curve)}" for name, curve in units.items() if curve != NONE)
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
    ranks = CalibrationRanks.here()
    device = calibrate(ranks, seconds, show)
    if ranks.rank == 0:
        text = to_toml(device, _toml_source(ranks))
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--out {path!r}: cannot write it: {error.strerror}") from error
    ranks.end()


def _toml_source(ranks: CalibrationRanks) -> str:
    """What the file says of how it was measured."""
    day = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    at_once = "one process" if ranks.size == 1 else f"{ranks.size} processes at once"
    threads = torch.get_num_threads()
    return f"smpc calibrate, {day}: torch {torch.__version__}, {at_once}, {threads} thread{'s' * (threads > 1)} each"
