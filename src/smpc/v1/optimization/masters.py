"""fp32 masters: an optimizer updates them instead of half-precision parameters, which are their rounded copies.

    masters.adopt(optimizer, wanted)     in the optimizer's groups, masters take the parameters' places
    masters.refresh()                    takes over what others have written into the parameters: a loaded state dict, a user's copy_
    masters.take_gradients(1 / scale)    masters' gradients from the parameters'; 1 if one of them is not finite
    masters.write_back()                 after the optimizer's step

A master differs from its parameter by less than the parameter's precision. If an element differs by more, somebody has written into
the parameter, and the master takes the written value; other elements keep their bits. So it does not matter whether the parameters or
the masters of a checkpoint are loaded first. The parameter's version counter shows, at no cost, whether anything was written.

A parameter that is sharded over the replicas (`fully_shard`) has a sharded master, and each rank works on its part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from smpc.errors import UsageError
from smpc.sharding.tensors import local


@dataclass(slots=True)
class _Pair:
    parameter: Tensor
    master: nn.Parameter
    seen: tuple[int, int, int] = (-1, -1, -1)

    def state(self) -> tuple[int, int, int]:
        """A value that changes when the parameter, or this rank's part of it, is written or gets other memory."""
        own = local(self.parameter)
        return self.parameter._version, own._version, own.data_ptr()


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
