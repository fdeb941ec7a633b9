"""Rank 0's values in a model whose layers are sliced, and then sharded.

values = Values(model, source, "cpu")
values.slice(tensor, mesh, is_meta=...)         before the units are made
...                                             fully_shard, unit by unit
values.settle()                                 after

every rank has values      they are rank 0's first, then sliced, then sharded
some have meta tensors     layers are sliced and sharded on meta; then rank 0 gives the others tensor by tensor: they hold their part,
                           and one tensor
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from smpc.errors import ConfigUnsupportedError
from smpc.fsdp.tensor_slices import AXIS, TensorConfig, slice_layers
from smpc.sharding import exchange
from smpc.sharding.dtensors import local, own_part_of_sharded
from smpc.sharding.shard import Incoming


class ValuesBeforeSlicing:
    """The parameters of a model before it is sliced. `source`: gives rank 0's; `offload`: shards are kept in CPU memory."""

    def __init__(self, model: nn.Module, source: Incoming, device_type: str, *, offload: bool = False) -> None:
        self._model, self._source, self._device_type = model, source, device_type
        self._parts_on = "cpu" if offload else device_type
        self._before = dict(model.named_parameters(remove_duplicate=False))
        self._is_meta = False

    @torch.no_grad()
    def slice(self, tensor: TensorConfig, mesh: DeviceMesh, *, is_meta: bool) -> None:
        """Slice the layers that a plan names. `is_meta`: whether some rank has meta tensors. Collective."""
        self._is_meta = is_meta
        if is_meta:
            shapes = {
                old: nn.Parameter(torch.empty_like(old, device="meta"), requires_grad=old.requires_grad)
                for old in self._before.values()
            }
            exchange(self._model, shapes)
        else:
            for old in self._model.parameters():
                old.copy_(self._source.take(old))
        slice_layers(self._model, tensor, mesh)

    @torch.no_grad()
    def settle(self) -> None:
        """Send values to ranks that lack them, and free whole parameters. Collective.

        Raises ConfigUnsupportedError where this rank's part of a parameter is not what its description says: torch has rules of its own
        for parts of slices.
        """
        if self._is_meta:
            self._make_room()
        wrong = []
        for name, new in self._model.named_parameters():
            old = self._before[name]
            if old is new:  # neither sliced nor sharded
                continue
            values = self._brought(old, new) if self._is_meta else old
            if values.numel() and not torch.equal(local(new), own_part_of_sharded(new, values).to(new.device)):
                wrong.append(name)
            old.data = torch.empty(0, dtype=old.dtype, device=old.device)
        if wrong:
            raise ConfigUnsupportedError(
                f"tp: torch {torch.__version__} does not divide the slices of {', '.join(wrong[:5])} as it says; choose degrees that "
                "divide their dimensions"
            )

    def _make_room(self) -> None:
        """For parameters alone: buffers have values on some ranks."""
        buffers = [(module, dict(module._buffers)) for module in self._model.modules()]
        self._model.to_empty(device=self._parts_on)
        for module, own in buffers:
            module._buffers.update(own)

    def _brought(self, old: Tensor, new: Tensor) -> Tensor:
        """Rank 0's values of a parameter, of which this rank has taken its part. Collective."""
        values = self._source.take(old if old.is_meta else old.to(self._device_type))
        own, part = local(new), _part_of_slice(new, values)
        if own.shape == part.shape:
            own.copy_(part)
        return values


def _part_of_slice(parameter: Tensor, values: Tensor) -> Tensor:
    """This rank's part of its slice of a whole tensor, as `fully_shard` makes it; a view."""
    if not isinstance(parameter, DTensor):
        return values
    mesh = parameter.device_mesh
    axes: list[tuple[str, Any]] = list(zip(mesh.mesh_dim_names or (), parameter.placements, strict=True))
    for axis, placement in sorted(axes, key=lambda each: each[0] != AXIS):  # the slice first, then its part
        if not placement.is_replicate():
            within = [Shard(placement.dim)]
            sizes, starts = compute_local_shape_and_global_offset(values.shape, mesh[axis], within)
            dim = placement.dim
            values = values.narrow(dim, min(starts[dim], values.shape[dim]), sizes[dim])
    return values
