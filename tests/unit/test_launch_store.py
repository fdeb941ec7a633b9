"""The store of a job on one host listens on loopback and nowhere else."""

from pathlib import Path

import pytest
from torch.distributed import TCPStore

from smpc.launch_store import LOOPBACK, LoopbackRendezvous, loopback_store


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


def test_rendezvous_has_one_node_and_keeps_the_store():
    rendezvous = LoopbackRendezvous("run")
    info = rendezvous.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    assert info.bootstrap_store_info.master_addr == LOOPBACK
    assert rendezvous.use_agent_store
    client = TCPStore(LOOPBACK, info.bootstrap_store_info.master_port, is_master=False)
    info.store.set("key", "value")
    assert client.get("run/key") == b"value"
