"""Running uncompiled, in several threads at once: torch has one setting for all of them."""

import threading

import torch
import torch._dynamo

from smpc.tracer.effects.torch_calls import uncompiled


def compiled_calls(count: int) -> int:
    """How many of `count` calls of a compiled function ran what the backend made."""
    calls = []

    def backend(graph, inputs):
        return lambda *args: calls.append(1) or graph.forward(*args)

    function = torch.compile(torch.sin, backend=backend)
    for _ in range(count):
        function(torch.ones(2))
    return len(calls)


def test_threads_that_overlap_leave_nothing_behind():
    torch._dynamo.reset()
    first_left, first_is_in, second_is_in = threading.Event(), threading.Event(), threading.Event()
    found = {}

    def first():
        with uncompiled():
            first_is_in.set()
            second_is_in.wait(60)
        first_left.set()

    def second():
        first_is_in.wait(60)
        with uncompiled():
            second_is_in.set()
            first_left.wait(60)
            found["inside"] = compiled_calls(2)

    threads = [threading.Thread(target=run) for run in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {"inside": 0}
    assert compiled_calls(2) == 2
