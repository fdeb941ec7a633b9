"""The compile gate: what it finds, that no kernel escapes it, and one way of compiling each kernel.

All variants on all targets take minutes: `make kernels`, and the slow test here.
"""

import ast

import pytest
from locations import REPOSITORY

pytest.importorskip("triton")

import triton
import triton.language as tl

from smpc.kernels.compile_gate import compile_all, compile_variant
from smpc.kernels.launch.variants import KERNEL_FILES, KernelVariant, variant, variants_of

KERNELS = REPOSITORY / "kernels"


@triton.jit
def spilling_kernel(source, out, BLOCK: tl.constexpr):
    """Every thread holds more values than it has registers, as all are needed after their sum is known."""
    index = tl.arange(0, BLOCK)
    values = tl.load(source + index)
    tl.store(out + index, values * tl.sum(values))


@triton.jit
def broken_kernel(out):
    tl.store(out, undefined_name)  # noqa: F821


def first_variants() -> list[KernelVariant]:
    """The first variant of each kernel."""
    found: dict[str, KernelVariant] = {}
    for module in KERNEL_FILES:
        for each in variants_of(module):
            found.setdefault(each.kernel.__name__, each)
    return list(found.values())


def test_every_kernel_has_a_variant():
    names = {each.kernel.__name__ for module in KERNEL_FILES for each in variants_of(module)}
    for file in sorted(KERNELS.rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list:
                assert node.name in names, f"{file.name}: {node.name} has no variant, see kernels/launch/variants.py"


def test_names_are_unique():
    names = [each.name for module in KERNEL_FILES for each in variants_of(module)]
    assert len(names) == len(set(names))


FIRST = first_variants()


@pytest.mark.matrix(6)
@pytest.mark.parametrize("turn", range(len(FIRST)), ids=[each.name for each in FIRST])
def test_one_variant_of_each_kernel_compiles(turn: int):
    """For one target each; over all kernels the targets take turns."""
    each = FIRST[turn]
    result = compile_variant(each, each.targets[turn % len(each.targets)])
    assert result.verdict() == "ok"
    assert result.registers > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_variant_compiles_for_every_target():
    results = list(compile_all())
    assert results
    assert [result for result in results if result.verdict() != "ok"] == []


def test_the_gate_finds_spills():
    each = variant("spilling", spilling_kernel, {"source": "*fp32:16", "out": "*fp32:16"}, {"BLOCK": 8192}, num_warps=1)
    assert "at most 16 expected" in compile_variant(each, 80).verdict()


def test_the_gate_finds_what_does_not_compile():
    verdict = compile_variant(variant("broken", broken_kernel, {"out": "*fp32"}, {}), 90).verdict()
    assert verdict.startswith("does not compile")
    assert "undefined_name" in verdict


def test_a_variant_names_every_argument():
    with pytest.raises(AssertionError, match="expected the kernel's arguments"):
        variant("incomplete", spilling_kernel, {"source": "*fp32"}, {"BLOCK": 16})
