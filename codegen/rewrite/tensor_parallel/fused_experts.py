"""Which modules with fused experts compute what the rule of `expert_rules` takes them for: each is run on invented values.

    gate_up_proj    [E, 2I, H], or [E, H, 2I]    first all of the gate, then all of up
    down_proj       [E, H, I], or [E, I, H]

The names say nothing of how forward reads them: gate and up may alternate (every other column), or there may be more between them. So a
module is run with few columns (I = 32), on two pretended ranks with half of them each, and what these return must add up to what the
whole one returns. Modules that cannot be run, or return something else, stay whole where they are called whole.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from smpc.codegen.rewrite.expert_parallel import PARTS

NAMES = ("down_proj", "gate_up_proj")
_INNER, _TOKENS, _CHOSEN = 32, 5, 2
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}  # what every module has


def undivided_experts(model: nn.Module) -> tuple[str, ...]:
    """The names of the modules with fused experts of which ranks cannot have slices."""
    known: dict[object, bool] = {}
    found = []
    for name, module in model.named_modules():
        dim = columns_of(module)
        if dim is None:
            continue
        kind = (*(tuple(module._parameters[own].shape) for own in NAMES), *map(_looks, module.modules()))
        if kind not in known:
            known[kind] = _adds_up(module, dim)
        if not known[kind]:
            found.append(name)
    return tuple(found)


def columns_of(module: nn.Module) -> int | None:
    """The dimension of gate_up_proj that has 2I columns; None for a module that has other parameters."""
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    if sorted(own) != list(NAMES) or any(parameter.dim() != 3 for parameter in own.values()):
        return None
    up, (num_experts, *sizes) = tuple(own["gate_up_proj"].shape), own["down_proj"].shape
    for dim in (1, 2):
        hidden, inner = sizes if dim == 1 else reversed(sizes)
        if up == (num_experts, *((2 * inner, hidden) if dim == 1 else (hidden, 2 * inner))):
            return dim
    return None


def _looks(module: nn.Module) -> tuple[object, ...]:
    """By what modules of one class may differ: numbers, texts, and which objects else they hold, such as functions and buffers."""
    found = [(name, value) for name, value in vars(module).items() if name not in _OF_TORCH]
    plain = (bool, int, float, str, type(None))
    own = tuple((name, repr(value) if isinstance(value, plain) else id(value)) for name, value in found)
    return type(module), own, tuple(map(id, module._buffers.values()))


def _adds_up(module: nn.Module, dim: int) -> bool:
    """Whether slices of the experts return summands of what they return, in the mode that they are in.

    Not where modules inside have parameters of their own: what these do now, such as adapters that begin at zero, they may not do later.
    """
    if any(True for child in module.children() for _ in child.parameters()):
        return False
    down = module._parameters["down_proj"]
    assert down is not None, "it is there"
    num_experts, hidden = down.shape[0], down.shape[dim]
    generator = torch.Generator().manual_seed(0)
    gate, up, back = (torch.randn(num_experts, _INNER, hidden, generator=generator) for _ in range(3))
    tokens = torch.randn(_TOKENS, hidden, generator=generator)
    index = torch.arange(_TOKENS * _CHOSEN).view(_TOKENS, _CHOSEN) % num_experts
    weights = torch.rand(_TOKENS, _CHOSEN, generator=generator)
    gate, up, back = (value * hidden**-0.5 for value in (gate, up, back))

    def run(columns: slice) -> Tensor:
        first = torch.cat([gate[:, columns], up[:, columns]], 1)
        last = back[:, columns].transpose(1, 2).contiguous()
        if dim == 2:
            first, last = (value.transpose(1, 2).contiguous() for value in (first, last))
        result: Tensor = _with(module, first, last)(tokens, index, weights)
        return result

    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
            whole = run(slice(0, _INNER))
            halves = run(slice(0, _INNER // 2)) + run(slice(_INNER // 2, _INNER))
    except Exception:  # whatever its forward raises
        return False
    return whole.shape == halves.shape and torch.allclose(whole, halves, rtol=1e-4, atol=1e-5)


def _with(module: nn.Module, gate_up: Tensor, down: Tensor) -> nn.Module:
    """A module like this one, with other parameters: not one that serves the tokens of other ranks.

    What it changes, such as counts in its buffers, is its own.
    """
    kind: Any = type(module).__bases__[-1] if PARTS in vars(module) else type(module)
    made: nn.Module = kind.__new__(kind)
    held = {id(parameter): parameter for parameter in module.parameters()}
    own = {name: value for name, value in vars(module).items() if name not in (PARTS, "_parameters")}
    made.__dict__.update(copy.deepcopy(own, {**held, id(module): made}))
    values = {"gate_up_proj": gate_up, "down_proj": down}
    made.__dict__["_parameters"] = {name: nn.Parameter(values[name], requires_grad=False) for name in NAMES}
    for hooks in ("_forward_hooks", "_forward_pre_hooks"):
        made.__dict__[hooks] = type(vars(module)[hooks])()
    return made
