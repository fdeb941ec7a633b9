"""How ranks exchange messages: who leaves when."""

import datetime
import threading

import pytest
import torch.distributed as dist

from smpc.checkpoint import Alone, StoreChannel, together
from smpc.errors import CheckpointError

PATIENCE = datetime.timedelta(seconds=20)


def test_rank_0_stays_until_all_have_read():
    """Its process may hold the store, and end with this exchange."""
    store, found = dist.HashStore(), []
    other = dist.PrefixStore("checkpoint", store)
    thread = threading.Thread(target=lambda: found.append(StoreChannel(store, 0, 2, PATIENCE).exchange("a")))
    thread.start()
    other.set("0/1", "+b")
    assert other.get("0/0") == b"+a"
    thread.join(0.2)
    assert thread.is_alive()
    other.set("0/read/1", "+")
    thread.join(20)
    assert found == [["a", "b"]]


def test_ranks_that_exchange_leave_little_behind():
    store, found = dist.HashStore(), {}

    def talk(rank):
        channel = StoreChannel(store, rank, 3, PATIENCE)
        found[rank] = [channel.exchange(f"{turn} of {rank}") for turn in range(5)]

    threads = [threading.Thread(target=talk, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    expected = [[f"{turn} of {rank}" for rank in range(3)] for turn in range(5)]
    assert found == dict.fromkeys(range(3), expected)
    assert store.num_keys() <= 2 * 3  # of the last turn


def test_the_failure_of_a_single_process_names_no_rank():
    with pytest.raises(CheckpointError, match=r"^no disk$"):
        together(Alone(), lambda: (_ for _ in ()).throw(CheckpointError("no disk")))
