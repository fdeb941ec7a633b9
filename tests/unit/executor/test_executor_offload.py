"""Offloading in a running pipeline: memory is really given back, and everything is there when the backward needs it."""

from typing import ClassVar

import checkpointed
import parity
import pytest
import torch

from smpc.compile import compile_model
from smpc.executor.program.bind import Binder
from smpc.executor.program.host_copies import HostCopyMover, addresses, restore_sizes
from smpc.runtime import LoopbackRuntime

CPU = torch.device("cpu")


def test_memory_is_given_back_and_comes_back():
    mover = HostCopyMover(CPU)
    base = torch.randn(4, 6, requires_grad=True)
    activation, other, fixed = base * 2, base * 3, torch.randn(5)
    view, before = activation[1:], activation.detach().clone()
    away = mover.leave([activation, view, other, fixed, base], addresses([other, base]))
    assert len(away) == 1
    assert activation.untyped_storage().nbytes() == 96  # copied, and still there
    mover.release(away)
    assert activation.untyped_storage().nbytes() == view.untyped_storage().nbytes() == 0
    assert all(value.untyped_storage().nbytes() for value in (other, fixed, base))
    assert away[0].host.nbytes == before.nbytes
    version = activation._version
    assert mover.load(away) is None
    assert away == []
    assert torch.equal(activation, before)
    assert torch.equal(view, before[1:])
    assert activation._version == version  # to autograd, nothing has happened
    activation.sum().backward()
    assert torch.equal(base.grad, torch.full((4, 6), 2.0))


def test_after_a_failure_storages_have_their_size_again():
    values = [torch.randn(3, requires_grad=True) * 2]
    mover = HostCopyMover(CPU)
    away = mover.leave(values, frozenset())
    mover.release(away)
    assert values[0].untyped_storage().nbytes() == 0
    restore_sizes(away)
    assert values[0].untyped_storage().nbytes() == 12
    assert away == []


class _Watched(HostCopyMover):
    """Notes what is moved."""

    found: ClassVar[list[int]] = []

    def leave(self, values, stay):
        away = super().leave(values, stay)
        self.found.append(sum(item.host.nbytes for item in away))
        return away


@pytest.mark.parametrize("name", ["gpt2", "t5", "sequential each"])
def test_the_plan_knows_how_much_is_moved(name, monkeypatch):
    model, batch = checkpointed.build(name)
    patterns = {"gpt2": ("transformer.h.*",), "t5": ("*.block.*",)}.get(name, ())
    options = {"recompute": patterns, "offload_activations": True, "activation_loading_horizon": 1}
    compilation = compile_model(model, batch, pipeline_parallel_degree=2, microbatches=4, pipeline="simple", **options)
    monkeypatch.setattr("smpc.executor.program.bind.HostCopyMover", _Watched)
    _Watched.found = []
    parity.run_loopback(model, compilation, batch)
    planned = [stage.offloaded_bytes_per_microbatch for stage in compilation.plan.stages]
    assert planned[0] > 0
    assert sorted(set(_Watched.found)) == sorted({size for size in planned if size})
    assert len(_Watched.found) == 4 * sum(size > 0 for size in planned)


def test_a_step_that_fails_between_does_not_spoil_the_next():
    model, batch = checkpointed.build("gpt2")
    options = {"recompute": ("transformer.h.*",), "offload_activations": True, "activation_loading_horizon": 1}
    compilation = compile_model(model, batch, pipeline_parallel_degree=2, microbatches=4, pipeline="simple", **options)
    runtime = LoopbackRuntime(model)
    program = runtime.install(compilation)

    def fail(microbatch, output):
        if microbatch == 3:
            raise ValueError("a loss that fails")
        return [(parity.loss_of(output), None)]

    with pytest.raises(ValueError, match="a loss that fails"):
        runtime.run(program, parity.split(batch, 4), fail, training=True)
    interpreters = [rank.interpreter(True) for rank in runtime._programs[program]]
    binders: list[Binder] = [interpreter._binder for interpreter in interpreters]
    assert not any(frame.away or frame.kept for binder in binders for frame in binder.frames.values())
