"""Which optimizers update every element of a parameter independently, so that they may be given parts of parameters.

    is_elementwise(torch.optim.AdamW(parameters))    True
    is_elementwise(FusedLamb(parameters))            False: it takes norms of parameters

They are known by exact class: a subclass may do anything. `is_elementwise_in_trial` tells classes of others by what they do: it gives a
copy of the optimizer a small tensor, another copy the tensor's halves, and compares what three steps make of them.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from smpc.optimizers.adamw import FusedAdamW

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    FusedAdamW,
)

_TRIAL_STEPS = 3
_TRIAL_LR = 0.1


def is_elementwise(optimizer: Optimizer, more: Sequence[type[Optimizer]] = ()) -> bool:
    """Whether an optimizer's update of an element depends on nothing else of the parameter. `more`: further classes that are known."""
    return type(optimizer) in (*ELEMENTWISE, *more)


def is_elementwise_in_trial(optimizer: Optimizer) -> bool:
    """Whether steps on halves of a tensor give the halves of steps on it. False, too, if such a step fails: it may need a closure."""
    return all(_treats_halves_alike(optimizer, group, dim) for group in optimizer.param_groups for dim in (0, 1))


def _treats_halves_alike(optimizer: Optimizer, group: Mapping[str, Any], dim: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    dtype = next((p.dtype for p in group["params"] if p.dtype.is_floating_point), torch.float32)
    start, *grads = torch.randn(1 + _TRIAL_STEPS, 6, 4, generator=generator).to(dtype).unbind(0)
    grads = [grad * torch.linspace(0.1, 3, 24).to(dtype).view(6, 4) for grad in grads]  # halves have other norms
    try:
        whole = _after_steps(optimizer, group, [start], [[grad] for grad in grads])[0]
        halves = _after_steps(optimizer, group, start.chunk(2, dim), [grad.chunk(2, dim) for grad in grads])
    except Exception:
        return False
    moved = (whole - start).abs().max() > 8 * torch.finfo(dtype).eps * start.abs().max()  # else nothing was tried
    return bool(moved) and torch.allclose(torch.cat(halves, dim), whole, rtol=1e-2 if dtype.itemsize < 4 else 1e-5)


def _after_steps(
    optimizer: Optimizer, group: Mapping[str, Any], values: Sequence[Tensor], grads: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """What a copy of the optimizer, with its options but without its state and hooks, makes of parameters of these values.

    Its lr is another: the group's may be 0 now, as at the start of a warmup.
    """
    parameters = [torch.nn.Parameter(value.clone()) for value in values]
    trial = object.__new__(type(optimizer))
    trial.__dict__.update(
        {name: copy.copy(v) if isinstance(v, (dict, list)) else v for name, v in vars(optimizer).items()}
    )
    trial.__dict__.update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
    trial.__dict__.update(state=defaultdict(dict), param_groups=[{**group, **_trial_lr(group), "params": parameters}])
    for step in grads:
        for parameter, grad in zip(parameters, step, strict=True):
            parameter.grad = grad.clone()
        type(optimizer).step(trial)
    return [parameter.detach() for parameter in parameters]


def _trial_lr(group: Mapping[str, Any]) -> dict[str, Any]:
    """An lr that moves parameters, a tensor where the group's is one."""
    lr = group.get("lr")
    if isinstance(lr, Tensor):
        return {"lr": torch.full_like(lr, _TRIAL_LR, device="cpu")}
    return {"lr": _TRIAL_LR} if isinstance(lr, int | float) else {}
