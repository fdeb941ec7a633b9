"""The store of a job on one host listens on loopback and nowhere else."""

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from smpc.errors import ConfigError
from smpc.launch.rendezvous import listen, serve
from smpc.places import LOOPBACK, is_loopback


def loopback_store():
    return serve(listen(), timedelta(seconds=30))


def _listeners(port):
    """Local addresses, in the kernel's hexadecimal, that listen on a port."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        path = Path(table)
        if not path.exists():
            continue
        for line in path.read_text().splitlines()[1:]:
            address, listens = line.split()[1], line.split()[3] == "0A"
            if listens and int(address.rpartition(":")[2], 16) == port:
                found.append(address.rpartition(":")[0])
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="no /proc/net/tcp")
def test_store_listens_on_loopback_alone():
    store = loopback_store()
    assert _listeners(store.port) == ["0100007F"]


def test_stores_share_a_host():
    first, second = loopback_store(), loopback_store()
    client = TCPStore(LOOPBACK, first.port, is_master=False)
    client.set("key", "value")
    assert first.get("key") == b"value"
    assert not second.check(["key"])


def test_a_port_that_is_taken_is_an_error():
    first = listen()
    port = first.getsockname()[1]
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
        listen(LOOPBACK, port)
    first.close()
    again = listen(LOOPBACK, port)
    again.close()


def test_names_of_loopback():
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.0.0.7", "::1")))
    assert not any(map(is_loopback, ("host0", "10.0.0.1", "")))


def test_clients_that_come_before_the_store_wait(tmp_path):
    listener = listen()
    port = listener.getsockname()[1]
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(TCPStore, LOOPBACK, port, is_master=False)
        store = serve(listener, timedelta(seconds=30))
        early.result(30).set("key", "value")
    assert store.get("key") == b"value"


def test_junk_on_the_port_does_not_stop_the_store():
    store = loopback_store()
    for junk in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64, b"\x00" * 4096):
        with socket.create_connection((LOOPBACK, store.port), timeout=60) as stranger:
            stranger.sendall(junk)
    client = TCPStore(LOOPBACK, store.port, is_master=False)
    client.set("key", "value")
    assert store.get("key") == b"value"
