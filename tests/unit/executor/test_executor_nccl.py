"""The NCCL transport over stand-ins of its process groups, which block where NCCL does. No GPU is needed, and none is used."""

import copy
import threading

import parity
import pytest
import torch
import zoo

from smpc.compile import compile_model
from smpc.errors import TransportError
from smpc.executor.transport import NcclTransport, WireFormat
from smpc.runtime import Runtime
from smpc.tracer.ir import TensorSpec

PATIENCE = 60.0  # seconds until what blocks is called a deadlock


class Link:
    """What both members of a group share: the meeting at which NCCL makes the communicator, and what is on its way.

    A tensor gets through when it has been sent and its receive has been posted; until then neither operation ends.
    """

    def __init__(self):
        self.meeting = threading.Barrier(2)
        self.changed = threading.Condition()
        self.sent, self.num_posted = [], 0


class Work:
    """The send or the receive of a link's tensor number `index`; what is received goes into `buffer`."""

    def __init__(self, link, index, buffer=None):
        self.link, self.index, self.buffer = link, index, buffer

    def is_completed(self):
        return min(len(self.link.sent), self.link.num_posted) > self.index

    def wait(self):
        with self.link.changed:
            assert self.link.changed.wait_for(self.is_completed, PATIENCE), "deadlock"
        if self.buffer is not None:
            self.buffer.copy_(self.link.sent[self.index])
            self.buffer = None


class Group:
    """A member's end of a process group of two, made by `torch.distributed.new_group`: it has no communicator yet.

    The first operation makes it, and blocks the process until the other member's first operation. `under_way` are all operations of the
    member, over all groups.
    """

    def __init__(self, link, rank, under_way):
        self.link, self.own, self.under_way = link, rank, under_way
        self.is_connected = self.is_aborted = False

    def rank(self):
        return self.own

    def begin(self, tensor, peer):
        assert peer == 1 - self.own
        assert tensor.is_contiguous()
        assert tensor.dtype is torch.uint8
        if not self.is_connected:
            self.link.meeting.wait(PATIENCE)
            self.is_connected = True

    def start(self, work):
        self.link.changed.notify_all()
        self.under_way.append(work)
        return work

    def send(self, tensors, destination, tag):
        self.begin(tensors[0], destination)
        with self.link.changed:
            self.link.sent.append(tensors[0].clone())
            return self.start(Work(self.link, len(self.link.sent) - 1))

    def recv(self, tensors, source, tag):
        self.begin(tensors[0], source)
        with self.link.changed:
            self.link.num_posted += 1
            return self.start(Work(self.link, self.link.num_posted - 1, tensors[0]))

    def abort(self):
        self.is_aborted = True


def make_transports(num_ranks):
    """Connected transports, and for each rank all operations that it has begun."""
    pairs = [(a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b]
    links = {pair: Link() for pair in pairs}
    under_way = [[] for _ in range(num_ranks)]
    transports = []
    for rank in range(num_ranks):
        groups = {pair: Group(links[pair], sorted(pair).index(rank), under_way[rank]) for pair in pairs if rank in pair}
        transports.append(NcclTransport(rank, groups, torch.device("cpu")))
    return transports, under_way


def on_all(num_ranks, run):
    """`run(rank)` in a thread for each rank."""
    failures = []

    def guarded(rank):
        try:
            run(rank)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.long
@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {"pipeline": "interleaved"}),
        ("t5", {"pipeline": "simple"}),
        ("gpt2", {"schedule": "zb-h1"}),
        ("gpt2", {"pipeline": "interleaved", "virtual_pipeline_degree": 2}),
    ],
)
def test_ranks_do_not_wait_in_a_circle(monkeypatch, name, options):
    """Neither when their first operations make the communicators, each with one of its peers, nor when every stage, before it computes,
    and every allocation of a buffer waits for all that its rank has under way: for receives that were posted ahead, and for sends.
    """
    num_ranks, num_microbatches = 3, 4
    model, batch = zoo.build(name)
    compilation = compile_model(
        model, batch, pipeline_parallel_degree=num_ranks, microbatches=num_microbatches, **options
    )
    parts = parity.split(batch, num_microbatches)
    transports, under_way = make_transports(num_ranks)
    models = [copy.deepcopy(model) for _ in range(num_ranks)]
    outputs, ahead = {}, []

    def wait_for_device(rank):
        ahead.extend(work for work in under_way[rank] if work.buffer is not None)
        while under_way[rank]:
            under_way[rank].pop().wait()

    own, empty = threading.local(), WireFormat.empty

    def wait_and_allocate(form, device):
        wait_for_device(own.rank)
        return empty(form, device)

    monkeypatch.setattr(WireFormat, "empty", wait_and_allocate)

    def on_output(m, output):
        outputs[m] = output
        return [(parity.loss_of(output) / num_microbatches, None)]

    def run(rank):
        own.rank = rank
        runtime = Runtime(models[rank], rank=rank, transport=transports[rank])
        program = runtime.install(compilation)
        for stage in runtime.stages.values():
            stage.register_forward_pre_hook(lambda *_: wait_for_device(rank))
        runtime.run(program, parts if rank == 0 else None, on_output, training=True)

    on_all(num_ranks, run)
    assert ahead, "no receive was posted ahead"
    expected = parity.run_eager(model, batch, num_microbatches)
    holder = {name: stage.rank for stage in compilation.plan.stages for name in (*stage.parameters, *stage.buffers)}
    grads = {name: dict(models[holder[name]].named_parameters())[name].grad for name in expected[1]}
    buffers = {name: dict(models[holder.get(name, 0)].named_buffers())[name] for name in expected[2]}
    got = parity.results(model, outputs)[0], grads, buffers
    parity.assert_same(expected, got, tuple(shared.name for shared in compilation.plan.shared_parameters))


@pytest.mark.parametrize("dtype", ["float16", "complex64", "int16", "bool"])
def test_whatever_the_dtype_bytes_travel(dtype):
    """NCCL knows no complex numbers and no 16-bit integers; the first rotary tables of Llama are complex."""
    transports, _ = make_transports(2)
    form = WireFormat.of("v", TensorSpec((2, 3, 4), dtype, (1, 8, 2)))
    sent = torch.randint(0, 2, (2, 3, 4)).to(form.dtype).transpose(0, 1).contiguous().transpose(0, 1)
    got = []

    def run(rank):
        if rank == 0:
            transports[0].send(1, sent, form)
            transports[0].flush()
        else:
            got.append(transports[1].receive(0, form).wait())

    on_all(2, run)
    assert torch.equal(got[0], sent)
    assert (got[0].dtype, got[0].stride()) == (form.dtype, form.stride)


def test_an_error_of_nccl_is_one_of_the_transport():
    """A rank that fails because its peer has gone reports the peer's failure: by the type of its own error."""
    transports, _ = make_transports(2)
    transport = transports[0]
    form = WireFormat.of("hidden", TensorSpec((2,), "float32", (1,)))
    for group in transport._groups.values():
        group.send = group.recv = fail
    with pytest.raises(
        TransportError, match="'hidden' did not arrive from pipeline rank 1: NCCL error: remote process"
    ):
        transport.receive(1, form).wait()
    with pytest.raises(TransportError, match="'hidden' not sent to pipeline rank 1: NCCL error: remote process"):
        transport.send(1, torch.zeros(2), form)


def fail(*_):
    raise RuntimeError("NCCL error: remote process exited")


def test_a_closed_transport_has_aborted_its_groups():
    transports, _ = make_transports(3)
    groups = list(transports[1]._groups.values())
    transports[1].close()
    assert len(groups) == 4
    assert all(group.is_aborted for group in groups)
    with pytest.raises(TransportError, match="closed after a failure"):
        transports[1].send(0, torch.zeros(2), WireFormat.of("v", TensorSpec((2,), "float32", (1,))))


@pytest.mark.long
@pytest.mark.parametrize("kinds", [("train", "skip", "evaluate", "train"), ("evaluate", "skip", "train")])
def test_every_message_is_received_whatever_a_step_does(kinds):
    """A receive more, or one less, would give the next step this one's tensors: after a step of which nothing is differentiated, where
    there are no gradients, and after an evaluation, whose program has none.
    """
    num_ranks, num_microbatches = 3, 4
    model, batch = zoo.build("t5")
    compilation = compile_model(model, batch, pipeline_parallel_degree=num_ranks, microbatches=num_microbatches)
    parts = parity.split(batch, num_microbatches)
    transports, under_way = make_transports(num_ranks)
    models = [copy.deepcopy(model) for _ in range(num_ranks)]
    outputs = {}

    def run(rank):
        runtime = Runtime(models[rank], rank=rank, transport=transports[rank])
        program = runtime.install(compilation)
        for kind in kinds:
            for parameter in models[rank].parameters():
                parameter.grad = None

            def on_output(m, output, kind=kind):
                outputs[m] = output
                return [(parity.loss_of(output) / num_microbatches, None)] if kind == "train" else None

            runtime.run(program, parts if rank == 0 else None, on_output, training=kind != "evaluate")

    on_all(num_ranks, run)
    links = {work.link for works in under_way for work in works}
    assert all(len(link.sent) == link.num_posted for link in links)
    expected = parity.run_eager(model, batch, num_microbatches)
    holder = {name: stage.rank for stage in compilation.plan.stages for name in stage.parameters}
    grads = {name: dict(models[holder[name]].named_parameters())[name].grad for name in expected[1]}
    shared = tuple(item.name for item in compilation.plan.shared_parameters)
    found = parity.results(model, outputs)
    parity.assert_same((expected[0], expected[1], {}), (found[0], grads, {}), shared)
