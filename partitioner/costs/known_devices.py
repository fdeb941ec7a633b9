"""The devices that have a name. Peaks, bandwidths and sizes are those of the makers' public datasheets, without sparsity.

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

from collections.abc import Mapping
from types import MappingProxyType

from smpc.partitioner.costs.description import PCIE4, Curve, Device, Kernels, Wire


def _products(tensor: float, scalar: float = 0.9) -> Mapping[str, Curve]:
    """Shares of the peak: in dtypes with units for products, and in the others."""
    narrow = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    return MappingProxyType(
        dict.fromkeys(narrow, ((1.0, tensor),)) | dict.fromkeys(("float32", "float64"), ((1.0, scalar),))
    )


def _hopper(name: str, memory_bandwidth: float, memory_bytes: int, source: str) -> Device:
    peak = {
        "float64": 67e12,
        "float32": 67e12,
        "bfloat16": 989e12,
        "float16": 989e12,
        "float8_e4m3fn": 1979e12,
        "float8_e5m2": 1979e12,
    }
    wires = Wire(450e9, 20e-6, 0.8, 2e-6), Wire(50e9, 50e-6, 0.9, 5e-6)
    kernels = Kernels(5e-6, 132, _products(0.724), ((1.0, 0.8),), (0.37, 0.33))
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


H100 = _hopper(
    "H100 SXM",
    3.35e12,
    80 * 10**9,
    "NVIDIA H100 Tensor Core GPU datasheet (SXM: 67 TFLOP/s FP32, 1979 TFLOP/s BF16 with sparsity, NVLink 900 GB/s "
    "and PCIe Gen5 128 GB/s in both directions), DGX H100 datasheet (8 devices, 400 Gbit/s network each)",
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
    Wire(300e9, 20e-6, 0.77, 2e-6),
    Wire(25e9, 50e-6, 0.9, 5e-6),
    "NVIDIA A100 Tensor Core GPU datasheet (80GB SXM: 2039 GB/s, NVLink 600 GB/s and PCIe Gen4 64 GB/s in both directions), DGX A100 "
    "datasheet (8 devices, 200 Gbit/s network each)",
    kernels=Kernels(5e-6, 108, _products(0.827), ((1.0, 0.78),), (0.64, 0.56)),
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
    kernels=Kernels(5e-6, 58, _products(0.827), ((1.0, 0.78),), (0.64, 0.56)),
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
