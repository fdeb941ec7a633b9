"""Which optimizers update every element of a parameter independently, so that they may be given parts of parameters.

    is_elementwise(torch.optim.AdamW(parameters))    True
    is_elementwise(FusedLamb(parameters))            False: it takes norms of parameters

They are known by exact class: a subclass may do anything. `is_elementwise_in_trial` tells classes of others by what they do: it gives a
copy of the optimizer a small tensor, another copy the tensor's halves, and compares what three steps make of them.

`couples_parameters` tells, in the same way, optimizers whose update of one parameter depends on others (a norm over all gradients, one
step size that is found for all): where ranks update other parameters, each would see its own only.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

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

PER_PARAMETER: tuple[type[Optimizer], ...] = (
    *ELEMENTWISE,
    torch.optim.Adafactor,
    torch.optim.Muon,
    torch.optim.SparseAdam,
)

_TRIAL_STEPS = 3
_TRIAL_LR = 0.1
_MOST_TRIED = 8  # parameters
# Of gradients: steps by which a step size is found, then large ones, which a threshold for their norm cuts.
_MAGNITUDES = (*(1 + step / 10 for step in range(12)), 1e2, 1e4, 1e6)
_CHANGES = 0.0, 1.5, 0.4  # by how much a parameter's gradients change their direction between steps; in turns


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

    Its lr is another: the group's may be 0 now, as at the start of a warmup. Optimizers inside it have these parameters, too, where they
    share its groups.
    """
    parameters = [torch.nn.Parameter(value.clone()) for value in values]
    tried = {**group, **_trial_lr(group), "params": parameters}
    memo: dict[int, Any] = {id(optimizer.param_groups): [tried]}
    for each in optimizer.param_groups:
        memo[id(each)] = tried if each is group else {**each, "params": []}
        memo.update({id(entry): torch.nn.Parameter(torch.zeros_like(values[0])) for entry in each["params"]})
    trial = _copy_of(optimizer, memo)
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


class _AsksRanksError(Exception):
    """A step has come to a collective operation."""


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises _AsksRanksError where this rank would talk to others."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise _AsksRanksError
        return func(*args, **(kwargs or {}))


def couples_parameters(optimizer: Optimizer) -> bool | None:
    """Whether steps with gradients of several parameters change one of them otherwise than steps with its gradient alone.

    False, too, if the optimizer asks other ranks, and so knows of them. None if that cannot be tried: such steps fail, move nothing, or
    draw random numbers.
    """
    if type(optimizer) in PER_PARAMETER:
        return False
    entries = [entry for group in optimizer.param_groups for entry in group["params"]]
    for dtype, device in ((torch.float64, torch.device("cpu")), (entries[0].dtype, entries[0].device)):
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
                return _couples(optimizer, dtype, device)
        except _AsksRanksError:
            return False
        except Exception:  # another dtype or device may do, as for kernels of others
            continue
    return None


def _couples(optimizer: Optimizer, dtype: torch.dtype, device: torch.device) -> bool | None:
    start, together = _trajectories(optimizer, dtype, device, None)
    moved = [max(float((step[i] - start[i]).abs().max()) for step in together) for i in range(len(start))]
    noise = [64 * torch.finfo(dtype).eps * float(value.abs().max()) for value in start]
    if not any(far > least for far, least in zip(moved, noise, strict=True)):
        return None
    torch.rand(1)
    again = _trajectories(optimizer, dtype, device, None)[1]
    if any(
        not torch.equal(a, b)
        for one, other in zip(together, again, strict=True)
        for a, b in zip(one, other, strict=True)
    ):
        return None
    for i in range(len(start)):
        alone = _trajectories(optimizer, dtype, device, i)[1]
        for one, other in zip(alone, together, strict=True):
            far = float((other[i] - start[i]).abs().max())
            if not float((one[i] - other[i]).abs().max()) <= 1e-6 * far + noise[i]:
                return True
    return False


def _trajectories(
    optimizer: Optimizer, dtype: torch.dtype, device: torch.device, alone: int | None
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Some parameters of a small copy of the optimizer, and what they are after each step; only the one called `alone` has gradients."""
    trial, tried = small_copy(optimizer, dtype, device)
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(value.shape, generator=generator, dtype=torch.float64) for value in tried]
    start, found = [value.detach().clone() for value in tried], []
    for magnitude in _MAGNITUDES:
        changes = [torch.randn(value.shape, generator=generator, dtype=torch.float64) for value in tried]
        grads = [
            ((direction + change * _CHANGES[i % len(_CHANGES)]) * magnitude * 3.0**i).to(device, dtype)
            for i, (direction, change) in enumerate(zip(directions, changes, strict=True))
        ]

        def closure(grads: Sequence[Tensor] = grads) -> Tensor:
            for i, (value, grad) in enumerate(zip(tried, grads, strict=True)):
                value.grad = grad.clone() if alone in (None, i) else None
            return torch.ones((), dtype=dtype, device=device)

        closure()
        step_of_class(trial, closure)
        found.append([value.detach().clone() for value in tried])
    return start, found


def step_of_class(trial: Optimizer, closure: Callable[[], Tensor]) -> None:
    """A step without the hooks of the process; with a closure if there must be one."""
    step: Any = type(trial).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step
    needs_closure = any(
        name == "closure" and parameter.default is inspect.Parameter.empty
        for name, parameter in inspect.signature(step).parameters.items()
    )
    with _Alone():  # type: ignore[no-untyped-call]
        step(trial, closure) if needs_closure else step(trial)


def small_copy(optimizer: Optimizer, dtype: torch.dtype, device: torch.device) -> tuple[Optimizer, list[Tensor]]:
    """A copy without state and hooks whose parameters are small and new, with an lr that moves them; and some of these parameters.

    What the optimizer has in attributes is copied, too, so that a step of the copy reaches nothing of the original.
    """
    generator = torch.Generator().manual_seed(1)
    memo: dict[int, Any] = {}
    tried: list[Tensor] = []
    for group in optimizer.param_groups:
        wanted = 2
        for entry in group["params"]:
            shape = (4, 3, *(2 for _ in range(entry.dim() - 2)))[: entry.dim()]
            value = torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)
            small = memo[id(entry)] = torch.nn.Parameter(value, requires_grad=entry.requires_grad)
            if wanted and entry.requires_grad and len(tried) < _MOST_TRIED:
                tried.append(small)
                wanted -= 1
    trial = _copy_of(optimizer, memo)
    if len(tried) == 1:  # another one beside it
        group = next(group for group in trial.param_groups if any(each is tried[0] for each in group["params"]))
        tried.append(torch.nn.Parameter(tried[0].detach() + 1))
        group["params"].append(tried[1])
    for group in trial.param_groups:
        lr = group.get("lr")
        if isinstance(lr, Tensor):
            group["lr"] = torch.ones_like(lr)
        elif isinstance(lr, int | float):
            group["lr"] = 1.0
    return trial, tried


def _copy_of(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """A copy of an optimizer, and of optimizers in it, without state and hooks. `memo`: by identity, what the copy has in the place of an
    object."""
    trial = object.__new__(type(optimizer))
    memo[id(optimizer)] = trial
    for each in (optimizer, *(value for value in vars(optimizer).values() if isinstance(value, Optimizer))):
        memo[id(each.state)] = defaultdict(dict)
        for hooks in (value for name, value in vars(each).items() if name.endswith("_hooks")):
            memo[id(hooks)] = OrderedDict()
    kept = {name: value for name, value in vars(optimizer).items() if name not in ("step", "zero_grad")}
    trial.__dict__.update({name: copy.deepcopy(value, memo) for name, value in kept.items()})
    return trial
