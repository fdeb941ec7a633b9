"""What a device is, in numbers: peaks, what kernels reach of them, and the wires between devices of a host and between hosts.

    Kernels(launch=5e-6, processors=132, products={"bfloat16": ((1.0, 0.72),)}, memory=((1.0, 0.9),), attention=(0.37, 0.33))

Terms
    curve       pairs (size, share), ascending sizes: what is reached of a peak by work of that size; in between it is a power of the
                size, beyond the ends it stays as it is. One pair: the same for all sizes
    product     a matrix product of m x k and k x n, or a batch of them; its size is its FLOPs
    tile        what one of the device's processors computes of a product at a time
    share       of a peak, from 0 to 1

A product runs in waves of one tile on every processor, and a wave that is not full takes as long as a full one:

    time = ceil(tiles / processors) * tile FLOPs * (k + 64) / k / (peak / processors * share * quality of the tile)

for the best of some tiles; 64 is what of k passes before a tile is at work. With `processors` 0 there are no waves.

Times of a program beside its operations (`action`, `step`, `unit`, `unit_step`, `deferred`) are the processor's, and count where they are
stated: on a GPU they pass while kernels that were launched before are still at work.

What was measured of an operation (`operations`, by the names of `smpc.partitioner.costs.cost.name_of`) counts before all that: its
shares of the peak, by the FLOPs of one product, or of the memory bandwidth, by the bytes that it moves; in its forward and its backward.
What was measured of collectives counts for ranks of one host.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from smpc.mesh import Axis, Mesh

Curve = tuple[tuple[float, float], ...]
ALL: Curve = ((1.0, 1.0),)
# rows, columns, what it reaches of the rate of the largest: smaller tiles read more for as many FLOPs
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.78), (64, 64, 0.6))
_FILL = 64


def at(curve: Curve, size: float) -> float:
    """The share at a size."""
    place = bisect_right(curve, (size, math.inf))
    if place in (0, len(curve)):
        return curve[min(place, len(curve) - 1)][1]
    (x, low), (y, high) = curve[place - 1], curve[place]
    return float(low * (high / low) ** (math.log(size / x) / math.log(y / x)))


@dataclass(frozen=True, slots=True)
class Kernels:
    """What kernels reach of a device's peaks: see the module docstring. Without arguments: all of them, at once."""

    launch: float = 0.0  # s that an operation takes at least
    processors: int = 0
    products: Mapping[str, Curve] = field(default_factory=dict)  # share of the peak by dtype; one that is missing: all
    memory: Curve = ALL  # share of the memory bandwidth, by the bytes that an operation moves
    attention: tuple[float, float] = (1.0, 1.0)  # share of the peak in a fused attention's forward, and in its backward
    operations: Mapping[str, tuple[Curve, Curve]] = field(default_factory=dict)  # what was measured: forward, backward
    view: float = 0.0  # s of an operation that moves nothing, and of its backward
    optimizer: float = 1.0  # share of what memory gives to as many bytes, in an optimizer's step
    views: Mapping[str, tuple[float, float]] = field(
        default_factory=dict
    )  # `view` of those measured: forward, backward
    action: float = 0.0  # s that a program needs for each forward or backward of a stage, beside its operations
    step: float = 0.0  # s that a step needs before its first operation and after its last
    unit: float = 0.0  # s that torch's fully_shard needs for each unit in each microbatch, beside gathers and sums
    unit_step: float = 0.0  # s that it needs for each unit in each step, beside those and what the network does
    deferred: Mapping[str, Curve] = field(
        default_factory=dict
    )  # s that a call is longer whose backward is split, by FLOPs

    def product_time(self, shape: tuple[int, int, int, int], peak: float, dtype: str) -> float:
        """Seconds of a product of (batch, m, n, k) on a device with this peak."""
        batch, m, n, k = shape
        flops = 2.0 * batch * m * n * k
        rate = peak * at(self.products.get(dtype, ALL), flops)
        if not self.processors or not flops:
            return flops / rate
        waves = [
            math.ceil(batch * math.ceil(m / rows) * math.ceil(n / columns) / self.processors) * rows * columns / quality
            for rows, columns, quality in _TILES
        ]
        return min(waves) * 2.0 * (k + _FILL) * self.processors / rate

    def measured_share(self, name: str, size: float, *, is_backward: bool) -> float | None:
        """What an operation of this size reaches of the peak or the memory bandwidth; None if it was not measured."""
        found = self.operations.get(name)
        return None if found is None else at(found[is_backward], size)

    def deferred_time(self, name: str, size: float) -> float:
        """Seconds that forward and backward of an operation take longer where the backward is computed in two parts."""
        return at(self.deferred[name], size) if name in self.deferred else 0.0

    def view_time(self, name: str, *, is_backward: bool) -> float:
        """Seconds of an operation that moves nothing."""
        found = self.views.get(name)
        return self.view if found is None else found[is_backward]

    def memory_time(self, num_bytes: float, bandwidth: float) -> float:
        """Seconds to move bytes."""
        return num_bytes / (bandwidth * at(self.memory, num_bytes)) if num_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Wire:
    """One direction between two devices."""

    bandwidth: float  # bytes/s
    latency: float  # s for one message
    efficiency: float = 1.0  # share of the bandwidth that large messages and collectives get
    hop: float = 0.0  # s for each further rank that a collective passes, one after another

    @property
    def rate(self) -> float:
        """Bytes/s that large messages get."""
        return self.bandwidth * self.efficiency


PCIE4 = Wire(
    32e9, 10e-6, 0.8
)  # 16 lanes of PCIe 4.0, and what nvbandwidth shows of them; a device that says nothing has it


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of device and the hosts that it comes in: see `smpc.partitioner.costs.device`."""

    name: str
    peak_flops: Mapping[str, float]  # FLOP/s by dtype
    memory_bandwidth: float  # bytes/s
    memory_bytes: int
    devices_per_host: int
    inside_host: Wire
    between_hosts: Wire
    source: str = ""
    transport: str = "nccl"  # how ranks talk: "nccl" or "gloo"
    kernels: Kernels = Kernels()
    variation: float = 0.0  # how much slower than a typical one the slowest of a thousand devices of this kind is
    collectives: Mapping[str, Curve] = field(default_factory=dict)  # by kind: bytes/s that a rank sends, by bytes
    host: Wire = PCIE4  # one direction between the device and its host's memory; both at once
    is_assumed: bool = False  # a stand-in for devices that differ by far: its times mean little until one is calibrated

    def wire(self, num_ranks: int) -> Wire:
        """What pipeline ranks talk over: the wires inside a host if they all fit into one, else those between hosts."""
        return self.inside_host if num_ranks <= self.devices_per_host else self.between_hosts

    def slowdown(self, num_devices: int) -> float:
        """How much longer so many devices in step take than one: they wait for the slowest, and of more the slowest is slower."""
        return self.variation * math.log(num_devices, 1000)

    def peak(self, dtype: str) -> float:
        """FLOP/s of a dtype; one that is not listed counts as float32."""
        return self.peak_flops.get(dtype, self.peak_flops["float32"])


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that take part in a collective: how many, and how many of them share a host."""

    size: int
    per_host: int

    @classmethod
    def neighbours(cls, size: int, device: Device) -> Group:
        """Ranks in a row, the first one the first of a host."""
        return cls(size, min(size, device.devices_per_host))

    @classmethod
    def of(cls, mesh: Mesh, axis: Axis, device: Device) -> Group:
        """The groups of an axis, by the first: the fewest that share a host count."""
        hosts: dict[int, int] = {}
        for rank in mesh.first_group(axis):
            host = rank // device.devices_per_host
            hosts[host] = hosts.get(host, 0) + 1
        return cls(mesh.size(axis), min(hosts.values()))

    @property
    def hosts(self) -> int:
        """Hosts that it lies on."""
        return -(-self.size // self.per_host)
