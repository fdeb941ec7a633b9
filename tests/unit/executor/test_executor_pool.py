import torch

from smpc.executor.transport import WireFormat
from smpc.executor.transport.gloo import BufferPool
from smpc.tracer.ir import TensorSpec

BIG = WireFormat.of("v", TensorSpec((256, 512), "float32", (1, 256)))


def test_a_free_buffer_is_used_again():
    pool = BufferPool()
    first = pool.take(BIG)
    address = first.data_ptr()
    del first
    again = pool.take(BIG)
    assert again.data_ptr() == address
    assert (again.shape, again.stride(), again.dtype) == ((256, 512), (1, 256), torch.float32)


def test_a_buffer_in_use_is_not_handed_out():
    """In use: by a tensor, by a view, by autograd's saved tensors."""
    pool = BufferPool()
    held = [pool.take(BIG), pool.take(BIG).flatten()[5:], pool.take(BIG).fill_(3).requires_grad_().exp().sum()]
    leaf = pool.take(BIG).fill_(3).requires_grad_()
    address = leaf.data_ptr()
    product = (leaf * leaf).sum()
    del leaf
    taken = [pool.take(BIG).fill_(7).data_ptr() for _ in range(10)]
    assert address not in taken
    assert held[0].data_ptr() not in taken
    assert product.grad_fn.next_functions[0][0]._saved_self.eq(3).all()


def test_buffers_that_are_idle_for_many_steps_are_given_back():
    """Every step has a format of its own beside one that all use: as with sequences of ever new lengths."""
    pool = BufferPool()
    address = pool.take(BIG).data_ptr()
    for step in range(200):
        assert pool.take(BIG).data_ptr() == address
        pool.take(WireFormat.of("v", TensorSpec((256 + step, 512), "float32", (512, 1))))
        pool.end_step()
        assert len(pool._storages) == len(pool._last_step) <= 66
