"""Cross-entropy of a vocabulary cut over real ranks equals the whole vocabulary's."""

import pytest
import torch
import torch.distributed as dist
from executor_harness import run_workers

from smpc.executor.collectives import TensorGroup, replicate_in
from smpc.kernels.cross_entropy import cross_entropy
from smpc.kernels.vocab_parallel_cross_entropy import _vocab_parallel_cross_entropy, vocab_parallel_cross_entropy
from smpc.nn import VocabParallelCrossEntropyLoss

RANKS = 2
RULES = (
    {},
    {"label_smoothing": 0.1, "z_loss": 0.01, "reduction": "sum"},
    {"ignore_index": 3, "inplace_backward": True},
)


def check(rank, folder):
    group = dist.group.WORLD
    torch.manual_seed(0)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float16, 2e-3)):
        for columns, classes in ((5, 10), (4, 7), (6, 6)):  # even; padded; all padding on the last rank
            for rule in RULES:
                whole = torch.randn(3, 4, columns * RANKS).to(dtype) * 3
                whole[0, 0, :columns] = -torch.inf  # nothing but -inf on the first rank
                target = torch.randint(classes, (3, 4))
                target[0] = torch.tensor([classes - 1, -100 if "ignore_index" not in rule else 3, 0, 1])
                if not rule.get("label_smoothing") and classes > columns:
                    compare(whole, target, group, rank, columns, classes, rule, tolerance)
                whole[0, 0] = 0.5
                compare(whole, target, group, rank, columns, classes, rule, tolerance)
    check_gradients(rank, group)
    mine = torch.randn(3, 5, requires_grad=True)
    labels = torch.tensor([0, 9, -100])
    torch.library.opcheck(
        _vocab_parallel_cross_entropy, (mine, labels, group.group_name, 5 * rank, 10, -100, 0.1, 0.0, False)
    )
    assert torch.equal(
        VocabParallelCrossEntropyLoss(group)(mine, labels), vocab_parallel_cross_entropy(mine, labels, group)
    )
    strided = torch.randn(3, 10)[:, ::2]
    torch.testing.assert_close(
        vocab_parallel_cross_entropy(strided, labels, group),
        vocab_parallel_cross_entropy(strided.contiguous(), labels, group),
    )
    empty = vocab_parallel_cross_entropy(mine[:0], labels[:0], group, reduction="sum")
    assert empty == torch.autograd.grad(empty, mine)[0].sum() == 0
    with pytest.raises(ValueError, match=r"found torch\.int64"):
        vocab_parallel_cross_entropy(mine.long(), labels, group)
    with pytest.raises(ValueError, match="labels from 0 to 9 or ignore_index -100, found 10"):
        vocab_parallel_cross_entropy(mine, labels + 1, group)
    with pytest.raises(ValueError, match="vocab_start >= 0 and vocab_size >= 1, found -1 and 10"):
        vocab_parallel_cross_entropy(mine, labels, group, vocab_start=-1)


def check_gradients(rank, group):
    """gradcheck moves the whole logits on all ranks alike; each rank's columns have their part of the gradient, which are added up."""
    ranks = TensorGroup.of(group)
    for rule in RULES[:2]:
        whole = torch.randn(3, 4 * RANKS, dtype=torch.float64, requires_grad=True)

        def loss(whole, rule=rule):
            own = replicate_in(whole, ranks)[:, 4 * rank : 4 * (rank + 1)]
            return vocab_parallel_cross_entropy(own, torch.tensor([6, 1, -100]), group, vocab_size=7, **rule)

        assert torch.autograd.gradcheck(loss, whole)


def compare(whole, target, group, rank, columns, classes, rule, tolerance):
    reference = whole[..., :classes].double().requires_grad_()
    expected = cross_entropy(reference, target, **{**rule, "inplace_backward": False})
    (expected_gradient,) = torch.autograd.grad(expected, reference)
    mine = whole[..., rank * columns : (rank + 1) * columns].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(mine.clone(), target, group, vocab_size=classes, **rule)
    (gradient,) = torch.autograd.grad(loss, mine)
    torch.testing.assert_close(loss.detach().double(), expected.detach(), rtol=tolerance, atol=tolerance)
    padded = torch.nn.functional.pad(expected_gradient, (0, columns * RANKS - classes))
    part = padded[..., rank * columns : (rank + 1) * columns]
    torch.testing.assert_close(gradient.double(), part, rtol=tolerance, atol=tolerance)


@pytest.mark.long
def test_ranks_agree_with_the_whole_vocabulary(tmp_path):
    assert run_workers(check, RANKS, tmp_path) == [None] * RANKS
