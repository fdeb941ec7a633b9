"""Devices by name, or described in a file; of a file, all that is wrong in it is said at once.

    find_device("h100")           a device of the table `DEVICES`, by name
    find_devices(("2xh100", "2xa100"), 4)        by rank, where pipeline ranks have devices of several kinds; so says a file with

        ranks = ["h100", "h100", "a100", "mine.toml"]       # one for each pipeline rank, or "2xh100" for two in a row

    find_device("rack.toml")      a description in a file, with the keys of `Device`:

        name = "H100 PCIe"
        memory_bandwidth = 2.0e12             # bytes/s
        memory = "80GB"                       # or a number of bytes
        source = "NVIDIA H100 datasheet"      # may be left out
        transport = "nccl"                    # or "gloo"; may be left out
        variation = 0.08                      # how much slower the slowest of a thousand is than a typical one; 0 if left out

        [peak_flops]                          # FLOP/s by dtype, dense; a dtype that is missing counts as float32
        float32 = 51e12
        bfloat16 = 756e12

        [inside_host]                         # between two devices of one host, in one direction
        devices = 8                           # devices of a host
        bandwidth = 64e9                      # bytes/s
        latency = 20e-6                       # s for one message, with what both ends do about it
        efficiency = 0.8                      # what large messages get of the bandwidth; 1 if left out
        hop = 2e-6                            # s for each further rank that a collective passes; 0 if left out

        [between_hosts]                       # of each device
        bandwidth = 50e9
        latency = 50e-6

        [host]                                # between a device and its host's memory, in one direction; 16 lanes of PCIe 4.0 if left out
        bandwidth = 64e9
        latency = 10e-6
        efficiency = 0.8

        [kernels]                             # what kernels reach; without it: peak and bandwidth, at once
        launch = 5e-6                         # s that an operation takes at least
        processors = 114                      # each computes a tile of a product at a time; 0: no tiles
        memory = 0.9                          # share of the memory bandwidth; or [[bytes, share], ...]
        attention = [0.37, 0.33]              # shares of the peak in fused attention, forward and backward

        view = 2e-6                           # s of an operation that moves nothing; 0 if left out
        optimizer = 0.5                       # share of what memory gives to as many bytes, in an optimizer's step
        action = 50e-6                        # s of the executor for each forward or backward of a stage; 0 if left out
        step = 0.7e-3                         # s of it for each step; 0 if left out
        unit = 0.4e-3                         # s of it for each unit in parts and microbatch, where no program runs; 0 if left out
        unit_step = [[1e5, 1e-3], [1e6, 2e-3]]  # s of it for each such unit and step; a time for all, or [[bytes, s], ...]

        [kernels.views]                       # what was measured of operations that move nothing: s of a forward, and of a backward
        transpose = [4e-6, 3e-6]

        [kernels.deferred]                    # s that a call takes longer whose backward is split: [[FLOPs, s], ...]
        linear = [[1e6, 0.1e-3], [1e8, 0.4e-3]]

        [kernels.products]                    # share of the peak by dtype; or [[FLOPs, share], ...]
        bfloat16 = 0.72

        [kernels.operations.gelu]             # what was measured: of the memory bandwidth, or of the peak for what has FLOPs
        forward = [[1e5, 0.2], [1e7, 0.1]]    # a share, or [[bytes, share], ...]; of products [[FLOPs, share], ...]
        backward = 0.1

        [collectives]                         # what was measured among ranks of a host: bytes/s, by the bytes that a rank sends
        all-reduce = [[1, 1e4], [1e4, 1e8], [1e6, 1e9]]
        in-operations = [[1, 1e4], [1e6, 1e9]]        # sums between operations of tensor-parallel ranks
        in-operations-moves = [[1, 1e4], [1e6, 1e9]]  # where slices are put together or apart; as the sums if left out

`smpc calibrate` writes such files.

Latencies are of the order of what messages between processes take, and only decide about messages of less than a megabyte. What the
numbers of the named devices are, and where they are from: `smpc.partitioner.costs.device`.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from smpc.config.numbers import MAX_RANKS, parse_bytes, shown
from smpc.config.user_files import parse_toml, read_text
from smpc.errors import ConfigError, printable
from smpc.partitioner.costs.collective_times import IN_OPERATIONS, MOVES_IN_OPERATIONS, CollectiveKind
from smpc.partitioner.costs.device import ALL, DEVICES, NONE, PCIE4, Curve, Device, Kernels, Wire

_RATES = (1e3, 1e24)  # bytes/s and FLOP/s that are believed; with others, times are beyond what a plan can count in
_LATENCIES = (0.0, 3600.0)
_SHARES = (1e-6, 1.0)
_MEASURED = (1e-12, 1e6)  # small work takes a launch, and the backward of a sum nothing at all
_KERNELS = (
    "launch",
    "processors",
    "memory",
    "attention",
    "products",
    "operations",
    "view",
    "optimizer",
    "views",
    "deferred",
    "action",
    "step",
    "unit",
    "unit_step",
)
_DTYPES = ("float64", "float32", "bfloat16", "float16")  # that torch surely has
_HOST = ("bandwidth", "latency", "efficiency")
_WIRE = (*_HOST, "hop")
_MANY = re.compile(r"([0-9]+)\s*x\s*(.+)", re.IGNORECASE)  # 2xh100


def find_device(name: str | Device) -> Device:
    """The device of that name, or described in that .toml file.

    ConfigError for an unknown name (with the closest one), a file that cannot be read, and for everything that is wrong in a file.
    """
    if isinstance(name, Device):
        return name
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    if name.lower().endswith(".toml"):
        return read_device(name)
    close = difflib.get_close_matches(name.lower()[:100], DEVICES, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"device: expected one of {', '.join(DEVICES)} or a .toml file, found {shown(name)}{hint}")


def find_devices(names: str | Device | Sequence[str | Device], num_ranks: int) -> tuple[Device, ...]:
    """The device of each pipeline rank: one for all, or one for each rank, by name or in a .toml file with `ranks`.

    ConfigError for a number that does not fit, and for kinds that cannot talk to each other.
    """
    listed: list[str | Device] = []
    for name in [names] if isinstance(names, (str, Device)) else names:
        number, entry = _repeated_device(name) if isinstance(name, str) else (1, name)
        listed += (_ranks_of_device_file(entry) if isinstance(entry, str) else [entry]) * number
        if len(listed) > MAX_RANKS:
            raise ConfigError(f"device: expected devices of at most {MAX_RANKS} ranks, found {len(listed)}")
    if len(listed) not in (1, num_ranks):
        raise ConfigError(f"device: expected one, or one for each of {num_ranks} pipeline ranks, found {len(listed)}")
    known = {name: find_device(name) for name in listed if isinstance(name, str)}
    found = [known[name] if isinstance(name, str) else name for name in listed]
    if len({device.transport for device in found}) > 1:
        kinds = ", ".join(dict.fromkeys(f"{device.name}: {device.transport}" for device in found))
        raise ConfigError(f"device: expected devices with one transport, found {kinds}")
    return tuple(found) * (num_ranks if len(found) == 1 else 1)


def _repeated_device(name: str) -> tuple[int, str]:
    """How many of what: `2xh100`."""
    many = _MANY.fullmatch(name)
    if many is None:
        return 1, name
    if len(many[1]) > len(str(MAX_RANKS)) or int(many[1]) > MAX_RANKS:
        raise ConfigError(f"device: expected at most {MAX_RANKS} of a kind, found {shown(name)}")
    return int(many[1]), many[2]


def _ranks_of_device_file(name: str) -> list[str | Device]:
    """What `ranks` of a file lists; the name itself if it is no such file."""
    data = read_table(name) if name.lower().endswith(".toml") else {}
    if "ranks" not in data:
        return [name]
    listed, others = data["ranks"], [key for key in data if key != "ranks"]
    if others or not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
        raise ConfigError(
            f'device {name!r}: expected ranks = ["h100", ...] and nothing else, found ranks = {shown(listed)}'
            + (f" and {', '.join(others)}" if others else "")
        )
    found: list[str | Device] = []
    for entry in listed:
        number, kind = _repeated_device(entry)
        found += [kind] * number
        if len(found) > MAX_RANKS:
            raise ConfigError(f"device {shown(name)}: expected at most {MAX_RANKS} ranks, found {len(found)}")
    return found


def read_table(path: str) -> dict[str, Any]:
    """The content of a file. ConfigError where it cannot be read."""
    what = f"device {shown(path)}"
    return parse_toml(read_text(path, what), what)


def read_device(path: str) -> Device:
    """The device that a file describes. ConfigError for everything that is wrong in it."""
    data = read_table(path)
    reader = _DeviceReader(path)
    found = reader.device(data)
    if reader.problems:
        raise ConfigError("\n".join(f"device {path!r}: {problem}" for problem in reader.problems))
    return found


class _DeviceReader:
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
            "kernels",
            "variation",
            "collectives",
            "host",
        )
        self.check_keys("", data, known)
        inside, between = self.table(data, "inside_host"), self.table(data, "between_hosts")
        self.check_keys("inside_host.", inside, ("devices", *_WIRE))
        self.check_keys("between_hosts.", between, _WIRE)
        return Device(
            self.text(data, "name", Path(self.path).stem),
            MappingProxyType(self.peaks(self.table(data, "peak_flops"))),
            self.number("", data, "memory_bandwidth"),
            self.size(data, "memory"),
            int(self.number("inside_host.", inside, "devices", (1, MAX_RANKS), whole=True)),
            self.wire("inside_host.", inside),
            self.wire("between_hosts.", between),
            self.text(data, "source", ""),
            self.transport(data),
            self.kernels(self.table(data, "kernels")),
            self.number("", data, "variation", (0.0, 1.0), default=0.0),
            MappingProxyType(self.collectives(self.table(data, "collectives"))),
            self.host(data),
        )

    def host(self, data: Mapping[str, Any]) -> Wire:
        """The link to the host's memory."""
        if "host" not in data:
            return PCIE4
        table = self.table(data, "host")
        self.check_keys("host.", table, _HOST)
        return self.wire("host.", table)

    def wire(self, prefix: str, data: Mapping[str, Any]) -> Wire:
        return Wire(
            self.number(prefix, data, "bandwidth"),
            self.number(prefix, data, "latency", _LATENCIES),
            self.number(prefix, data, "efficiency", _SHARES, default=1.0),
            self.number(prefix, data, "hop", _LATENCIES, default=0.0),
        )

    def kernels(self, data: Mapping[str, Any]) -> Kernels:
        self.check_keys("kernels.", data, _KERNELS)
        products = self.table(data, "products", "kernels.")
        self.check_dtypes("kernels.products.", products)
        operations = self.table(data, "operations", "kernels.")
        return Kernels(
            self.number("kernels.", data, "launch", _LATENCIES, default=0.0),
            int(self.number("kernels.", data, "processors", (0, 1 << 20), whole=True, default=0)),
            MappingProxyType({key: self.curve("kernels.products.", products, key) for key in products}),
            self.curve("kernels.", data, "memory"),
            self.pair(data, "attention"),
            MappingProxyType({key: self.curves(operations, key) for key in operations}),
            self.number("kernels.", data, "view", _LATENCIES, default=0.0),
            self.number("kernels.", data, "optimizer", _SHARES, default=1.0),
            MappingProxyType(self.views(self.table(data, "views", "kernels."))),
            deferred=MappingProxyType(self.deferred(self.table(data, "deferred", "kernels."))),
            action=self.number("kernels.", data, "action", _LATENCIES, default=0.0),
            step=self.number("kernels.", data, "step", _LATENCIES, default=0.0),
            unit=self.times("kernels.", data, "unit"),
            unit_step=self.times("kernels.", data, "unit_step"),
        )

    def deferred(self, data: Mapping[str, Any]) -> dict[str, Curve]:
        """By name, seconds by FLOPs."""
        return {key: self.times("kernels.deferred.", data, key) for key in data}

    def times(self, prefix: str, data: Mapping[str, Any], key: str) -> Curve:
        """Seconds by size; none where they are left out, or 0."""
        return self.curve(prefix, data, key, (1e-12, _LATENCIES[1])) if data.get(key, 0.0) != 0.0 else NONE

    def views(self, data: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
        """By name, seconds of a forward and of a backward."""
        found = {}
        for key, value in data.items():
            if (
                isinstance(value, list)
                and len(value) == 2
                and all(_is_number(v) and 0.0 <= v <= _LATENCIES[1] for v in value)
            ):
                found[key] = (float(value[0]), float(value[1]))
            else:
                self.problems.append(
                    f"kernels.views.{printable(key)}: expected [forward, backward], two times in seconds, found {shown(value)}"
                )
        return found

    def curves(self, data: Mapping[str, Any], key: str) -> tuple[Curve, Curve]:
        """The curves of an operation's forward and backward."""
        value, prefix = data[key], f"kernels.operations.{printable(key)}."
        if not isinstance(value, dict):
            self.problems.append(f"{prefix[:-1]}: expected a table of forward and backward, found {shown(value)}")
            return ALL, ALL
        self.check_keys(prefix, value, ("forward", "backward"))
        forward, backward = (self.curve(prefix, value, way, _MEASURED) for way in ("forward", "backward"))
        return forward, backward

    def collectives(self, data: Mapping[str, Any]) -> dict[str, Curve]:
        """By kind, bytes/s by bytes."""
        self.check_keys("collectives.", data, (*CollectiveKind, IN_OPERATIONS, MOVES_IN_OPERATIONS))
        return {key: self.curve("collectives.", data, key, (1e-3, _RATES[1])) for key in data}

    def curve(self, prefix: str, data: Mapping[str, Any], key: str, bounds: tuple[float, float] = _SHARES) -> Curve:
        """A share of a peak for all sizes, or [[size, share], ...] in ascending order."""
        value = data.get(key, 1.0)
        points = value if isinstance(value, list) else [[1.0, value]]
        if points and all(isinstance(point, list) and len(point) == 2 for point in points):
            numbers = [(float(a), float(b)) for a, b in points if _is_number(a) and _is_number(b)]
            sizes = [size for size, _ in numbers]
            in_order = len(sizes) == len(points) and all(a < b for a, b in itertools.pairwise([0.0, *sizes]))
            if in_order and all(bounds[0] <= share <= bounds[1] for _, share in numbers):
                return tuple(numbers)
        what = "rate" if bounds[1] > _MEASURED[1] else "share of the peak"
        what = "time in seconds" if bounds[1] == _LATENCIES[1] else what
        self.problems.append(
            f"{prefix}{printable(key)}: expected a {what} from {bounds[0]:g} to {bounds[1]:g}, or a list of [size, {what}] in "
            f"ascending order, found {shown(value)}"
        )
        return ALL

    def pair(self, data: Mapping[str, Any], key: str) -> tuple[float, float]:
        value = data.get(key, [1.0, 1.0])
        if isinstance(value, list) and len(value) == 2 and all(_is_number(v) and _SHARES[0] <= v <= 1 for v in value):
            return float(value[0]), float(value[1])
        self.problems.append(
            f"kernels.{key}: expected [forward, backward], two shares of the peak, found {shown(value)}"
        )
        return 1.0, 1.0

    def check_keys(self, prefix: str, data: Mapping[str, Any], known: tuple[str, ...]) -> None:
        for key in data:
            if key not in known:
                close = difflib.get_close_matches(key[:100], known, n=1)
                hint = f"; did you mean {prefix}{close[0]}?" if close else f"; known are {', '.join(known)}"
                self.problems.append(f"unknown key {prefix}{printable(key)}{hint}")

    def table(self, data: Mapping[str, Any], key: str, prefix: str = "") -> Mapping[str, Any]:
        value = data.get(key, {})
        if isinstance(value, dict):
            return value
        self.problems.append(f"{prefix}{key}: expected a table, found {shown(value)}")
        return {}

    def text(self, data: Mapping[str, Any], key: str, default: str) -> str:
        value = data.get(key, default)
        if isinstance(value, str):
            return value
        self.problems.append(f"{key}: expected a string, found {shown(value)}")
        return default

    def transport(self, data: Mapping[str, Any]) -> str:
        value = self.text(data, "transport", "nccl")
        if value not in ("nccl", "gloo"):
            self.problems.append(f"transport: expected 'nccl' or 'gloo', found {shown(value)}")
        return value

    def number(
        self,
        prefix: str,
        data: Mapping[str, Any],
        key: str,
        bounds: tuple[float, float] = _RATES,
        whole: bool = False,
        default: float | None = None,
    ) -> float:
        """A number within the bounds; one without a default has to be there."""
        value = data.get(key, default)
        if value is None:
            self.problems.append(f"{prefix}{key}: missing")
            return 1.0
        valid = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not valid or not bounds[0] <= value <= bounds[1]:
            kind = "a whole number" if whole else "a number"
            self.problems.append(
                f"{prefix}{key}: expected {kind} from {bounds[0]:g} to {bounds[1]:g}, found {shown(value)}"
            )
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
        self.check_dtypes("peak_flops.", data)
        if "float32" not in data:
            self.problems.append("peak_flops.float32: missing")
        return {key: self.number("peak_flops.", data, key) for key in data}

    def check_dtypes(self, prefix: str, data: Mapping[str, Any]) -> None:
        unknown = [key for key in data if key not in _DTYPES]
        if not unknown:
            return
        import torch  # takes seconds

        for key in unknown:
            if not isinstance(getattr(torch, key, None), torch.dtype):
                self.problems.append(f"{prefix}{printable(key)}: expected the name of a torch dtype, such as bfloat16")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
