"""The base of the fused optimizers: `torch.optim.Optimizer` semantics, buckets of tensors, state, and norms over ranks.

A step sorts the parameters that have gradients into buckets, which are updated together: one bucket for each device, choice of
dtypes, number of steps done and parameter group. Usually that is one a group. Parameters without gradients are skipped, and
no step is counted for them.

State of a parameter: `step` (no dimension, fp32, on the CPU, as torch has it), the moments in fp32 (fp64 for fp64), and with
`master_weights`, for fp16 and bf16 parameters, `master`: the fp32 value of which the parameter is a rounded copy, taken from it in its
first step. States of a DTensor parameter are DTensors placed alike. Unlike torch's `load_state_dict`, ours does not round to
the parameter's dtype.

The group option `kernel` selects the implementation: True the Triton kernels, False torch's foreach functions (for AdamW on
CUDA torch's fused kernel), None the one known to be faster (`smpc.kernels.setting`). If kernels cannot run, torch computes:
without Triton, on the CPU, for fp64, and for parameters with gaps in memory.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from smpc.errors import CheckpointError, ConfigError, ConfigTypeError
from smpc.kernels.optimizers import Bucket, kernels_update
from smpc.kernels.setting import used_by_default
from smpc.kernels.shared.tensor_checks import FLOATING_DTYPES, accumulation_dtype
from smpc.kernels.shared.tensor_table import TableCache, same_layout
from smpc.optimizers.norm_groups import NormGroups, ShardGroup, check_gradient, local_part


@dataclass(frozen=True, slots=True)
class Batch:
    """A bucket with the parameters it belongs to, their group, the steps done with this one, and the tables if kernels compute."""

    parameters: list[Tensor]
    bucket: Bucket
    group: dict[str, Any]
    step: int
    tables: TableCache | None

    def learning_rate(self) -> float | Tensor:
        """The group's: a number, or a tensor without dimension on the bucket's device, which the host does not wait for."""
        lr = self.group["lr"]
        if not isinstance(lr, Tensor):
            return float(lr)
        device = self.bucket.params[0].device
        return float(lr.detach()) if lr.device.type == "cpu" else lr.detach().reshape(()).to(device)


class FusedOptimizer(Optimizer, ABC):
    """The base class; see the module's docstring. A subclass defines what its class attributes say, `_update` and `_faults`."""

    op = ""  # the name in smpc.kernels.setting
    moments: tuple[str, ...] = ()  # states that look like the parameter, in the order of Bucket.first, second
    numbers: tuple[str, ...] = ()  # states without dimension, besides `step`
    norm_groups = NormGroups()

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        shard_group: ShardGroup | None,
        norm_group: dist.ProcessGroup | None,
    ) -> None:
        _check_groups(type(self).__name__, shard_group, norm_group)
        if shard_group is not None or norm_group is not None:
            self.norm_groups = NormGroups(shard_group, norm_group)
        self._tables = TableCache()
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """After unpickling, and in load_state_dict; options that a saved group lacks get their defaults. Process groups are not saved."""
        super().__setstate__(state)
        if "_tables" not in self.__dict__:
            self._tables = TableCache()
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    # -- arguments -------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters with options of their own. Raises ConfigError for options out of bounds and parameters that have no rule."""
        owner = type(self).__name__
        if not isinstance(param_group, dict):
            raise ConfigTypeError(
                f"{owner}: expected a parameter group to be a dict, found {type(param_group).__name__}"
            )
        if "params" not in param_group:
            raise ConfigError(f"{owner}: expected a parameter group with the key 'params', found {list(param_group)}")
        given = param_group["params"]
        if isinstance(given, set):
            raise ConfigTypeError(f"{owner}: expected parameters in a fixed order, a list for example, found a set")
        parameters = [given] if isinstance(given, Tensor) else list(given)
        options = {**self.defaults, **param_group}
        faults = [*_common_faults(options), *self._faults(options)]
        faults += [fault for entry in parameters for fault in _parameter_faults(entry)]
        if faults:
            raise ConfigError("\n".join(f"{owner}: {fault}" for fault in faults))
        super().add_param_group({**param_group, "params": parameters})

    @abstractmethod
    def _faults(self, options: Mapping[str, Any]) -> list[str]:
        """The errors of a group's options, besides the common ones."""

    # -- steps -----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; `closure` computes the loss anew, with gradients, and its value is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update(self._batches())
        return loss

    @abstractmethod
    def _update(self, batches: list[Batch]) -> None:
        """Updates the parameters of all batches."""

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears the gradients; unless told otherwise, as the optimizer's `set_grad_none` says."""
        super().zero_grad(self.defaults.get("set_grad_none", True) if set_to_none is None else set_to_none)

    def _batches(self) -> list[Batch]:
        found: dict[tuple[object, ...], Batch] = {}
        ready = [(number, group, p) for number, group in enumerate(self.param_groups) for p in group["params"]]
        ready = [entry for entry in ready if entry[2].grad is not None]
        for _, _, parameter in ready:  # all of them before anything changes
            check_gradient(parameter, parameter.grad, type(self).__name__)
        for number, group, parameter in ready:
            state = self._state_of(parameter, group)
            state["step"] += 1
            param, grad = local_part(parameter), local_part(parameter.grad)
            states = [local_part(state[name]) for name in self.moments]
            master = local_part(state["master"]) if "master" in state else None
            maximum = local_part(state["max_exp_avg_sq"]) if "max_exp_avg_sq" in state else None
            layouts = [other for other in (*states, master, maximum) if other is not None]
            kernel = used_by_default(self.op) if group["kernel"] is None else group["kernel"]
            kernel = kernel and kernels_update(param, grad) and all(same_layout(param, other) for other in layouts)
            if kernel and not same_layout(param, grad):
                grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
            step = int(state["step"])
            key = (number, param.device, param.dtype, grad.dtype, master is None, maximum is None, step, kernel)
            batch = found.get(key)
            if batch is None:
                batch = found[key] = Batch([], Bucket(), group, step, self._tables if kernel else None)
            entries = zip(
                batch.bucket.columns(), (param, grad, *_padded_optimizer_states(states), master, maximum), strict=True
            )
            for column, tensor in entries:
                if tensor is not None:
                    column.append(tensor)
            batch.parameters.append(parameter)
        return list(found.values())

    # -- state -----------------------------------------------------------------------------------------------------------

    def _state_of(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a parameter, made in its first step."""
        state: dict[str, Any] = self.state[parameter]
        dtype = accumulation_dtype(parameter.dtype)
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
            for name in (*self.moments, *(("max_exp_avg_sq",) if group.get("amsgrad") else ())):
                state[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            for name in self.numbers:
                state[name] = torch.zeros((), dtype=dtype, device=parameter.device)
        elif group.get("amsgrad") and "max_exp_avg_sq" not in state:
            state["max_exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        if group["master_weights"] and "master" not in state and parameter.dtype != dtype:
            state["master"] = torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(parameter)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of the same class of optimizer, of apex's where it has the same tensors, as torch's does, but without rounding.

        Raises CheckpointError if a parameter's state lacks something, or has another shape than the parameter.
        """
        given: dict[str, Any] = {}

        def take(_: Optimizer, final: dict[str, Any]) -> dict[str, Any]:
            given.update(self._completed(final))
            return given

        # The last hook before torch loads, and the first after it: users' hooks see and change what they do in torch.
        hooks = (
            self.register_load_state_dict_pre_hook(take),
            self.register_load_state_dict_post_hook(lambda _: self._restore(given), prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _completed(self, given: dict[str, Any]) -> dict[str, Any]:
        """A state dict in which every parameter has its `step`; apex counts them in the groups."""
        states = {key: dict(items) for key, items in given["state"].items()}
        groups = [dict(group) for group in given["param_groups"]]
        own = iter([parameter for group in self.param_groups for parameter in group["params"]])
        faults = []
        for group in groups:
            counted = group.pop("step", None)
            for key in group["params"]:
                items, parameter = states.get(key), next(own, None)
                if not items or parameter is None:  # torch refuses groups of other sizes
                    continue
                if counted is not None:
                    items.setdefault("step", torch.tensor(float(counted)))
                missing = [name for name in ("step", *self.moments, *self.numbers) if name not in items]
                if missing:
                    faults.append(f"expected {', '.join(missing)} in the state of parameter {key}, found {list(items)}")
                faults += [
                    fault for name, value in items.items() for fault in self._misfits(name, value, key, parameter)
                ]
        if faults:
            raise CheckpointError("\n".join(f"{type(self).__name__}.load_state_dict: {fault}" for fault in faults))
        return {**given, "state": states, "param_groups": groups}

    def _misfits(self, name: str, value: Any, key: Any, parameter: Tensor) -> list[str]:
        if name == "step" or name in self.numbers or not isinstance(value, Tensor):
            return []
        if value.shape != parameter.shape:
            return [
                f"expected {name} of parameter {key} with shape {tuple(parameter.shape)}, found {tuple(value.shape)}"
            ]
        if isinstance(value, DTensor) != isinstance(parameter, DTensor):
            return [
                f"expected {name} of parameter {key} as {type(parameter.data).__name__}, found {type(value).__name__}; "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict loads full states into DTensors"
            ]
        return []

    def _restore(self, given: Mapping[str, Any]) -> None:
        """Puts fp32 values where torch has rounded them to the parameter's dtype."""
        saved = [key for group in given["param_groups"] for key in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(saved, own, strict=True):
            dtype = accumulation_dtype(parameter.dtype)
            for name, value in given["state"].get(key, {}).items():
                if name == "step":
                    self.state[parameter][name] = torch.tensor(float(value))
                elif name in self.numbers:
                    self.state[parameter][name] = torch.as_tensor(value, dtype=dtype, device=parameter.device).clone()
                elif isinstance(value, Tensor) and value.is_floating_point():
                    like = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                    self.state[parameter][name] = like.copy_(value.detach())


def _padded_optimizer_states(states: Iterable[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    first, *rest = states
    return first, rest[0] if rest else None


def _check_groups(owner: str, shard_group: object, norm_group: object) -> None:
    if shard_group is not None and not callable(shard_group):
        raise ConfigTypeError(
            f"{owner}: expected shard_group to be a function from a parameter to its process group or None, "
            f"found {type(shard_group).__name__}; for all parameters: shard_group=lambda parameter: group"
        )
    if norm_group is not None and not isinstance(norm_group, dist.ProcessGroup):
        raise ConfigTypeError(
            f"{owner}: expected norm_group to be a torch.distributed.ProcessGroup, found {type(norm_group).__name__}"
        )


def _common_faults(options: Mapping[str, Any]) -> list[str]:
    faults = []
    lr, betas = options["lr"], options["betas"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            faults.append(f"expected lr to be a number or a tensor with one element, found shape {tuple(lr.shape)}")
        elif lr.device.type == "cpu" and not 0.0 <= float(lr) < math.inf:
            faults.append(f"expected lr >= 0, found {lr!r}")
    elif not is_number(lr) or not 0.0 <= lr < math.inf:
        faults.append(f"expected lr >= 0, found {lr!r}")
    if not (
        isinstance(betas, tuple | list) and len(betas) == 2 and all(is_number(b) and 0.0 <= b < 1.0 for b in betas)
    ):
        faults.append(f"expected betas to be two numbers from 0 to below 1, found {betas!r}")
    for name in ("eps", "weight_decay"):
        value = options[name]
        if not is_number(value) or not 0.0 <= value < math.inf:
            faults.append(f"expected {name} >= 0, found {value!r}")
    if options["kernel"] not in (None, True, False):
        faults.append(f"expected kernel to be None, True or False, found {options['kernel']!r}")
    return faults


def _parameter_faults(entry: Any) -> list[str]:
    parameter = entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry  # named parameters
    if not isinstance(parameter, Tensor):
        return [f"expected parameters to be tensors, found {type(parameter).__name__}"]
    if parameter.dtype not in FLOATING_DTYPES:
        expected = ", ".join(str(dtype) for dtype in FLOATING_DTYPES)
        return [f"expected parameters of dtype {expected}, found {parameter.dtype} with shape {tuple(parameter.shape)}"]
    if parameter.layout != torch.strided:
        return [f"expected dense parameters, found layout {parameter.layout} with shape {tuple(parameter.shape)}"]
    return []


def is_number(value: object) -> bool:
    """Whether an option is a number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)
