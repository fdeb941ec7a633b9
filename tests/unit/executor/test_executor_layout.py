import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from smpc.errors import TransportError
from smpc.executor.transport import WireFormat
from smpc.tracer.ir import TensorSpec


def arrive(tensor, spec):
    """Send through a byte buffer, as a transport does; returns what the receiver has."""
    form = WireFormat.of("v", spec)
    wire = form.wire(form.conform(tensor))
    assert wire.is_contiguous()
    buffer = form.empty(torch.device("cpu"))
    target = form.wire(buffer)
    assert target.is_contiguous()
    assert target.data_ptr() == buffer.data_ptr()
    target.copy_(wire)
    return form.unpack(buffer)


@st.composite
def dense_tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    return torch.randn([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])


@given(dense_tensors())
def test_dense_tensors_keep_their_layout(tensor):
    found = arrive(tensor, TensorSpec.of(tensor))
    assert torch.equal(found, tensor)
    for size, a, b in zip(tensor.shape, found.stride(), tensor.stride(), strict=True):
        assert size <= 1 or a == b or tensor.numel() == 0


@given(dense_tensors(), dense_tensors())
def test_other_layouts_are_copied_into_the_planned_one(tensor, planned):
    if tensor.shape == planned.shape:
        found = arrive(tensor, TensorSpec.of(planned))
        assert torch.equal(found, tensor)
        assert found.stride() == planned.stride()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(3.0).expand(2, 3),
        torch.arange(12.0).view(3, 4)[:, :2].unsqueeze(1).expand(3, 2, 2),
        torch.arange(12.0).as_strided((3, 3), (1, 1)),
        torch.tensor(True),
        torch.empty(0, 3, dtype=torch.int64),
    ],
    ids=["expanded", "expanded slice", "overlapping", "0-dim bool", "empty"],
)
def test_what_is_expanded_or_overlaps_arrives_contiguous(tensor):
    found = arrive(tensor, TensorSpec.of(tensor))
    assert found.is_contiguous()
    assert torch.equal(found, tensor)


@pytest.mark.parametrize(
    ("tensor", "strides"),
    [
        (torch.randn(2, 768)[:, :64], (80, 1)),  # rows apart, and aligned alike
        (torch.randn(2, 70)[:, :64], (70, 1)),
        (torch.randn(2, 3, 100)[..., 5:9], (60, 20, 1)),  # evenly spaced elements stay so, and views as one
        (torch.randn(4, 5, 6)[:, 2:4], (14, 6, 1)),
        (torch.randn(4, 5, 600)[:, 2:4].transpose(0, 1), (600, 1208, 1)),  # dimensions keep their order
        (torch.randn(3, 40)[:, ::4], (20, 2)),
        (torch.randn(6, 50, 1)[:, 7], (2, 1)),
        (torch.zeros(8, 99, dtype=torch.bool)[:, 3:7], (35, 1)),
    ],
)
def test_slices_keep_their_gaps_if_not_the_size_of_them(tensor, strides):
    """They arrived contiguous; kernels that walk over a slice otherwise then gave other last bits, in state-space models for one."""
    found = arrive(tensor, TensorSpec.of(tensor))
    assert torch.equal(found, tensor)
    assert found.stride() == strides
    assert found.untyped_storage().nbytes() == TensorSpec.of(tensor).arrival_bytes
    assert found.untyped_storage().nbytes() <= tensor.untyped_storage().nbytes()


@st.composite
def slices(draw):
    tensor = draw(dense_tensors())
    for dim in range(tensor.dim()):
        start, stop, step = draw(st.integers(0, 2)), draw(st.integers(2, 4)), draw(st.integers(1, 2))
        tensor = tensor.as_strided(tensor.shape, tensor.stride()).movedim(dim, 0)[start:stop:step].movedim(0, dim)
    return tensor


@given(slices())
def test_a_layout_on_arrival_is_its_own(tensor):
    spec = TensorSpec.of(tensor)
    found = arrive(tensor, spec)
    assert torch.equal(found, tensor)
    again = arrive(found, TensorSpec.of(found))
    assert again.stride() == found.stride()
    assert found.untyped_storage().nbytes() == spec.arrival_bytes
    for dim in range(tensor.dim() - 1):  # what can be viewed as one dimension still can, and no more

        def joins(x, dim=dim):
            return x.shape[dim] == 1 or x.shape[dim + 1] == 1 or x.stride(dim) == x.stride(dim + 1) * x.shape[dim + 1]

        assert joins(found) == joins(tensor) or not tensor.numel()


def test_right_layout_is_not_copied():
    tensor = torch.randn(3, 4, requires_grad=True).t()
    form = WireFormat.of("v", TensorSpec.of(tensor))
    sent = form.wire(form.conform(tensor))
    assert sent.data_ptr() == tensor.data_ptr()
    assert not sent.requires_grad


@pytest.mark.parametrize(
    "lazy", [torch.tensor([1 + 2j, 3 - 4j]).conj(), torch.tensor([1 + 2j]).conj().imag], ids=["conjugate", "negative"]
)
def test_what_travels_are_the_values(lazy):
    """`z.conj()` is the memory of z, and a bit that says how to read it. gloo sent the memory alone: another number arrived."""
    assert lazy.is_conj() or lazy.is_neg()
    form = WireFormat.of("v", TensorSpec.of(lazy))
    sent = form.wire(form.conform(lazy))
    assert not sent.is_conj()
    assert not sent.is_neg()
    assert torch.equal(sent, lazy)


def test_check():
    form = WireFormat.of("h", TensorSpec((2, 3), "float32", (3, 1)))
    form.check(torch.zeros(2, 3), "edge 4", gradients=True)
    form.check(torch.zeros(2, 3, requires_grad=True), "edge 4", gradients=False)
    with pytest.raises(TransportError, match=r"edge 4: value 'h' was planned as float32\[2, 3\], found int64\[3\]"):
        form.check(torch.zeros(3, dtype=torch.int64), "edge 4", gradients=True)
    with pytest.raises(TransportError, match="gradient"):
        form.check(torch.zeros(2, 3, requires_grad=True), "edge 4", gradients=True)
