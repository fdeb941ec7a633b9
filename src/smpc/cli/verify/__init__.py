"""`smpc compile --verify`: the compiled programs beside the model itself, in one process, on one microbatch.

Where ranks share operations, sequences or experts: see `smpc.cli.verify.ranks`.

Inputs come from the factory. Inputs that `--input` gives by shape are drawn if the program is valid for any values: floats at random,
tokens of Hugging Face's models from their vocabulary. Other inputs are taken from `--input`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smpc.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from smpc.compile.result import Compilation
    from smpc.sample_inputs import Inputs
    from smpc.verification import Verified

_TOKENS = ("input_ids", "decoder_input_ids", "labels")
_COPIES = 3  # parameters, and gradients of both runs
_MEMORY = "/proc/meminfo"


def check_fits(model: nn.Module, what: str) -> None:
    """Raise ConfigError if this machine lacks the memory to run a model (perhaps on the meta device) both ways."""
    needed = _COPIES * sum(p.numel() * p.element_size() for p in model.parameters())
    free = available_memory()
    if free is not None and needed > free:
        raise ConfigError(
            f"--verify: {what} takes {needed / 1e9:.1f} GB, parameters with two sets of gradients, and this machine has "
            f"{free / 1e9:.1f} GB left; verify a configuration of fewer layers, which has the same modules"
        )


def available_memory() -> int | None:
    """Bytes that are free for programs; None where that is not told."""
    try:
        with open(_MEMORY, encoding="ascii") as file:
            rows = dict(line.split(":", 1) for line in file)
        return int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def verify_programs(
    model: nn.Module, sample_inputs: Any, compilation: Compilation, num_microbatches: int, *, is_drawn: bool
) -> Verified:
    """Compare them. `is_drawn`: whether the inputs' values were drawn at random. Raises VerificationError, ConfigError without values."""
    import torch

    from smpc.sample_inputs import as_inputs, first_microbatch
    from smpc.tracer import flatten
    from smpc.tracer.input_guards import broken_guard
    from smpc.tracer.replay import input_values
    from smpc.verification import Conditions, verify_compilation

    inputs = first_microbatch(as_inputs(sample_inputs), num_microbatches)
    tensors = [leaf for leaf in flatten(inputs)[0] if isinstance(leaf, torch.Tensor)]
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers(), *tensors)):
        raise ConfigError(
            "--verify: expected a model and inputs with values, found tensors on the meta device; have the factory make them on the CPU"
        )
    if is_drawn:
        others = drawn(model, inputs)
        is_for_these = broken_guard(compilation.trace, model, input_values(compilation.trace, *others)) is None
        inputs = others if is_for_these else inputs
    device = next((tensor.device for tensor in (*model.parameters(), *tensors)), torch.device("cpu"))
    return verify_compilation(model, compilation, inputs, Conditions(device))


def drawn(model: nn.Module, inputs: Inputs) -> Inputs:
    """Inputs of the same form with random values."""
    import torch

    args, kwargs = inputs
    generator = torch.Generator().manual_seed(0)
    size = getattr(getattr(model, "config", None), "vocab_size", 0)
    return args, {name: _random_input_to_verify(name, value, size, generator) for name, value in kwargs.items()}


def _random_input_to_verify(name: str, value: Tensor, vocabulary: int, generator: Any) -> Tensor:
    """An input at random: floats, or tokens of the vocabulary."""
    import torch

    if value.is_floating_point() and "mask" not in name:
        return torch.randn(value.shape, generator=generator).to(value.dtype)
    if name in _TOKENS and value.dtype == torch.int64 and vocabulary > 1:
        return torch.randint(vocabulary, value.shape, generator=generator)
    return value
