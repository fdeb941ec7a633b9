"""Sequences that scripts cut themselves: a rank's inputs are gathered before the model runs, and its outputs are cut like the inputs.

    the script      cuts dimension 1 of its inputs into 2n chunks, and passes chunks r and 2n - 1 - r on rank r of n
    before          the ranks gather the inputs, so that positions, masks and shifted labels are right for the whole sequence
    after           outputs that have the sequence as dimension 1 come back as this rank's chunks; losses are of the whole sequence

Every input tensor of two or three dimensions is cut so; tensors of one dimension or none are the same on all ranks.

The scale of gradients. Scripts average over all ranks, as FSDP does. All ranks of a sequence return the same loss, and each has the
gradients of all of it; of an output that is cut, every rank has a loss of its own chunks, and the mean of those counts. So gradients that
come back through cut outputs are divided by the number of ranks, and those that leave through inputs are multiplied by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from smpc.errors import UsageError
from smpc.executor.collectives import TensorGroup, gathered
from smpc.executor.tensor_ops import all_gather, own_part
from smpc.experts.linear import scale_gradient

_DIM = 1


def whole_inputs(args: Any, kwargs: Mapping[str, Any], group: TensorGroup) -> tuple[Any, dict[str, Any]]:
    """The inputs of the whole sequence. UsageError on all ranks if they do not fit each other. Collective."""
    leaves, _ = tree_flatten((args, dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    _check(tensors, group)
    join: Callable[[Tensor], Tensor] = lambda tensor: _whole(tensor, group)  # noqa: E731
    return tree_map_only(Tensor, join, args), tree_map_only(Tensor, join, dict(kwargs))


def own_output(value: Tensor, *, is_whole: bool, group: TensorGroup) -> Tensor:
    """This rank's chunks of an output that has the sequence as dimension 1."""
    own = own_part(value, _DIM, group, mirrored=True) if is_whole else value
    return scale_gradient(own, 1 / group.size) if own.requires_grad else own


def _is_cut(tensor: Tensor) -> bool:
    return tensor.dim() in (2, 3)


def _whole(tensor: Tensor, group: TensorGroup) -> Tensor:
    if not _is_cut(tensor):
        return tensor
    if tensor.requires_grad:
        tensor = scale_gradient(tensor, group.size)
    return all_gather(tensor, _DIM, group, mirrored=True)


def _check(tensors: list[Tensor], group: TensorGroup) -> None:
    """UsageError if ranks have different shapes, or what cannot be a rank's part of a sequence."""
    device = tensors[0].device if tensors else torch.device("cpu")
    shapes = [tuple(tensor.shape) for tensor in tensors]
    odd = [list(tensor.shape) for tensor in tensors if _is_cut(tensor) and tensor.shape[_DIM] % 2]
    large = [list(tensor.shape) for tensor in tensors if tensor.dim() > 3]
    flat = [len(shapes), *(number for shape in shapes for number in (len(shape), *shape))]
    room = 64
    coded = (flat + [0] * room)[:room]
    everybody = gathered(torch.tensor([coded], device=device), 0, group).tolist()
    different = next((rank for rank, found in enumerate(everybody) if found != everybody[0]), None)
    if different is not None:
        raise UsageError(
            f"context parallelism: expected inputs of the same shapes on all {group.size} ranks of a sequence, found others on rank "
            f"{different} of them than on rank 0; here they are {shapes}; cut sequences into {2 * group.size} equal chunks"
        )
    if odd:
        raise UsageError(
            f"context parallelism: expected two chunks of equal length in dimension 1 of every input, found shapes {odd}; cut sequences "
            f"into {2 * group.size} equal chunks, and pass chunks r and {2 * group.size - 1} - r on rank r"
        )
    if large:
        raise UsageError(
            f"context parallelism: expected inputs of at most 3 dimensions, [batch, sequence, ...], found shapes {large}; pass masks as "
            "[batch, sequence], or None"
        )
