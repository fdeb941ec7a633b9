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

`smpc calibrate` writes such files.

Latencies are of the order of what messages between processes take, and only decide about messages of less than a megabyte. What the
numbers of the named devices are, and where they are from: `smpc.partitioner.costs.description`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from smpc.config.numbers import MAX_RANKS, shown
from smpc.errors import ConfigError
from smpc.partitioner.costs.description import DEVICES, H100, Device, Wire
from smpc.partitioner.costs.device_file import read_device, read_table

__all__ = ["DEVICES", "H100", "Device", "Wire", "find_device", "find_devices"]

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
        number, entry = _repeated(name) if isinstance(name, str) else (1, name)
        listed += (_ranks_of(entry) if isinstance(entry, str) else [entry]) * number
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


def _repeated(name: str) -> tuple[int, str]:
    """How many of what: `2xh100`."""
    many = _MANY.fullmatch(name)
    if many is None:
        return 1, name
    if len(many[1]) > len(str(MAX_RANKS)) or int(many[1]) > MAX_RANKS:
        raise ConfigError(f"device: expected at most {MAX_RANKS} of a kind, found {shown(name)}")
    return int(many[1]), many[2]


def _ranks_of(name: str) -> list[str | Device]:
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
        number, kind = _repeated(entry)
        found += [kind] * number
        if len(found) > MAX_RANKS:
            raise ConfigError(f"device {shown(name)}: expected at most {MAX_RANKS} ranks, found {len(found)}")
    return found
