"""How ranks can have slices of modules with fused experts, found by running each of these on invented values.

    gate_up_proj    [E, 2I, H], or [E, H, 2I]    with or without gate_up_proj_bias [E, 2I]
    down_proj       [E, H, I], or [E, I, H]      with or without down_proj_bias [E, H]

The names say nothing of how forward reads them: first may come all of the gate and then all of up, or the two may alternate (every other
column), or there may be more between them. So a module is run with few columns (I = 32). Their order must not matter, and on two pretended
ranks with half of them each, what these return must add up to what the whole one returns. The second rank has zeros for the last bias, as
that is added once, and where it does their backward passes must add up as well. Modules that cannot be run, or return something else, stay
whole where they are called whole.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from smpc.codegen.rewrite.expert_parallel import PARTS

NAMES = ("down_proj", "gate_up_proj")
BIASES = ("down_proj_bias", "gate_up_proj_bias")
_INNER, _TOKENS, _CHOSEN = 32, 5, 2
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}  # what every module has


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """Names of modules. `undivided`: ranks cannot have slices of them. `alternating`: every other column is the gate's."""

    undivided: tuple[str, ...] = ()
    alternating: tuple[str, ...] = ()


def fused_experts(model: nn.Module) -> FusedExperts:
    """What is known of the modules with fused experts that a model has."""
    known: dict[object, bool | None] = {}
    alternates: dict[str, bool | None] = {}
    for name, module in model.named_modules():
        dim = columns_of(module)
        if dim is None:
            continue
        kind = (
            *(tuple(p.shape) for p in module._parameters.values() if p is not None),
            *map(_looks_of_fused_experts, module.modules()),
        )
        if kind not in known:
            known[kind] = _gate_alternates_with_up(module, dim)
        alternates[name] = known[kind]
    return FusedExperts(
        tuple(name for name, found in alternates.items() if found is None),
        tuple(name for name, found in alternates.items() if found),
    )


def columns_of(module: nn.Module) -> int | None:
    """The dimension of gate_up_proj that has 2I columns; None for a module that has other parameters."""
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    if sorted(own) not in (list(NAMES), sorted(NAMES + BIASES)) or any(own[name].dim() != 3 for name in NAMES):
        return None
    up, (num_experts, *sizes) = tuple(own["gate_up_proj"].shape), own["down_proj"].shape
    for dim in (1, 2):
        hidden, inner = sizes if dim == 1 else reversed(sizes)
        biases = ((num_experts, hidden), (num_experts, 2 * inner))
        if up == (num_experts, *((2 * inner, hidden) if dim == 1 else (hidden, 2 * inner))):
            has_biases = all(
                tuple(own[name].shape) == shape for name, shape in zip(BIASES, biases, strict=True) if name in own
            )
            return dim if has_biases else None
    return None


def _looks_of_fused_experts(module: nn.Module) -> tuple[object, ...]:
    """By what modules of one class may differ: numbers, texts, and which objects else they hold, such as functions and buffers."""
    found = [(name, value) for name, value in vars(module).items() if name not in _OF_TORCH]
    plain = (bool, int, float, str, type(None))
    own = tuple((name, repr(value) if isinstance(value, plain) else id(value)) for name, value in found)
    return type(module), own, tuple(map(id, module._buffers.values()))


def _gate_alternates_with_up(module: nn.Module, dim: int) -> bool | None:
    """Whether gate and up alternate; None if slices do not return summands of what the whole returns, in the mode that it is in.

    Nor where modules inside have parameters of their own: what these do now, such as adapters that begin at zero, they may not do later.
    """
    serves_others = PARTS in vars(module) and BIASES[0] in module._parameters
    if serves_others or any(True for child in module.children() for _ in child.parameters()):
        return None
    down = module._parameters["down_proj"]
    assert down is not None, "it is there"
    num_experts, hidden = down.shape[0], down.shape[dim]
    generator = torch.Generator().manual_seed(0)
    gate, up, back = (torch.randn(num_experts, _INNER, hidden, generator=generator) * hidden**-0.5 for _ in range(3))
    tokens = torch.randn(_TOKENS, hidden, generator=generator)
    index = torch.arange(_TOKENS * _CHOSEN).view(_TOKENS, _CHOSEN) % num_experts
    weights = torch.rand(_TOKENS, _CHOSEN, generator=generator)
    biases = [torch.randn(num_experts, size, generator=generator) for size in (_INNER, _INNER, hidden)]

    def run(columns: Tensor, alternate: bool, *, has_zeros: bool = False) -> _ModuleResult:
        join = _alternating if alternate else _one_after_the_other
        first, last = join(gate[:, columns], up[:, columns]), back[:, columns].transpose(1, 2).contiguous()
        if dim == 2:
            first, last = (value.transpose(1, 2).contiguous() for value in (first, last))
        own = (last, first, biases[2], join(biases[0][:, columns], biases[1][:, columns]))
        made = _fused_experts_with(module, dict(zip(NAMES + BIASES, own, strict=True)))
        zeros = {BIASES[0]: torch.zeros_like(biases[2])} if has_zeros and BIASES[0] in made._parameters else {}
        return _ModuleResult.of(made, zeros, tokens, index, weights, BIASES[0] in made._parameters)

    def adds_up(alternate: bool) -> bool:
        columns = torch.arange(_INNER)
        whole, turned = run(columns, alternate), run(columns.flip(0), alternate)
        parts = run(columns[: _INNER // 2], alternate), run(columns[_INNER // 2 :], alternate, has_zeros=True)
        return all(whole.equals(found) for found in (turned, parts[0] + parts[1]))

    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            return next((alternate for alternate in (False, True) if adds_up(alternate)), None)
    except Exception:  # whatever its forward raises
        return None


@dataclass(frozen=True, slots=True)
class _ModuleResult:
    """What a module returned, and the gradient of its weights of experts; 0 where that does not count."""

    result: Tensor
    gradient: Tensor

    @classmethod
    def of(
        cls, module: nn.Module, others: dict[str, Tensor], tokens: Tensor, index: Tensor, weights: Tensor, back: bool
    ) -> _ModuleResult:
        """With other parameters for the time of the call, as `smpc.executor.tensor_ops.on_summands` has them.

        What the module computes again in its backward, by checkpoints of its own, it would compute with its own ones. So with `back` its
        backward counts.
        """
        with torch.set_grad_enabled(back):
            leaves = [value.clone().requires_grad_(back) for value in (tokens, weights)]
            result: Tensor = functional_call(module, others, (leaves[0], index, leaves[1]))
        if back and result.requires_grad:
            torch.autograd.backward(result, torch.linspace(-1.0, 1.0, result.numel()).view(result.shape))
        gradient = leaves[1].grad
        return cls(result.detach(), torch.zeros(()) if gradient is None else gradient)

    def __add__(self, other: _ModuleResult) -> _ModuleResult:
        return _ModuleResult(self.result + other.result, self.gradient + other.gradient)

    def equals(self, other: _ModuleResult) -> bool:
        """But for rounding."""
        pairs = (self.result, other.result), (self.gradient, other.gradient)
        return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)


def _one_after_the_other(gate: Tensor, up: Tensor) -> Tensor:
    return torch.cat([gate, up], 1)


def _alternating(gate: Tensor, up: Tensor) -> Tensor:
    return torch.stack([gate, up], 2).flatten(1, 2)


def _fused_experts_with(module: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    """A module like this one, with other values of its parameters: not one that serves the tokens of other ranks.

    What it changes, such as counts in its buffers, is its own.
    """
    kind: Any = type(module).__bases__[-1] if PARTS in vars(module) else type(module)
    made: nn.Module = kind.__new__(kind)
    held = {id(parameter): parameter for parameter in module.parameters()}
    own = {name: value for name, value in vars(module).items() if name not in (PARTS, "_parameters")}
    made.__dict__.update(copy.deepcopy(own, {**held, id(module): made}))
    made.__dict__["_parameters"] = {
        name: None if parameter is None else nn.Parameter(values[name], requires_grad=False)
        for name, parameter in module._parameters.items()
    }
    if PARTS in vars(module):
        made.__dict__.update(dict.fromkeys(vars(module)[PARTS].counts, len(values[NAMES[0]])))
    for hooks in ("_forward_hooks", "_forward_pre_hooks"):
        made.__dict__[hooks] = type(vars(module)[hooks])()
    return made
