"""Models whose parameters are slices, for `smpc.nn.init.whole_fills`: the whole tensor behind each."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from smpc.codegen.rewrite.tensor_parallel.layouts import REPLICATED, Layout
from smpc.executor.collectives import TensorGroup
from smpc.executor.draws import draw_as_first
from smpc.executor.sharded_state import slice_of
from smpc.nn.init.whole_fills import WholeTensor, fill_whole
from smpc.sharding.tensors import own_part_of_sharded, sharded_like

ShapeOf = Callable[[str, Tensor], tuple[torch.Size, bool]]


def _as_it_is(name: str, parameter: Tensor) -> tuple[torch.Size, bool]:
    return parameter.shape, True


def note_sliced(
    model: nn.Module, layouts: Mapping[str, Layout], group: TensorGroup, shape_of: ShapeOf = _as_it_is
) -> None:
    """Ranks of `group` have slices of a model's parameters, by name; of others all. `shape_of`: a slice, and whether this rank has it."""
    seen = weakref.ref(model)

    def find(tensor: Tensor) -> WholeTensor | None:
        model = seen()
        names = () if model is None else (name for name, each in model.named_parameters() if each is tensor)
        name = next(iter(names), None)
        if name is None:
            return None
        shape, has_part = shape_of(name, tensor)
        layout = layouts.get(name, REPLICATED)

        def cut(whole: Tensor) -> Tensor:
            return sharded_like(tensor, own_part_of_sharded(tensor, slice_of(whole, layout, group)))

        def begin() -> None:
            draw_as_first(group, tensor.device)

        return WholeTensor(torch.Size(layout.whole_shape(shape, group.size)), cut if has_part else None, begin)

    if group.size > 1:
        weakref.finalize(model, fill_whole(find))
