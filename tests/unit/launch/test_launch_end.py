"""A launcher that ends before its thread has left torch: the end of the process waits for it.

Python stops threads at its end. One in the midst of torch's import, or of a call of its store, aborted the launcher: 134 in place of the
rank's status.
"""

import builtins
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest

from smpc.launch import rendezvous
from smpc.launch.rendezvous import Failure, Rendezvous, listen, serve


@pytest.fixture
def at_end(monkeypatch):
    """What is registered for the end of the process."""
    registered = []
    monkeypatch.setattr(rendezvous, "atexit", SimpleNamespace(register=registered.append))
    return registered


def _finished(num_nodes=1):
    listener = listen()
    job = Rendezvous(listener, *listener.getsockname()[:2], 1, num_nodes, list)
    job.tell(Failure(0, "rank 0 exited with status 1", "", 1))
    return job


def _waits(at_end, released):
    """Whether the end waits until `released` is set, and then ends."""
    (wait,) = at_end
    ended = threading.Thread(target=wait)
    ended.start()
    ended.join(0.5)
    has_waited = ended.is_alive()
    released.set()
    ended.join(60)
    return has_waited and not ended.is_alive()


def test_the_end_waits_for_torch_to_be_imported(monkeypatch, at_end):
    arrived, released, real = threading.Event(), threading.Event(), builtins.__import__

    def slow(name, *args, **options):
        if name.startswith("torch._C") and threading.current_thread().name == "smpc rendezvous":
            arrived.set()
            released.wait(60)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", slow)
    job = _finished()
    assert arrived.wait(60)
    job.finish(0.1, lambda: None)
    assert job._thread.is_alive()
    assert _waits(at_end, released)
    assert not job._thread.is_alive()
    assert rendezvous._LEAVE_SECONDS >= 10


def test_the_end_waits_for_a_call_of_the_store(monkeypatch, at_end):
    arrived, released, real = threading.Event(), threading.Event(), rendezvous.serve

    def slow(*args):
        store = real(*args)
        arrived.set()
        released.wait(60)
        return store

    monkeypatch.setattr(rendezvous, "serve", slow)
    job = _finished()
    assert arrived.wait(60)
    job.finish(0.1, lambda: None)
    assert _waits(at_end, released)
    assert not job._thread.is_alive()


def test_a_launcher_whose_patience_is_over_leaves(at_end):
    """The other node never comes: the thread would wait for it."""
    job = _finished(num_nodes=2)
    job.finish(0.1, lambda: None, lambda: True)
    (wait,) = at_end
    wait()
    assert not job._thread.is_alive()


def test_the_end_does_not_wait_for_a_store_that_is_not_there(at_end):
    listener = listen()
    address, port = listener.getsockname()[:2]
    listener.close()
    job = Rendezvous(None, address, port, 1, 2, list)
    limit = time.monotonic() + 60
    while not job._is_connecting and time.monotonic() < limit:
        time.sleep(0.01)
    job.tell(Failure(0, "rank 0 exited with status 1", "", 1))
    job.finish(0.1, lambda: None, lambda: True)
    (wait,) = at_end
    wait()
    assert job._thread.is_alive()
    store = serve(listen(address, port), timedelta(seconds=60))  # the thread comes to it, and leaves
    job._thread.join(60)
    assert not job._thread.is_alive()
    del store
