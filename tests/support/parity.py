"""A pipeline run and its reference: the same microbatches in one process, by the model itself."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from smpc.compile import Compilation
from smpc.runtime import LoopbackRuntime
from smpc.sample_inputs import Inputs
from smpc.tracer import flatten

Results = tuple[list[list[torch.Tensor]], dict[str, torch.Tensor | None], dict[str, torch.Tensor]]


def loss_of(output: Any) -> torch.Tensor:
    """The loss that a model returns, or one that depends on every floating-point output."""
    if getattr(output, "loss", None) is not None:
        return output.loss
    tensors = [leaf for leaf in flatten(output)[0] if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return torch.stack([(tensor.float() ** 2).mean() for tensor in tensors]).sum()


def split(batch: Inputs, microbatches: int) -> list[Inputs]:
    """The batch in equal parts along axis 0 of every tensor."""
    leaves, structure = flatten(batch)
    parts = [leaf.chunk(microbatches) if isinstance(leaf, torch.Tensor) else [leaf] * microbatches for leaf in leaves]
    return [structure.unflatten([part[m] for part in parts]) for m in range(microbatches)]


def results(model: nn.Module, outputs: Mapping[int, Any]) -> Results:
    """Output tensors by microbatch, gradients and buffers."""
    tensors = [
        [leaf.detach() for leaf in flatten(outputs[m])[0] if isinstance(leaf, torch.Tensor)] for m in sorted(outputs)
    ]
    return tensors, {name: p.grad for name, p in model.named_parameters()}, dict(model.named_buffers())


def run_eager(model: nn.Module, batch: Inputs, microbatches: int) -> Results:
    """Plain PyTorch with gradient accumulation, on a copy of the model."""
    model = copy.deepcopy(model)
    outputs = {}
    for m, (args, kwargs) in enumerate(split(batch, microbatches)):
        outputs[m] = model(*args, **kwargs)
        (loss_of(outputs[m]) / microbatches).backward()
    return results(model, outputs)


def run_loopback(model: nn.Module, compilation: Compilation, batch: Inputs) -> Results:
    """The compiled programs, all ranks in this process, on a copy of the model."""
    model = copy.deepcopy(model)
    runtime = LoopbackRuntime(model)
    program = runtime.install(compilation)
    microbatches = compilation.plan.schedule.num_microbatches
    outputs: dict[int, Any] = {}

    def on_output(m: int, output: Any) -> list[tuple[torch.Tensor, None]]:
        outputs[m] = output
        return [(loss_of(output) / microbatches, None)]

    runtime.run(program, split(batch, microbatches), on_output, training=True)
    return results(model, outputs)


def assert_same(expected: Results, got: Results, shared: tuple[str, ...] = ()) -> None:
    """Bitwise equality; gradients of parameters on several stages within rtol 1e-6, as their sum has another order."""
    for m, (ours, theirs) in enumerate(zip(got[0], expected[0], strict=True)):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(a, b), f"output {i} of microbatch {m} differs by {(a - b).abs().max()}"
    assert list(got[1]) == list(expected[1])
    for name, gradient in expected[1].items():
        found = got[1][name]
        assert (found is None) == (gradient is None), (
            f"gradient of {name}: {found is None=}, expected {gradient is None}"
        )
        if gradient is None or found is None:
            continue
        if name in shared:
            scale = gradient.abs().max().item()
            error = (found - gradient).abs().max().item()
            assert error <= 1e-6 * scale, f"gradient of shared {name} differs by {error}, largest value {scale}"
        else:
            assert torch.equal(found, gradient), f"gradient of {name} differs by {(found - gradient).abs().max()}"
    for name, buffer in expected[2].items():
        assert torch.equal(got[2][name], buffer), f"buffer {name} differs"
