"""Ring attention against attention of the whole in float64, beside what torch's own attention errs, on ranks that are threads."""

import pytest
import torch
import torch.nn.functional as F
from tensor_ranks import run_ranks, tensor_groups
from torch.nn.attention import SDPBackend, sdpa_kernel

from smpc.executor.collectives import in_own_order, own_pieces
from smpc.executor.sequence.ring import ring_attention
from smpc.executor.sequence.sliced import exchanged_attention


def drawn(length, heads=4, key_heads=2, dtype=torch.float32, keys=None):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, length, 16), *[(2, key_heads, keys or length, 16)] * 2, (2, heads, length, 16)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def whole_attention(q, k, v, grad, *, dtype, causal, bias=None):
    """Result and gradients by torch, in that type."""
    q, k, v = (tensor.detach().to(dtype, copy=True).requires_grad_() for tensor in (q, k, v))
    mask = None if bias is None else bias.to(dtype).expand(-1, -1, q.shape[2], -1)
    if causal and mask is not None:
        mask, causal = mask + torch.full(mask.shape[-2:], float("-inf"), dtype=dtype).triu(1), False
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    out.backward(grad.to(dtype))
    return [tensor.detach().double() for tensor in (out, q.grad, k.grad, v.grad)]


def on_ring(call, ranks, q, k, v, grad, *, causal, mirrored, bias=None):
    """The same from slices, put together again."""
    groups, cut = tensor_groups(ranks), (2, (), mirrored)

    def work(rank):
        own = [own_pieces(tensor.detach(), 2, rank, ranks, (), mirrored).requires_grad_() for tensor in (q, k, v)]
        out = call(groups[rank], cut, *own, bias, causal)
        out.backward(own_pieces(grad, 2, rank, ranks, (), mirrored))
        assert out.is_contiguous()
        return [out.detach(), *(tensor.grad for tensor in own)]

    parts = zip(*run_ranks(ranks, work), strict=True)
    return [in_own_order(torch.cat(part, 2), 2, ranks, (), mirrored).double() for part in parts]


def by_ring(group, cut, q, k, v, bias, causal):
    return ring_attention(group, cut, q, k, v, bias, causal=causal)


def by_exchange(group, cut, q, k, v, bias, causal):
    gqa = q.shape[1] != k.shape[1]
    return exchanged_attention(group, cut, q, k, v, bias, is_causal=causal, enable_gqa=gqa)


def errors(found, exact):
    return [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize("mirrored", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_error_is_at_most_twice_that_of_torch(ranks, causal, mirrored):
    tensors = drawn(64 * ranks)
    exact = whole_attention(*tensors, dtype=torch.float64, causal=causal)
    own = errors(whole_attention(*tensors, dtype=torch.float32, causal=causal), exact)
    found = errors(on_ring(by_ring, ranks, *tensors, causal=causal, mirrored=mirrored), exact)
    assert max(found) <= 2 * max(own), (found, own)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("length", [600, 258], ids=["four runs", "two runs"])
def test_long_slices_are_computed_in_triangles_and_rectangles(ranks, length):
    """The causal block, backward."""
    for mirrored in (True, False):
        tensors = drawn(length * ranks)
        exact = whole_attention(*tensors, dtype=torch.float64, causal=True)
        own = errors(whole_attention(*tensors, dtype=torch.float32, causal=True), exact)
        found = errors(on_ring(by_ring, ranks, *tensors, causal=True, mirrored=mirrored), exact)
        wide = errors(on_ring(by_ring, ranks, *(x.double() for x in tensors), causal=True, mirrored=mirrored), exact)
        assert max(found) <= 2 * max(own), (found, own)
        assert max(wide) < 1e-14


@pytest.mark.parametrize("key_heads", [1, 4])
@pytest.mark.parametrize("call", [by_ring, by_exchange])
def test_double_precision_has_its_own_error_alone(call, key_heads):
    tensors = drawn(32, key_heads=4 if call is by_exchange else key_heads, dtype=torch.float64)
    for causal, mirrored in ((True, True), (False, False)):
        exact = whole_attention(*tensors, dtype=torch.float64, causal=causal)
        found = on_ring(call, 2, *tensors, causal=causal, mirrored=mirrored)
        assert max(errors(found, exact)) < 1e-14


@pytest.mark.parametrize("causal", [True, False])
def test_hidden_keys_travel_as_a_bias(causal):
    """Padding at both ends of samples: a rank, and whole pieces, without a key that is seen."""
    q, k, v, grad = drawn(32, dtype=torch.float64)
    bias = torch.zeros(2, 1, 1, 32, dtype=torch.float64)
    bias[0, ..., 5:] = float("-inf")
    bias[1, ..., 30:] = float("-inf")
    exact = whole_attention(q, k, v, grad, dtype=torch.float64, causal=causal, bias=bias)
    for mirrored in (True, False):
        found = on_ring(by_ring, 4, q, k, v, grad, causal=causal, mirrored=mirrored, bias=bias)
        assert max(errors(found, exact)) < 1e-14


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["alibi", "offset", "lowest"])
def test_large_biases_err_at_most_twice_as_much_as_torch(kind, causal):
    """ALiBi over long sequences, and padded samples all of whose keys have the same large negative bias.

    By torch's formula: with the lowest number its kernel for CPUs has gradients as many times too large as there are keys.
    """
    tensors = drawn(512)
    bias = torch.zeros(2, 1, 1, 512)
    if kind == "alibi":
        bias = torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(1, 4, 1, 1) * torch.arange(512.0)
    else:
        bias[0] = -1e4 if kind == "offset" else torch.finfo(torch.float32).min
    with sdpa_kernel(SDPBackend.MATH):
        exact = whole_attention(*tensors, dtype=torch.float64, causal=causal, bias=bias)
        own = errors(whole_attention(*tensors, dtype=torch.float32, causal=causal, bias=bias), exact)
    for mirrored in (True, False):
        found = errors(on_ring(by_ring, 4, *tensors, causal=causal, mirrored=mirrored, bias=bias), exact)
        assert all(a <= 2 * max(b, 1e-6) for a, b in zip(found, own, strict=True)), (found, own)


def test_queries_that_see_nothing_get_zeros():
    q, k, v, grad = drawn(16, dtype=torch.float64)
    bias = torch.zeros(2, 1, 1, 16, dtype=torch.float64)
    bias[0] = float("-inf")
    out, *gradients = on_ring(by_ring, 2, q, k, v, grad, causal=False, mirrored=False, bias=bias)
    for tensor in (out, *gradients):
        assert torch.isfinite(tensor).all()
        assert not tensor[0].any()


def test_keys_of_another_length():
    tensors = drawn(16, dtype=torch.float64, keys=24)
    exact = whole_attention(*tensors, dtype=torch.float64, causal=False)
    assert max(errors(on_ring(by_ring, 2, *tensors, causal=False, mirrored=True), exact)) < 1e-14


def test_half_precision_sums_in_single():
    """Twice the error of torch's bfloat16 over all four ranks' blocks."""
    tensors = drawn(128, dtype=torch.bfloat16)
    exact = whole_attention(*tensors, dtype=torch.float64, causal=True)
    own = errors(whole_attention(*tensors, dtype=torch.bfloat16, causal=True), exact)
    found = errors(on_ring(by_ring, 4, *tensors, causal=True, mirrored=True), exact)
    assert max(found) <= 2 * max(own), (found, own)
