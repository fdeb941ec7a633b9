"""What forward hands to other threads."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from applied import Block, applying
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from smpc import compile_model
from smpc.errors import TraceError
from smpc.runtime import LoopbackRuntime
from smpc.tracer import record
from smpc.tracer.ir import NodeKind

others = []  # modules that a block does not hold


def model_of(function):
    """A model whose second module applies the function, which may use the first one."""
    model = applying(function)
    others[:] = [model[0]]
    return model


def whole_nodes(model):
    return [node for node in record(model, (torch.ones(2, 4),)).nodes if node.kind is NodeKind.CALL_MODULE]


def whole_modules(model):
    return [node.target for node in whole_nodes(model)]


def assert_equal_to_eager(model):
    x = torch.randn(4, 4)
    expected = model(x)
    model[1].buffer.fill_(1.0)
    found = {}
    runtime = LoopbackRuntime(model)
    program = runtime.install(compile_model(model, (x,), pipeline_parallel_degree=2, microbatches=1))
    runtime.run(program, [((x,), {})], lambda m, output: found.update({m: output.detach()}) or [], training=False)
    assert torch.equal(found[0], expected)


def in_a_thread(work):
    future = Future()
    thread = threading.Thread(target=settle, args=(future, work))
    thread.start()
    thread.join()
    return future.result()


def settle(future, work):
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)


pool = ThreadPoolExecutor(1)
IN_THREADS = {
    "a number": lambda block, x: block.linear(x) * in_a_thread(lambda: 2.0),
    "an operation": lambda block, x: block.linear(x) + in_a_thread(lambda: x * 2),
    "a module": lambda block, x: in_a_thread(lambda: block.linear(x)),
    "a write": lambda block, x: (h := block.linear(x), in_a_thread(lambda: h.mul_(2)), h + 1)[-1],
    "a pool": lambda block, x: x + pool.submit(block.linear, x).result(),
    "a write into the input": lambda block, x: (h := x * 1, in_a_thread(lambda: x.data.mul_(3)), block.linear(h) + x)[
        -1
    ],
    "a write into a buffer": lambda block, x: (in_a_thread(lambda: block.buffer.add_(1)), x * block.buffer)[-1],
    "a real run": lambda block, x: in_a_thread(lambda: block.linear(x) * (2.0 if x.sum() > 1e9 else 3.0)),
    "a gradient": lambda block, x: in_a_thread(
        lambda: torch.autograd.grad((h := x.detach().requires_grad_()).pow(2).sum(), h)[0]
    ),
}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", IN_THREADS)
def test_who_hands_work_to_a_thread_is_called_whole(name):
    model = model_of(IN_THREADS[name])
    assert whole_modules(model) == ["1"]
    assert_equal_to_eager(model)
    with pytest.raises(TraceError, match="hands work to another thread"):
        record(Block(IN_THREADS[name]), (torch.ones(2, 4),))


class Worker:
    """A thread that nobody starts in forward, and that gets its work by no function of Python's."""

    def __init__(self):
        self.work, self.is_over = [], False
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while not self.is_over:
            if self.work:
                settle(*self.work.pop())
            time.sleep(0.001)

    def __call__(self, work):
        future = Future()
        self.work.append((future, work))
        while not future.done():
            pass
        return future.result()


@pytest.mark.matrix(3)
@pytest.mark.parametrize("run", [in_a_thread, lambda work: pool.submit(work).result()], ids=["a thread", "a pool"])
@pytest.mark.parametrize(
    "function",
    [
        lambda block, x: others[0](x),
        lambda block, x: x * others[0].weight.sum(),
        lambda block, x: x + others[0].weight.data.mul_(2).sum(),
        lambda block, x: others[0](x) * (2.0 if x.sum() > 1e9 else 3.0),  # runs over real tensors
    ],
)
def test_a_thread_that_uses_tensors_of_other_modules_is_refused(function, run):
    model = model_of(lambda block, x: run(lambda: function(block, x)))
    with pytest.raises(TraceError, match=r"it uses 0\.weight, which is neither among its arguments nor its own"):
        record(model, (torch.ones(2, 4),))


def test_a_thread_that_was_started_before_is_noticed():
    worker = Worker()
    try:
        model = model_of(lambda block, x: worker(lambda: block.linear(x)))
        assert whole_modules(model) == ["1"]
        assert_equal_to_eager(model)
    finally:
        worker.is_over = True


@pytest.mark.parametrize(
    "function",
    [
        lambda block, x: in_a_thread(lambda: F.dropout(x)),
        lambda block, x: in_a_thread(lambda: F.dropout(x) * x.sum().item()),
    ],
    ids=["over fakes", "over real tensors"],
)
def test_a_thread_that_draws_makes_its_module_random(function):
    (node,) = whole_nodes(model_of(function))
    assert node.random


def test_who_differentiates_in_a_thread_what_others_have_computed_is_refused():
    model = model_of(lambda block, x: in_a_thread(lambda: torch.autograd.grad(x.pow(2).sum(), others[0].weight)[0]))
    with pytest.raises(TraceError, match="differentiates"):
        record(model, (torch.ones(2, 4),))


def test_nothing_is_watched_afterwards():
    before = FakeTensor.__dict__["__torch_dispatch__"]
    whole_modules(model_of(IN_THREADS["an operation"]))
    assert FakeTensor.__dict__["__torch_dispatch__"] is before
