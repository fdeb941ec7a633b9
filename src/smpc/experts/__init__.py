"""Experts on the ranks of a group: tokens go to the ranks of their experts, and what the experts make of them comes back.

    rows, plan = dispatch(hidden, index, num_experts, group)      hidden [N, H], index [N, k]: the k experts of every token
    outputs = experts(rows, plan.counts)                          this rank's experts, on their rows, which are grouped by expert
    result = combine(outputs, plan, weights, group)               [N, H]: the weighted sums

What is used by other parts of smpc, and stays as it is:

    dispatch, combine, Plan              `smpc.experts.dispatch`: all-to-all or all-gather, dropless or with a capacity
    owned                                the experts that a rank holds
    grouped_linear                       `smpc.experts.expert_linear`: one linear layer for each expert, in one call
    sinkhorn, balanced, top_k            `smpc.experts.routers`: logits [N, E] to the index [N, k] and weights [N, k] of the experts
    aux_loss, z_loss, join_loss          `smpc.experts.routers`
    shuffle, unshuffle                   `smpc.experts.shuffle`: tokens permuted over all ranks of the group
    scale_gradient                       `smpc.experts.expert_linear`: for averages of gradients over ranks

Every function is collective over its group where it takes one: all ranks call it, in the same order. Ranks may have different numbers of
tokens, and none. Results do not depend on the number of ranks, but for the rounding of gradients, which sum in another order.
"""

from smpc.experts.dispatch import WAYS, DispatchPlan, combine, dispatch, owned
from smpc.experts.expert_linear import grouped_linear, scale_gradient
from smpc.experts.routers import aux_loss, balanced, join_loss, sinkhorn, top_k, z_loss
from smpc.experts.shuffle import Shuffle, shuffle, unshuffle

__all__ = [
    "WAYS",
    "DispatchPlan",
    "Shuffle",
    "aux_loss",
    "balanced",
    "combine",
    "dispatch",
    "grouped_linear",
    "join_loss",
    "owned",
    "scale_gradient",
    "shuffle",
    "sinkhorn",
    "top_k",
    "unshuffle",
    "z_loss",
]
