"""Descriptions of devices in numbers, for the cost model, and the devices that have a name.

A description has peaks, what kernels reach of them, and the wires between devices of a host and between hosts.

    Kernels(launch=5e-6, processors=132, products={"bfloat16": ((1.0, 0.72),)}, memory=((1.0, 0.9),), attention=(0.37, 0.33))

Terms
    curve       pairs (size, share), ascending sizes: what is reached of a peak by work of that size; in between it is a power of the
                size, beyond the ends it stays as it is. One pair: the same for all sizes
    product     a matrix product of m x k and k x n, or a batch of them; its size is its FLOPs
    tile        what one of the device's processors computes of a product at a time
    share       of a peak, from 0 to 1

A product runs in waves of one tile on every processor, and a wave that is not full takes as long as a full one:

    time = ceil(tiles / processors) * tile FLOPs * (k + 64) / k / (peak / processors * share * quality of the tile)

for the best of some tiles; 64 is how much of k passes before a tile is at work. With `processors` 0 there are no waves.

Times of a program beside its operations (`action`, `step`, `unit`, `unit_step`, `deferred`) are the processor's, and count where they are
stated: on a GPU they pass while kernels that were launched before are still at work.

What was measured of an operation (`operations`, by the names of `smpc.partitioner.costs.operation_kinds.name_of`) counts before all
that: its shares of the peak, by the FLOPs of one product, or of the memory bandwidth, by the bytes that it moves; in its forward and its
backward. What was measured of collectives counts for ranks of one host.

Peaks, bandwidths and sizes of the devices that have a name are from the makers' public datasheets, without sparsity.

float32 products are taken to run without TF32, as torch does by default. What kernels and wires reach of their peaks is what public
measurements of public libraries say, rounded, for work of any model. Memory's share and the variation of devices came in after a first
comparison with published training runs (docs/design/decisions.md, 49).

    products    cuBLAS on values drawn from a normal distribution, 8192 x 8192 x 8192: a device that is at its power limit is slower on
                them than on zeros. A100: 258 of 312 TFLOP/s (H. He, "Strangely, matrix multiplications on GPUs run faster when given
                'predictable' data", 2024). H100: 716 of 989 TFLOP/s (P. Shankhdhar, "Outperforming cuBLAS on H100", 2024)
    attention   FlashAttention-2, heads of 128, sequences of 2,048 and more: on A100 about 200 of 312 TFLOP/s forward and 175 backward
                (T. Dao, "FlashAttention-2", 2023); on H100 about 370 and 330 of 989 (J. Shah et al., "FlashAttention-3", 2024)
    memory      between BabelStream's triad (A100 80GB 1.75 of 2.04 TB/s, H100 SXM 3.0 of 3.35), as simple as kernels are, and PyTorch's
                softmax and LayerNorm (Triton's tutorials "Fused Softmax" and "Layer Normalization": 0.6 to 0.75 of an A100's)
    variation   8% on average between devices of one kind and cluster, at the same work (P. Sinha et al., "Not All GPUs Are Created Equal:
                Characterizing Variability in Large-Scale, Accelerator-Rich Systems", SC'22)
    launch      the time in which PyTorch's eager mode issues one operation after another
    wires       nccl-tests, bus bandwidth of large messages: DGX A100 230 of 300 GB/s, DGX H100 360 of 450 (rings, without reduction in
                the switch), between hosts nine tenths of the network; hops as in NCCL's own table of latencies (`src/graph/tuning.cc`)
    host        16 lanes of the PCIe that the datasheet names, of which copies from pinned memory get eight tenths (nvbandwidth's README:
                host_to_device_memcpy_ce, 26 of 32 GB/s of PCIe 4.0). The devices of a host are taken to copy at once. In a DGX A100 two
                share a switch's lanes to the host (DGX A100 system architecture white paper), and so each gets half. A CPU's copies read
                and write its memory, which halves it, and it does nothing else meanwhile
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from smpc.mesh import Axis, Mesh

Curve = tuple[tuple[float, float], ...]
ALL: Curve = ((1.0, 1.0),)
NONE: Curve = ((1.0, 0.0),)
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


def best_share(curve: Curve) -> float:
    """The best share of all sizes."""
    return max(share for _, share in curve)


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
    unit: Curve = (
        NONE  # s that torch's fully_shard needs for each unit in each microbatch, beside gathers and sums, by its bytes
    )
    unit_step: Curve = NONE  # s that it needs for each unit in each step, beside those and what the network does
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

    def least_product_time(self, flops: float, depth: int, peak: float, dtype: str) -> float:
        """Seconds that no product of so many FLOPs and this depth is below, whatever its rows and columns; depth 0: whatever that is."""
        fill = 1.0 + _FILL / depth if self.processors and depth else 1.0
        return flops * fill / (peak * best_share(self.products.get(dtype, ALL)))

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
        """Hosts that it is on."""
        return -(-self.size // self.per_host)


def _device_products(tensor: float, scalar: float = 0.9) -> Mapping[str, Curve]:
    """Shares of the peak: in dtypes with units for products, and in the others."""
    narrow = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    return MappingProxyType(
        dict.fromkeys(narrow, ((1.0, tensor),)) | dict.fromkeys(("float32", "float64"), ((1.0, scalar),))
    )


def _hopper_device(name: str, memory_bandwidth: float, memory_bytes: int, source: str) -> Device:
    """A device of the Hopper generation; its kinds differ in memory."""
    peak = {
        "float64": 67e12,
        "float32": 67e12,
        "bfloat16": 989e12,
        "float16": 989e12,
        "float8_e4m3fn": 1979e12,
        "float8_e5m2": 1979e12,
    }
    wires = Wire(450e9, 20e-6, 0.8, 2e-6), Wire(50e9, 50e-6, 0.9, 5e-6)
    kernels = Kernels(5e-6, 132, _device_products(0.724), ((1.0, 0.8),), (0.37, 0.33))
    host = Wire(64e9, 10e-6, 0.8)
    return Device(
        name,
        MappingProxyType(peak),
        memory_bandwidth,
        memory_bytes,
        8,
        *wires,
        source,
        "nccl",
        kernels,
        0.08,
        host=host,
    )


H100 = _hopper_device(
    "H100 SXM",
    3.35e12,
    80 * 10**9,
    "NVIDIA H100 Tensor Core GPU datasheet (SXM: 67 TFLOP/s FP32, 1979 TFLOP/s BF16 with sparsity, NVLink 900 GB/s "
    "and PCIe Gen5 128 GB/s in both directions), DGX H100 datasheet (8 devices, 400 Gbit/s network each)",
)
_H200 = _hopper_device(
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
    Wire(300e9, 20e-6, 0.77, 2e-6),
    Wire(25e9, 50e-6, 0.9, 5e-6),
    "NVIDIA A100 Tensor Core GPU datasheet (80GB SXM: 2039 GB/s, NVLink 600 GB/s and PCIe Gen4 64 GB/s in both directions), DGX A100 "
    "datasheet (8 devices, 200 Gbit/s network each)",
    kernels=Kernels(5e-6, 108, _device_products(0.827), ((1.0, 0.78),), (0.64, 0.56)),
    variation=0.08,
    host=Wire(32e9, 10e-6, 0.4),
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
    Wire(32e9, 20e-6, 0.8, 5e-6),
    Wire(12.5e9, 50e-6, 0.9, 5e-6),
    "NVIDIA L4 Tensor Core GPU datasheet (30.3 TFLOP/s FP32, 242 TFLOP/s BF16 with sparsity, 300 GB/s, PCIe Gen4 x16 "
    "64 GB/s in both directions); 100 Gbit/s network assumed, and shares of A100",
    kernels=Kernels(5e-6, 58, _device_products(0.827), ((1.0, 0.78),), (0.64, 0.56)),
    variation=0.08,
    host=PCIE4,
)
_CPU = Device(
    "CPU",
    MappingProxyType({"float64": 2.9e12, "float32": 5.9e12, "bfloat16": 5.9e12, "float16": 5.9e12}),
    204.8e9,
    256 * 10**9,
    2,
    Wire(10e9, 50e-6, 1.0, 50e-6),
    Wire(3.125e9, 100e-6, 1.0, 100e-6),
    "Intel Xeon Platinum 8380 (product specifications: 40 cores of 2.3 GHz, two AVX-512 FMA units each, eight channels of "
    "DDR4-3200), one device a socket; 256 GB of memory and a 25 Gbit/s network assumed",
    "gloo",
    host=Wire(102.4e9, 1e-6),
    is_assumed=True,
)
DEVICES: Mapping[str, Device] = MappingProxyType({"h100": H100, "h200": _H200, "a100": _A100, "l4": _L4, "cpu": _CPU})
