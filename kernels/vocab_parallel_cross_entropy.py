"""Cross-entropy of logits whose classes are cut over the ranks of a group, as an op: `smpc::vocab_parallel_cross_entropy`.

    rank 0   logits [..., 0:V/n]      |   every rank has the same labels and, afterwards, the same losses;
    rank 1   logits [..., V/n:2V/n]   |   each gets the gradient of its own columns
    ...

    each rank    m_i, s_i, x_t (0 where the label is elsewhere), sum of x        one pass over its logits
    MAX          m = max m_i                                                     [rows]
    SUM          s = sum s_i exp(m_i - m), x_t, sum of x                         [3, rows]
    loss         as in `smpc.kernels.shared.token_loss`, from these four

The logits are read once forward and once backward; no rank ever holds the logits of another, and the backward pass does not
communicate. The group is an argument: nothing here knows of a mesh.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from smpc.errors import UsageError
from smpc.kernels.shared.tensor_checks import accumulation_dtype, as_rows
from smpc.kernels.shared.token_loss import (
    LossRule,
    RowStatistics,
    check_loss,
    combine,
    logits_gradient,
    reduce,
    statistics,
)


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: dist.ProcessGroup,
    *,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    inplace_backward: bool = False,
) -> Tensor:
    """The cross-entropy of this rank's columns `logits` [..., V/n] and labels `target` [...] of the whole vocabulary.

    Every rank of `group` calls it, with the same `target` and settings. `vocab_start` is the class of column 0, by default
    this rank times the columns; `vocab_size` the number of classes, by default the columns times the ranks. Columns from
    class `vocab_size` on are padding and have no probability. For the other arguments see `cross_entropy`.
    """
    op = "vocab_parallel_cross_entropy"
    columns = logits.shape[-1] if logits.dim() else 0
    first = group.rank() * columns if vocab_start is None else vocab_start
    classes = group.size() * columns if vocab_size is None else vocab_size
    check_loss(op, logits, target, LossRule(classes, first, ignore_index, label_smoothing, z_loss), reduction)
    if first < 0 or classes < 1:
        raise UsageError(f"{op}: expected vocab_start >= 0 and vocab_size >= 1, found {first} and {classes}")
    loss, _ = _vocab_parallel_cross_entropy(
        logits, target, group.group_name, first, classes, ignore_index, label_smoothing, z_loss, inplace_backward
    )
    return reduce(loss, target, ignore_index, reduction)


@torch.library.custom_op("smpc::vocab_parallel_cross_entropy", mutates_args=())
def _vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    group_name: str,
    first: int,
    classes: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    inplace_backward: bool,
) -> tuple[Tensor, Tensor]:
    rule = LossRule(classes, first, ignore_index, label_smoothing, z_loss)
    labels = target.reshape(-1)
    # The name is what an op can be given; functional collectives find their group by it in the same way.
    group = distributed_c10d._resolve_process_group(group_name)  # type: ignore[attr-defined, arg-type]
    rows = _merged(statistics(as_rows(logits), labels, rule), group)
    loss, lse = combine(rows, labels, rule)
    return loss.view(target.shape), lse.view(target.shape)


def _merged(mine: RowStatistics, group: dist.ProcessGroup) -> RowStatistics:
    """The statistics of whole rows, from the statistics of every rank's columns."""
    largest = mine.largest.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    # A rank whose part of a row is -inf throughout has nothing to add, whatever the others' maximum.
    weight = torch.where(mine.largest == -torch.inf, 0.0, torch.exp(mine.largest - largest))
    sums = torch.stack((mine.exponentials * weight, mine.at_label, mine.total))
    dist.all_reduce(sums, dist.ReduceOp.SUM, group)
    return RowStatistics(largest, *sums)


@_vocab_parallel_cross_entropy.register_fake
def _(
    logits: Tensor,
    target: Tensor,
    group_name: str,
    first: int,
    classes: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    inplace_backward: bool,
) -> tuple[Tensor, Tensor]:
    loss = logits.new_empty(target.shape, dtype=accumulation_dtype(logits.dtype))
    return loss, torch.empty_like(loss)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, _, first, classes, ignore_index, label_smoothing, z_loss, ctx.inplace = inputs
    ctx.rule = LossRule(classes, first, ignore_index, label_smoothing, z_loss)
    ctx.save_for_backward(logits, target, output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _lse: Tensor) -> tuple[Tensor | None, ...]:
    logits, target, lse = ctx.saved_tensors
    return logits_gradient(grad, logits, target, lse, ctx.rule, inplace=ctx.inplace), *(None,) * 8


_vocab_parallel_cross_entropy.register_autograd(_differentiate, setup_context=_save)
