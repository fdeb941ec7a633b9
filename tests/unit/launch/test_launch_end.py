"""A launcher that ends before torch is imported: the end of the process waits for it."""

import builtins
import threading
from types import SimpleNamespace

from smpc.launch import rendezvous
from smpc.launch.rendezvous import Failure, Rendezvous, listen


def test_the_end_waits_for_torch_to_be_imported(monkeypatch):
    """Python stops threads at its end; one in the midst of torch's import aborted the launcher: 134 in place of the rank's status."""
    arrived, released, real = threading.Event(), threading.Event(), builtins.__import__

    def slow(name, *args, **options):
        if name.startswith("torch._C") and threading.current_thread().name == "smpc rendezvous":
            arrived.set()
            released.wait(60)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", slow)
    at_end = []
    monkeypatch.setattr(rendezvous, "atexit", SimpleNamespace(register=at_end.append))
    listener = listen()
    job = Rendezvous(listener, *listener.getsockname()[:2], 1, 1, list)
    assert arrived.wait(60)
    job.tell(Failure(0, "rank 0 exited with status 1", "", 1))
    job.finish(0.1, lambda: None)
    assert job._thread.is_alive()
    (wait,) = at_end
    ended = threading.Thread(target=wait)
    ended.start()
    ended.join(0.5)
    assert ended.is_alive(), "it waits"
    released.set()
    ended.join(60)
    job._thread.join(60)
    assert not ended.is_alive()
    assert not job._thread.is_alive()
    assert rendezvous._IMPORT_SECONDS >= 10
