"""A model whose weights, sequences or both several ranks share: recorded, rewritten and run in place (`smpc.in_place`).

Layouts of weights are chosen once, by a sample; every recording that follows keeps them.

Of sequences that scripts cut themselves, a rank's inputs are gathered before the model runs (`whole_inputs`), and its outputs are cut like
the inputs (`own_output`).

    the script      cuts dimension 1 of its inputs into 2n chunks, and passes chunks r and 2n - 1 - r on rank r of n
    before          the ranks gather the inputs, so that positions, masks and shifted labels are right for the whole sequence
    after           outputs that have the sequence as dimension 1 come back as this rank's chunks; losses are of the whole sequence

Every input tensor of two or three dimensions is cut so; tensors of one dimension or none are the same on all ranks.

The scale of gradients. Scripts average over all ranks, as FSDP does. All ranks of a sequence return the same loss, and each has the
gradients of all of it; of an output that is cut, every rank has a loss of its own chunks, and the mean of those counts. So gradients that
come back through cut outputs are divided by the number of ranks, and those that leave through inputs are multiplied by it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from smpc.codegen.rewrite.context_parallel.rewrite import ZIGZAG, ContextPlan
from smpc.codegen.rewrite.expert_parallel import parts_of_experts
from smpc.codegen.rewrite.tensor_parallel.layouts import Layout
from smpc.codegen.rewrite.tensor_parallel.rewrite import CONTEXT, TENSOR, group_attribute
from smpc.compile.divided_experts import find_sharing_plan
from smpc.compile.passes import ContextSharing, Sharing, rewrite_trace
from smpc.compile.result import Traced
from smpc.containers import map_tensors
from smpc.errors import SmpcError, UsageError
from smpc.executor.collectives import TensorGroup, gathered
from smpc.executor.shared_draws import draw_as_first
from smpc.executor.tensor_ops import all_gather, own_part
from smpc.experts.expert_linear import scale_gradient
from smpc.in_place import InPlace, WholeParameter, skeleton, whole_parameters
from smpc.nn.script_writes.between_steps import are_noticed, plain_parameters
from smpc.nn.script_writes.compare_writes import compare_scripts
from smpc.recorded_module import OPTIONS, check_not_shared
from smpc.sample_inputs import Inputs
from smpc.tracer.ir import NodeKind, Trace
from smpc.tracer.record import record
from smpc.v2.transforming.transformed_slices import (
    ParameterPart,
    PartsByName,
    SliceCut,
    keep_slices,
    note_slices,
    note_writes,
)

_DIM = 1


def whole_inputs(args: Any, kwargs: Mapping[str, Any], group: TensorGroup) -> tuple[Any, dict[str, Any]]:
    """The inputs of the whole sequence. UsageError on all ranks if they do not fit each other. Collective."""
    leaves, _ = tree_flatten((args, dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    _check_chunks(tensors, group)
    join: Callable[[Tensor], Tensor] = lambda tensor: _gathered_chunks(tensor, group)  # noqa: E731
    return map_tensors(join, args), map_tensors(join, dict(kwargs))


def own_output(value: Tensor, *, is_whole: bool, group: TensorGroup) -> Tensor:
    """This rank's chunks of an output that has the sequence as dimension 1."""
    own = own_part(value, _DIM, group, mirrored=True) if is_whole else value
    return scale_gradient(own, 1 / group.size) if own.requires_grad else own


def _is_cut(tensor: Tensor) -> bool:
    return tensor.dim() in (2, 3)


def _gathered_chunks(tensor: Tensor, group: TensorGroup) -> Tensor:
    if not _is_cut(tensor):
        return tensor
    if tensor.requires_grad:
        tensor = scale_gradient(tensor, group.size)
    return all_gather(tensor, _DIM, group, mirrored=True)


def _check_chunks(tensors: list[Tensor], group: TensorGroup) -> None:
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


def _check_same_batch(inputs: Any, group: TensorGroup) -> None:
    """UsageError on all ranks if the ranks that have slices of a model are called with other inputs. Collective."""
    tensors = [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]
    checksum = 0
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        checksum = zlib.crc32(f"{plain.dtype}{tuple(plain.shape)}".encode(), checksum)
        checksum = zlib.crc32(plain.reshape(-1).view(torch.uint8).numpy().tobytes(), checksum)
    device = tensors[0].device if tensors else torch.device("cpu")
    found = gathered(torch.tensor([checksum], device=device), 0, group).tolist()
    different = next((rank for rank, each in enumerate(found) if each != found[0]), None)
    if different is not None:
        raise UsageError(
            f"tensor parallelism: expected the same batch on the {group.size} ranks that have slices of the model, found another on rank "
            f"{different} of them than on rank 0; let them read the same samples: smpc.dist.get_sampler(data), or DistributedSampler(data, "
            "num_replicas=world_size // tp_size, rank=rank // tp_size)"
        )


_OPTIONS = dataclasses.replace(OPTIONS, draw_as_one_process=True)  # as the reference asks


class SharedForward(InPlace):
    """The forward of a model that ranks share. `tensor`, `context`: the groups, where there are several ranks."""

    def __init__(
        self,
        model: nn.Module,
        parameters: tuple[WholeParameter, ...],
        tensor: TensorGroup | None,
        context: TensorGroup | None,
        attention: str,
    ) -> None:
        super().__init__(model, parameters, self._rewritten)
        self.context = context
        self._groups = [group for group in (tensor, context) if group is not None]
        self._called: set[str] = set()
        self._tensor_group, self._has_new_program = tensor, False
        self._inputs: Any = ()
        self.layouts: Mapping[str, Layout] = {}
        self._tensor = None if tensor is None else Sharing(tensor.size, find_sharing_plan(model, "auto"))
        plan = ContextPlan(ZIGZAG, attention, output_dim=1)
        experts = parts_of_experts(model)
        self._context = None if context is None else ContextSharing(context.size, plan, experts=experts)

    def choose(self, model: nn.Module, samples: Sequence[Inputs]) -> None:
        """Chooses the layouts of weights, by the first of the samples that can be recorded. The last one's error if none can."""
        if self._tensor is None:
            return
        copied = skeleton(model, self._parameters).model
        for number, (args, kwargs) in enumerate(samples):
            try:
                with torch.enable_grad():
                    traced = self._rewritten(record(copied, args, kwargs))
            except SmpcError:
                if number + 1 == len(samples):
                    raise
                continue
            break
        assert traced.sharded is not None, "it was rewritten for the ranks of a group"
        chosen = traced.sharded
        self._called = {node.target for node in chosen.trace.nodes if node.kind is NodeKind.CALL_MODULE}
        self._tensor = dataclasses.replace(
            self._tensor, plan=dataclasses.replace(self._tensor.plan, layouts=chosen.layouts)
        )
        sliced = dict(chosen.layouts)
        self.layouts = {
            name: sliced[one.name] for one in chosen.trace.state if one.name in sliced for name in one.names
        }

    def is_inside(self, name: str) -> bool:
        """Whether a parameter is used by a module that is called whole."""
        return any(name.startswith(f"{module}.") for module in self._called)

    def otherwise(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for the whole sequence, cut like the inputs."""
        if self.context is not None:
            args, kwargs = whole_inputs(args, kwargs, self.context)
        self._inputs = (args, kwargs)
        try:
            with plain_parameters(self._model) if are_noticed(self._model) else contextlib.nullcontext():
                return super().otherwise(*args, **kwargs)
        finally:
            self._inputs = ()

    def begin(self, traced: Traced, device: torch.device) -> None:
        """The first call of a program compares inputs: ranks have the same ones.

        Ranks that share a model draw as the first of them, however the script has seeded them. Modules called whole may draw, too.
        """
        if self._tensor_group is not None and self._has_new_program:
            _check_same_batch(self._inputs, self._tensor_group)
        self._has_new_program = False
        compare_scripts(self._model)
        if any(node.random or node.kind is NodeKind.CALL_MODULE for node in traced.trace.nodes):
            for group in self._groups:
                draw_as_first(group, device)

    def finish(self, traced: Traced, position: int, value: Any) -> Any:
        """Outputs that have the sequence as dimension 1 are cut."""
        if self.context is None or not isinstance(value, Tensor):
            return value
        assert traced.context is not None, "it was rewritten for the ranks of a group"
        slices, whole = traced.context.slices
        if position not in slices and position not in whole:
            return value
        return own_output(value, is_whole=position in whole, group=self.context)

    def _rewritten(self, trace: Trace) -> Traced:
        self._has_new_program = True
        return rewrite_trace(trace, _OPTIONS, self._tensor, context=self._context)


def share(
    model: nn.Module,
    samples: Sequence[Inputs],
    tensor: TensorGroup | None,
    context: TensorGroup | None,
    *,
    attention: str,
    sources: Sequence[int] | None,
) -> SharedForward:
    """Has the ranks of the groups share a model, in place. `samples`: batches, one of which can be recorded. Collective.

    `sources`: see `smpc.v2.transforming.transformed_slices`.

    Raises TraceError if no sample can be recorded, ConfigError if the model is shared already.
    """
    for axis in (TENSOR, CONTEXT):
        check_not_shared(model, axis)
    whole = whole_parameters(model)
    shared = SharedForward(model, whole, tensor, context, attention)
    shared.choose(model, samples)
    if tensor is not None:
        vars(model)[group_attribute(TENSOR)] = tensor
        shapes = {name: one.shape for one in whole for name in one.names}
        parts = {
            name: ParameterPart((SliceCut(layout, shapes[name], tensor),), is_inside=shared.is_inside(name))
            for name, layout in shared.layouts.items()
        }
        keep_slices(model, shared.layouts, tensor, sources)
        note_slices(model, PartsByName(parts))
        note_writes(model, shared.layouts, tensor)
    if context is not None:
        vars(model)[group_attribute(CONTEXT)] = context
    vars(model)["forward"] = shared
    return shared
