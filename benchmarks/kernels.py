"""Every kernel on one GPU, beside its peers: the ratio, and TFLOP/s or the share of a `copy_`.

    python benchmarks/kernels.py                                       everything
    python benchmarks/kernels.py attention norms                       families: attention norms activations rotary losses optimizers
    python benchmarks/kernels.py --match rms_norm                      kernels whose name contains this
    python benchmarks/kernels.py --report benchmarks/results/h200.md   also writes the page, with versions and missed goals
    python benchmarks/kernels.py --tune                                every candidate of attention's tables of block sizes

Peers: torch's FlashAttention and cuDNN backends and compiled flex_attention for attention; eager torch, torch.compile(dynamic=False)
and Liger-Kernel, where it is installed, for the rest; torch's fused and foreach optimizers. A peer that cannot run a shape is named
with the reason. How things are timed: kernel_families/measure.py.

Exit status: 0 measured; 2 there is no NVIDIA GPU from Ampere on, or no Triton, and nothing was measured or written.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from kernel_families.attention import attention, tune
from kernel_families.fused import activations, norms, rotary_embedding
from kernel_families.losses import losses
from kernel_families.measure import Bench, Row
from kernel_families.optimizers import optimizers
from kernel_families.report import markdown, versions
from torch._functorch import config as functorch_config

FAMILIES: Mapping[str, Callable[[Bench], Iterator[Row]]] = {
    "attention": attention,
    "norms": norms,
    "activations": activations,
    "rotary": rotary_embedding,
    "losses": losses,
    "optimizers": optimizers,
}


def unfit() -> str:
    """Why nothing can be measured here; "" if it can."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return f"torch {torch.__version__} finds no NVIDIA GPU"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"{torch.cuda.get_device_name()} is older than Ampere, for which the kernels are written"
    return "" if importlib.util.find_spec("triton") else "Triton is not installed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"among {', '.join(FAMILIES)}; default: all")
    parser.add_argument("--match", default="", help="only kernels whose name contains this")
    parser.add_argument("--report", type=Path, metavar="FILE.md", help="write the results there as Markdown")
    parser.add_argument("--tune", action="store_true", help="time every candidate of attention's block sizes instead")
    options = parser.parse_args()
    unknown = [name for name in options.families if name not in FAMILIES]
    if unknown:
        parser.error(f"expected families among {', '.join(FAMILIES)}, found {', '.join(unknown)}")
    reason = unfit()
    if reason:
        print(f"benchmarks/kernels.py: {reason}; nothing was measured", file=sys.stderr)
        return 2
    # Backward passes are timed again and again over what one forward pass kept.
    functorch_config.donated_buffer = False
    print(", ".join(f"{name} {value}" for name, value in versions().items()))
    bench = Bench(match=options.match)
    if options.tune:
        for line in tune(bench):
            print(line, flush=True)
        return 0
    rows = []
    for family in options.families or FAMILIES:
        for row in FAMILIES[family](bench):
            print(row, flush=True)
            rows.append(row)
    if options.report is not None:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(markdown(rows, " ".join(["python", *sys.argv])))
        print(f"wrote {options.report}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
