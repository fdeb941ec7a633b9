"""Context parallelism for any model, found by the compiler: record it, cut the sequence, keep the parameters whole, run.

    group = process_group                            # of torch.distributed
    module = shard(model, {"input_ids": ids, "labels": labels}, group)
    loss = module(input_ids=ids, labels=labels).loss
    loss.backward()                                  # every rank has the gradients of the whole batch
    print(module.source)                             # the program: collectives are calls on plain tensors
    print(describe(module))                          # layouts, collectives and bytes, and what is computed whole

Every rank of the group has the whole model, runs the same inputs and gets the same outputs. It computes and keeps only its slice of every
intermediate value that has the sequence as a dimension. An operation that no rule can split is computed whole on every rank; it is
correct, and `describe` names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from smpc.codegen.rewrite.context_parallel.rewrite import AUTO, ContextPlan, ContextTrace, describe_context
from smpc.codegen.rewrite.expert_parallel import parts_of_experts
from smpc.codegen.rewrite.tensor_parallel.rewrite import CONTEXT, group_attribute
from smpc.compile.passes import ContextSharing, rewrite_trace
from smpc.compile.result import Traced
from smpc.errors import ConfigError
from smpc.executor.collectives import TensorGroup
from smpc.recorded_module import RecordedModule, check_not_shared, record_modes
from smpc.tracer.ir import Trace
from smpc.tracer.record import Recording

__all__ = ["ContextModule", "describe", "place", "shard"]


class ContextModule(RecordedModule):
    """One rank's view of a model whose sequences several ranks share. It has the model's parameters, and is called like the model."""

    def __init__(
        self,
        model: nn.Module,
        group: TensorGroup,
        recordings: Mapping[bool, Recording],
        sharing: ContextSharing,
        draw_as_one_process: bool = False,
    ) -> None:
        super().__init__(recordings, draw_as_one_process)
        self.training = model.training
        self.group, self._sharing = group, sharing
        vars(model)[group_attribute(CONTEXT)] = group
        self._begin(model)
        _ = self._program

    @property
    def rewritten(self) -> ContextTrace:
        """Layout, collectives, and operations computed whole, in the present mode."""
        found = self._program.traced.context
        assert found is not None, "it was rewritten for the ranks of a group"
        return found

    def _rewritten(self, trace: Trace) -> Traced:
        return rewrite_trace(trace, self._options, context=self._sharing)


def shard(
    model: nn.Module,
    sample_inputs: Any,
    group: dist.ProcessGroup | TensorGroup,
    *,
    layout: str = AUTO,
    attention: str = AUTO,
    sequence_dims: Mapping[str, int | Sequence[int]] | None = None,
    outputs: Sequence[str] | None = None,
    draw_as_one_process: bool = False,
) -> ContextModule:
    """This rank's view of `model`, which must be the same on all ranks of `group`.

    `sample_inputs`: one batch, in the forms of `smpc.sample_inputs`. `layout`: "contiguous", "zigzag" (equal work in causal attention;
    lengths must be divisible by twice the number of ranks) or "auto". `attention`: "p2p" (a ring), "all_gather" (of keys and values),
    "a2a" (slices of heads for slices of the sequence) or "auto", the cheapest; where a way does not apply, all_gather is used.
    `sequence_dims`: the sequence dimension of each input, such as {"input_ids": 1}; by default all dimensions but the first. `outputs`
    are the only tensors that calls return, such as ("loss",), so that logits need not be gathered; by default all are returned.
    `draw_as_one_process`: dropout drops the same elements as without the group, at a cost in memory and time
    (docs/tensor_parallel_compiler.md). On every rank, gradients equal the gradients of one process with the whole batch. Raises ConfigError
    for a wrong layout, input or output, and for lengths that the ranks do not divide; TraceError for a model that cannot be recorded.
    """
    check_not_shared(model, CONTEXT)
    dims = {name: (own,) if isinstance(own, int) else tuple(own) for name, own in (sequence_dims or {}).items()}
    known = group if isinstance(group, TensorGroup) else TensorGroup.of(group)
    plan = ContextPlan(layout, attention, tuple(dims.items()))
    sharing = ContextSharing(known.size, plan, outputs, experts=parts_of_experts(model))
    return ContextModule(model, known, record_modes(model, sample_inputs), sharing, draw_as_one_process)


def place(model: nn.Module, context: ContextTrace, group: dist.ProcessGroup | TensorGroup) -> None:
    """Gives a model the group that shares its sequences, for programs made by `compile_model(..., context_parallel_degree=2)`.

    A `smpc.Runtime` over the model then runs the compilation, with pipeline parallelism, too; every pipeline rank has its own group. With
    tensor parallelism `smpc.tensor_parallel.place` is called as well. ConfigError for a group of another size.
    """
    check_not_shared(model, CONTEXT)
    known = group if isinstance(group, TensorGroup) else TensorGroup.of(group)
    if known.size != context.sharded.degree:
        raise ConfigError(
            f"expected a group of {context.sharded.degree} context-parallel ranks, found one of {known.size}"
        )
    vars(model)[group_attribute(CONTEXT)] = known


def describe(module: ContextModule) -> str:
    """A text for people: slices, the collectives of every block with the bytes that a rank sends, and operations computed whole."""
    return describe_context(module.rewritten)
