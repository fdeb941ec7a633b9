"""Descriptions of devices: how fast they compute, move bytes and talk to each other, and how much they hold.

    find_device("h100")           a device of the table below, by name
    find_devices(("2xh100", "2xa100"), 4)        by rank, where pipeline ranks have devices of several kinds; so says a file with

        ranks = ["h100", "h100", "a100", "mine.toml"]       # one for each pipeline rank, or "2xh100" for two in a row

    find_device("rack.toml")      a description in a file, with the keys of `Device`:

        name = "H100 PCIe"
        memory_bandwidth = 2.0e12             # bytes/s
        memory = "80GB"                       # or a number of bytes
        source = "NVIDIA H100 datasheet"      # may be left out
        transport = "nccl"                    # or "gloo"; may be left out

        [peak_flops]                          # FLOP/s by dtype, dense; a dtype that is missing counts as float32
        float32 = 51e12
        bfloat16 = 756e12

        [inside_host]                         # between two devices of one host, in one direction
        devices = 8                           # devices of a host
        bandwidth = 64e9                      # bytes/s
        latency = 20e-6                       # s for one message, with what both ends do about it

        [between_hosts]
        bandwidth = 50e9
        latency = 50e-6

Peaks, bandwidths and sizes are those of the makers' public datasheets, without sparsity; float32 products are taken to
run without TF32, as torch does by default. Datasheets have no latencies: those are of the order of what point-to-point
messages between processes take, and only decide about messages of less than a megabyte.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from smpc.errors import ConfigError
from smpc.partitioner.sizes import parse_bytes


@dataclass(frozen=True, slots=True)
class Wire:
    """One direction between two devices."""

    bandwidth: float  # bytes/s
    latency: float  # s for one message


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of device and the hosts that it comes in: see the module docstring."""

    name: str
    peak_flops: Mapping[str, float]  # FLOP/s by dtype
    memory_bandwidth: float  # bytes/s
    memory_bytes: int
    devices_per_host: int
    inside_host: Wire
    between_hosts: Wire
    source: str = ""
    transport: str = "nccl"  # how ranks talk: "nccl" or "gloo"

    def wire(self, num_ranks: int) -> Wire:
        """What pipeline ranks talk over: the wires inside a host if they all fit into one, else those between hosts."""
        return self.inside_host if num_ranks <= self.devices_per_host else self.between_hosts


def _hopper(name: str, memory_bandwidth: float, memory_bytes: int, source: str) -> Device:
    peak = {
        "float64": 67e12,
        "float32": 67e12,
        "bfloat16": 989e12,
        "float16": 989e12,
        "float8_e4m3fn": 1979e12,
        "float8_e5m2": 1979e12,
    }
    wires = Wire(450e9, 20e-6), Wire(50e9, 50e-6)
    return Device(name, MappingProxyType(peak), memory_bandwidth, memory_bytes, 8, *wires, source)


H100 = _hopper(
    "H100 SXM",
    3.35e12,
    80 * 10**9,
    "NVIDIA H100 Tensor Core GPU datasheet (SXM: 67 TFLOP/s FP32, 1979 TFLOP/s BF16 with sparsity, NVLink 900 GB/s "
    "in both directions), DGX H100 datasheet (8 devices, 400 Gbit/s network each)",
)
_H200 = _hopper(
    "H200 SXM",
    4.8e12,
    141 * 10**9,
    "NVIDIA H200 Tensor Core GPU datasheet (SXM: compute of H100, 141 GB at 4.8 TB/s), DGX H200 datasheet",
)
_A100 = Device(
    "A100 SXM 80GB",
    MappingProxyType({"float64": 19.5e12, "float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12}),
    2.039e12,
    80 * 10**9,
    8,
    Wire(300e9, 20e-6),
    Wire(25e9, 50e-6),
    "NVIDIA A100 Tensor Core GPU datasheet (80GB SXM: 2039 GB/s, NVLink 600 GB/s in both directions), DGX A100 "
    "datasheet (8 devices, 200 Gbit/s network each)",
)
_L4 = Device(
    "L4",
    MappingProxyType(
        {
            "float64": 0.473e12,  # a 64th of the float32 rate, as in all of this generation
            "float32": 30.3e12,
            "bfloat16": 121e12,
            "float16": 121e12,
            "float8_e4m3fn": 242.5e12,
            "float8_e5m2": 242.5e12,
        }
    ),
    0.3e12,
    24 * 10**9,
    8,
    Wire(32e9, 20e-6),
    Wire(12.5e9, 50e-6),
    "NVIDIA L4 Tensor Core GPU datasheet (30.3 TFLOP/s FP32, 242 TFLOP/s BF16 with sparsity, 300 GB/s, PCIe Gen4 x16 "
    "64 GB/s in both directions); 100 Gbit/s network assumed",
)
_CPU = Device(
    "CPU",
    MappingProxyType({"float64": 2.9e12, "float32": 5.9e12, "bfloat16": 5.9e12, "float16": 5.9e12}),
    204.8e9,
    256 * 10**9,
    2,
    Wire(10e9, 50e-6),
    Wire(3.125e9, 100e-6),
    "Intel Xeon Platinum 8380 (product specifications: 40 cores of 2.3 GHz, two AVX-512 FMA units each, eight channels of "
    "DDR4-3200), one device a socket; 256 GB of memory and a 25 Gbit/s network assumed",
    "gloo",
)
_MANY = re.compile(r"(\d+)\s*x\s*(.+)", re.IGNORECASE)  # 2xh100
DEVICES: Mapping[str, Device] = MappingProxyType({"h100": H100, "h200": _H200, "a100": _A100, "l4": _L4, "cpu": _CPU})


def find_device(name: str | Device) -> Device:
    """The device of that name, or described in that .toml file.

    ConfigError for an unknown name (with the closest one), a file that cannot be read, and for everything that is wrong in a file.
    """
    if isinstance(name, Device):
        return name
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    if name.lower().endswith(".toml"):
        return _from_file(name)
    close = difflib.get_close_matches(name.lower(), DEVICES, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"device: expected one of {', '.join(DEVICES)} or a .toml file, found {name!r}{hint}")


def find_devices(names: str | Device | Sequence[str | Device], num_ranks: int) -> tuple[Device, ...]:
    """The device of each pipeline rank: one for all, or one for each rank, by name or in a .toml file with `ranks`.

    ConfigError for a number that does not fit, and for kinds that cannot talk to each other.
    """
    listed: list[str | Device] = []
    for name in [names] if isinstance(names, (str, Device)) else names:
        many = _MANY.fullmatch(name) if isinstance(name, str) else None
        for entry in [many[2]] * int(many[1]) if many is not None else [name]:
            listed += _ranks_of(entry) if isinstance(entry, str) else [entry]
    if len(listed) not in (1, num_ranks):
        raise ConfigError(f"device: expected one, or one for each of {num_ranks} pipeline ranks, found {len(listed)}")
    known = {name: find_device(name) for name in listed if isinstance(name, str)}
    found = [known[name] if isinstance(name, str) else name for name in listed]
    if len({device.transport for device in found}) > 1:
        kinds = ", ".join(dict.fromkeys(f"{device.name}: {device.transport}" for device in found))
        raise ConfigError(f"device: expected devices with one transport, found {kinds}")
    return tuple(found) * (num_ranks if len(found) == 1 else 1)


def _ranks_of(name: str) -> list[str | Device]:
    """What `ranks` of a file lists; the name itself if it is no such file."""
    data = _read(name) if name.lower().endswith(".toml") else {}
    if "ranks" not in data:
        return [name]
    listed, others = data["ranks"], [key for key in data if key != "ranks"]
    if others or not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
        raise ConfigError(
            f'device {name!r}: expected ranks = ["h100", ...] and nothing else, found ranks = {listed!r}'
            + (f" and {', '.join(others)}" if others else "")
        )
    found: list[str | Device] = []
    for entry in listed:
        many = _MANY.fullmatch(entry)
        found += [many[2]] * int(many[1]) if many is not None else [entry]
    return found


def _read(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"device {path!r}: cannot read it: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"device {path!r}: expected TOML, found: {error}") from error


def _from_file(path: str) -> Device:
    data = _read(path)
    reader = _Reader(path)
    found = reader.device(data)
    if reader.problems:
        raise ConfigError("\n".join(f"device {path!r}: {problem}" for problem in reader.problems))
    return found


class _Reader:
    """Reads the tables of one file and collects what is wrong in them."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.problems: list[str] = []

    def device(self, data: Mapping[str, Any]) -> Device:
        known = (
            "name",
            "memory_bandwidth",
            "memory",
            "source",
            "transport",
            "peak_flops",
            "inside_host",
            "between_hosts",
        )
        self.check_keys("", data, known)
        inside, between = self.table(data, "inside_host"), self.table(data, "between_hosts")
        self.check_keys("inside_host.", inside, ("devices", "bandwidth", "latency"))
        self.check_keys("between_hosts.", between, ("bandwidth", "latency"))
        return Device(
            self.text(data, "name", Path(self.path).stem),
            MappingProxyType(self.peaks(self.table(data, "peak_flops"))),
            self.number("", data, "memory_bandwidth"),
            self.size(data, "memory"),
            int(self.number("inside_host.", inside, "devices", whole=True)),
            Wire(self.number("inside_host.", inside, "bandwidth"), self.number("inside_host.", inside, "latency", 0.0)),
            Wire(
                self.number("between_hosts.", between, "bandwidth"),
                self.number("between_hosts.", between, "latency", 0.0),
            ),
            self.text(data, "source", ""),
            self.transport(data),
        )

    def check_keys(self, prefix: str, data: Mapping[str, Any], known: tuple[str, ...]) -> None:
        for key in data:
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {prefix}{close[0]}?" if close else f"; known are {', '.join(known)}"
                self.problems.append(f"unknown key {prefix}{key}{hint}")

    def table(self, data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        value = data.get(key, {})
        if isinstance(value, dict):
            return value
        self.problems.append(f"{key}: expected a table, found {value!r}")
        return {}

    def text(self, data: Mapping[str, Any], key: str, default: str) -> str:
        value = data.get(key, default)
        if isinstance(value, str):
            return value
        self.problems.append(f"{key}: expected a string, found {value!r}")
        return default

    def transport(self, data: Mapping[str, Any]) -> str:
        value = self.text(data, "transport", "nccl")
        if value not in ("nccl", "gloo"):
            self.problems.append(f"transport: expected 'nccl' or 'gloo', found {value!r}")
        return value

    def number(
        self, prefix: str, data: Mapping[str, Any], key: str, minimum: float | None = None, whole: bool = False
    ) -> float:
        """A number above 0, or from `minimum` on."""
        value = data.get(key)
        if value is None:
            self.problems.append(f"{prefix}{key}: missing")
            return 1.0
        valid = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not valid or not (value > 0 if minimum is None else value >= minimum) or value == float("inf"):
            kind = "a whole number" if whole else "a number"
            least = "above 0" if minimum is None else f"from {minimum:g} on"
            self.problems.append(f"{prefix}{key}: expected {kind} {least}, found {value!r}")
            return 1.0
        return float(value)

    def size(self, data: Mapping[str, Any], key: str) -> int:
        if key not in data:
            self.problems.append(f"{key}: missing")
            return 1
        try:
            value = data[key]
            return parse_bytes(value if isinstance(value, (int, float)) else str(value), key)
        except ConfigError as error:
            self.problems.append(str(error))
            return 1

    def peaks(self, data: Mapping[str, Any]) -> dict[str, float]:
        for key in data:
            if not isinstance(getattr(torch, key, None), torch.dtype):
                self.problems.append(f"peak_flops.{key}: expected the name of a torch dtype, such as bfloat16")
        if "float32" not in data:
            self.problems.append("peak_flops.float32: missing")
        return {key: self.number("peak_flops.", data, key) for key in data}
