"""The tensors that a rank's optimizer updates: parameters or their fp32 masters; all of them, only those that the rank owns, or
parts of them.

    updates.prepare(model)          once the model is partitioned, and again when parameters have come
    updates.take(1 / scale)         masters' gradients
    updates.step()                  the optimizer's step; parameters are rounded masters again, and alike on all replicas

The groups of the wrapped optimizer hold the update target in place of each parameter. A parameter that this rank does not update has
no gradient while the optimizer steps, so any optimizer skips it.

`is_elementwise` says which optimizers update every element of a parameter independently, so that ranks may update ranges of it. A class
that is not known (LAMB, NovoGrad, Adafactor, Muon, LBFGS, SparseAdam, classes of others) gets whole parameters. Slices of tensor-parallel
ranks cannot be made whole: there `is_elementwise_in_trial` tries the optimizer (`smpc.optimizers.elementwise`).

fp32 masters: an optimizer updates them instead of half-precision parameters, which are their rounded copies.

    masters.adopt(optimizer, wanted)     in the optimizer's groups, masters take the parameters' places
    masters.refresh()                    takes over what others have written into the parameters: a loaded state dict, a user's copy_
    masters.take_gradients(1 / scale)    masters' gradients from the parameters'; 1 if one of them is not finite
    masters.write_back()                 after the optimizer's step

A master differs from its parameter by less than the parameter's precision. If an element differs by more, somebody has written into
the parameter, and the master takes the written value; other elements keep their bits. So it does not matter whether the parameters or
the masters of a checkpoint are loaded first. Version counters, of the parameter and of its `data`, show at no cost whether anything was
written.

A parameter that is sharded over the replicas (`fully_shard`) has a sharded master, and each rank works on its part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from smpc.errors import UsageError
from smpc.mesh import Axis
from smpc.nn.script_writes.data_aliases import data_version, watch_data
from smpc.optimizers import elementwise
from smpc.sharding.dtensors import local, updating_parts
from smpc.v1.model.distributed_model import DistributedModel
from smpc.v1.optimization import fused as session_fused
from smpc.v1.optimization.sharded_optimizer_state import AssignedParameter, OwnParts, Shards


@dataclass(slots=True)
class _Pair:
    parameter: Tensor
    master: nn.Parameter
    seen: tuple[int, ...] = ()

    def state(self) -> tuple[int, ...]:
        """A value that changes when the parameter, or this rank's part of it, is written or gets other memory."""
        own = local(self.parameter)
        return self.parameter._version, own._version, data_version(self.parameter), own.data_ptr()


class Masters:
    """The masters of the parameters that this rank updates."""

    def __init__(self) -> None:
        self._pairs: dict[int, _Pair] = {}  # by id of the parameter
        self._parameters: dict[int, Tensor] = {}  # by id of the master

    def __len__(self) -> int:
        return len(self._pairs)

    def adopt(self, optimizer: Optimizer, wanted: Callable[[Tensor], bool]) -> None:
        """Put masters in the optimizer's groups, for every parameter that is wanted and has none yet; its state moves with it."""
        for group in optimizer.param_groups:
            # In place: some optimizers keep the list.
            group["params"][:] = [self._place(optimizer, p) if self._lacks(p, wanted) else p for p in group["params"]]

    def _lacks(self, entry: Tensor, wanted: Callable[[Tensor], bool]) -> bool:
        return id(entry) not in self._parameters and id(entry) not in self._pairs and wanted(entry)

    def _place(self, optimizer: Optimizer, parameter: Tensor) -> nn.Parameter:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        master = nn.Parameter(parameter.detach().to(dtype, copy=True))
        watch_data(parameter)
        pair = self._pairs[id(parameter)] = _Pair(parameter, master)
        pair.seen = pair.state()
        self._parameters[id(master)] = parameter
        if parameter in optimizer.state:
            optimizer.state[master] = optimizer.state.pop(parameter)
        return master

    def parameter_of(self, entry: Tensor) -> Tensor:
        """The model's parameter behind an entry of the optimizer's groups."""
        return self._parameters.get(id(entry), entry)

    def master_of(self, parameter: Tensor) -> nn.Parameter | None:
        """The master of a parameter, if this rank has it."""
        pair = self._pairs.get(id(parameter))
        return None if pair is None else pair.master

    def all(self) -> list[nn.Parameter]:
        """All masters, in order."""
        return [pair.master for pair in self._pairs.values()]

    @torch.no_grad()
    def refresh(self) -> None:
        """Apply writes to parameters to their masters."""
        for pair in self._pairs.values():
            now = pair.state()
            if now != pair.seen:
                pair.seen = now
                master = local(pair.master)
                parameter = local(pair.parameter).to(master.device)
                written = parameter != master.to(parameter.dtype)
                master.copy_(torch.where(written, parameter.to(master.dtype), master))

    @torch.no_grad()
    def take_gradients(self, inverse_scale: float | None) -> float:
        """Give masters the gradients of their parameters, times `inverse_scale`; returns 1.0 if one is not finite, else 0.0.

        Without `inverse_scale` nothing is checked.
        """
        self.drop_gradients()
        kinds: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for pair in self._pairs.values():
            grad = pair.parameter.grad
            if grad is None:
                continue
            _check_dense(grad, pair.parameter)
            pair.master.grad = torch.empty_like(pair.master)
            own, given = kinds.setdefault((pair.master.device, pair.master.dtype), ([], []))
            own.append(local(pair.master.grad))
            given.append(local(grad))
        found = []
        for (device, _), (own, given) in kinds.items():
            torch._foreach_copy_(own, given)
            if inverse_scale is not None:
                found.append(torch.zeros(1, device=device))
                factor = torch.full((1,), inverse_scale, device=device)
                parts = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in own]
                torch._amp_foreach_non_finite_check_and_unscale_(parts, found[-1], factor)
        return max((float(each) for each in found), default=0.0)

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply the masters' gradients."""
        places: dict[torch.device, list[Tensor]] = {}
        for pair in self._pairs.values():
            if pair.master.grad is not None:
                places.setdefault(pair.master.device, []).append(local(pair.master.grad))
        for device, grads in places.items():
            torch._foreach_mul_(grads, factor.to(device))

    def drop_gradients(self) -> None:
        """Free the masters' gradients."""
        for pair in self._pairs.values():
            pair.master.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Round masters into the parameters that have been updated."""
        updated = [pair for pair in self._pairs.values() if pair.master.grad is not None]
        if updated:
            torch._foreach_copy_([local(pair.parameter) for pair in updated], [local(pair.master) for pair in updated])
        for pair in updated:
            pair.seen = pair.state()

    @torch.no_grad()
    def write(self, parameter: Tensor) -> None:
        """Round the master of one parameter into it."""
        pair = self._pairs[id(parameter)]
        local(pair.parameter).copy_(local(pair.master))
        pair.seen = pair.state()


def _check_dense(grad: Tensor, parameter: Tensor) -> None:
    if grad.layout is not torch.strided:
        raise UsageError(
            f"optimizer: expected dense gradients under fp16 and bf16, found {grad.layout} for a parameter of shape "
            f"{tuple(parameter.shape)}; use sparse=False"
        )


ELEMENTWISE: tuple[type[Optimizer], ...] = (*elementwise.ELEMENTWISE, session_fused.FusedAdamW)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer's update of an element depends on nothing else of the parameter; see `smpc.optimizers.elementwise`."""
    return type(optimizer) in ELEMENTWISE


def is_elementwise_in_trial(optimizer: Optimizer) -> bool:
    """The same of classes that are not known, by what they do to a small tensor."""
    return is_elementwise(optimizer) or elementwise.is_elementwise_in_trial(optimizer)


class Updates:
    """This rank's part in the updates of `optimizer`. `half`: the dtype of parameters with masters; `shards`: the owners, if any."""

    def __init__(
        self, optimizer: Optimizer, half: torch.dtype | None, shards: Shards | None, tp_size: int = 1, ep_size: int = 1
    ) -> None:
        self._optimizer, self._tp_size, self._ep_size = optimizer, tp_size, ep_size
        self.half, self.shards = half, shards
        self.is_plain = half is None and shards is None  # the wrapped optimizer updates parameters directly
        self.parts, self.masters = OwnParts(), Masters()
        self.is_stepping = False  # gradients of parameters that this rank does not own are hidden
        self._known: tuple[bool, ...] = ()

    def parameters(self) -> list[Tensor]:
        """The model's parameters, in the optimizer's order."""
        return [self.parameter_of(entry) for group in self._optimizer.param_groups for entry in group["params"]]

    def parameter_of(self, entry: Tensor) -> Tensor:
        """The model's parameter that `entry` replaces in the groups: itself, a part or a master of it, or a master of a part."""
        return self.parts.parameter_of(self.masters.parameter_of(entry))

    def master_of(self, parameter: Tensor) -> Tensor | None:
        """The master of a parameter, or of the part of it that this rank updates."""
        return self.masters.master_of(self.parts.entry_of(parameter))

    def write_master(self, parameter: Tensor) -> None:
        """Round the master of a parameter, or of a part of it, into it."""
        self.masters.write(self.parts.entry_of(parameter))

    def owns(self, parameter: Tensor) -> bool:
        """Whether this rank updates a parameter that it holds."""
        return self.shards is None or self.shards.owns(parameter)

    def prepare(self, model: DistributedModel) -> None:
        """Create missing owners and masters, and apply writes to parameters."""
        if self.is_plain or not model.partitioned:
            return
        parameters = self.parameters()
        known = tuple(parameter.requires_grad for parameter in parameters)
        if known != self._known:
            self._known = known
            names = {id(parameter): name for name, parameter in model.named_parameters()}
            local = {id(parameter) for parameter in model.local_parameters()}
            if self.shards is not None:
                held = [p for p in parameters if id(p) in local]
                self.shards.assign([self._entry(model, names[id(p)], p) for p in held])
                for parameter in held:
                    if not self.owns(parameter):  # some optimizers make state before the first step
                        self._optimizer.state.pop(parameter, None)
                self.parts.adopt(self._optimizer, self.shards.range_of)
            if self.half is not None:
                foreign = names.keys() - local
                self.masters.adopt(self._optimizer, lambda p: id(p) not in foreign and p.requires_grad and self.owns(p))
        self.parts.refresh()
        self.masters.refresh()

    def _entry(self, model: DistributedModel, name: str, parameter: Tensor) -> AssignedParameter:
        slice_ = model.slices.get(name)
        holders = Axis.RDP if model.is_scaled_batch_parameter(parameter) else Axis.DP  # type: ignore[arg-type]
        if model.has_experts_apart(parameter):
            holders = Axis.EXPERT_DATA
        dtype = parameter.dtype if self.half is None else torch.promote_types(parameter.dtype, torch.float32)
        shape, ranks, dim = tuple(parameter.shape), 1, 0 if slice_ is None else slice_.dim
        if model.is_distributed_parameter(parameter):  # type: ignore[arg-type]
            # Slices may be of different sizes, and the ranks that hold them must agree.
            shape, ranks = model.slices.whole_shape(name, shape), self._tp_size
            if holders is Axis.EXPERT_DATA:
                ranks *= self._ep_size
        rows = shape[dim] // ranks if self._may_be_cut(parameter, dim) else 0
        return AssignedParameter(parameter, math.prod(shape) * dtype.itemsize // ranks, holders, rows, dim)

    def _may_be_cut(self, parameter: Tensor, dim: int) -> bool:
        """Whether ranks may update ranges of a parameter. Parts without masters must be contiguous: fused optimizers need it."""
        if parameter.dim() == 0 or isinstance(parameter, DTensor) or not is_elementwise(self._optimizer):
            return False
        return parameter.is_contiguous() and (dim == 0 or self.half is not None)

    def step(self) -> Any:
        """Update. Collective over the ranks that hold the same parameters, if state is sharded."""
        self.is_stepping = True
        try:
            with self._hidden(), updating_parts(self._optimizer):
                result = self._optimizer.step()
        finally:
            self.is_stepping = False
        self.masters.write_back()
        self.drop_gradients()
        if self.shards is not None:
            self.shards.gather()
        return result

    def drop_gradients(self) -> None:
        """Free the masters' gradients; parts drop the parameters'."""
        self.masters.drop_gradients()
        self.parts.drop_gradients()

    @contextmanager
    def _hidden(self) -> Iterator[None]:
        """Hides the gradients of parameters that this rank does not update."""
        hidden: list[tuple[Tensor, Tensor]] = []
        for group in self._optimizer.param_groups:
            for entry in group["params"]:
                if entry.grad is not None and not self.owns(entry):
                    hidden.append((entry, entry.grad))
                    entry.grad = None
        try:
            yield
        finally:
            for entry, grad in hidden:
                entry.grad = grad
