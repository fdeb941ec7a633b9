"""A rank of `smpc.Runtime` whose script raises in the middle of a step."""

import pytest
import torch
import torch.distributed as dist
from executor_harness import run_workers
from torch import nn

import smpc
from smpc.errors import PeerError, TransportError
from smpc.executor.transport.gloo import GlooTransport
from smpc.runtime import Runtime


def label_of(microbatch):
    return {0: 1.0}[microbatch]  # none for the second one


def caught(rank, folder):
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(4, 6)
    compilation = smpc.compile_model(model, x, pipeline_parallel_degree=2, microbatches=2)
    runtime = Runtime(model, rank=rank, transport=GlooTransport(dist.new_group()))
    number = runtime.install(compilation)
    parts = [((part,), {}) for part in x.chunk(2)] if rank == 0 else None

    def step():
        runtime.run(number, parts, lambda m, y: [((y.mean() - label_of(m)) / 2, None)], training=True)

    with pytest.raises(KeyError if rank == 1 else PeerError) as found:
        step()
    dist.barrier()  # neither process has ended
    with pytest.raises(TransportError):
        step()
    return str(found.value) + "".join(getattr(found.value, "__notes__", ()))


def test_the_others_hear_of_an_error_that_the_script_catches(tmp_path):
    """They waited for half an hour, as the rank that had failed went on."""
    peer, own = run_workers(caught, 2, tmp_path)
    assert own == "1in pipeline rank 1, instruction 'F s1 m1' (stage 1, microbatch 1)"
    assert peer.startswith("another rank failed first; its report:\npipeline rank 1 failed:\nTraceback")
    assert "in label_of" in peer
    assert "KeyError: 1\nin pipeline rank 1, instruction 'F s1 m1' (stage 1, microbatch 1)" in peer
