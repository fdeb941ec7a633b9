"""`smpc.v1.session.step_messages`: what a GPU needs that gloo on a CPU does not."""

import torch
import torch.distributed as dist

from smpc.v1.session.step_messages import Control


class Group:
    """A group's end, and its NCCL backend."""

    def __init__(self, calls):
        self.calls = calls

    def rank(self):
        return 0

    def size(self):
        return 2

    def _get_backend(self, device):
        assert device.type == "cuda"
        return self

    def abort(self):
        self.calls.append("abort")


def test_closing_after_a_failure_does_not_wait_for_what_a_peer_never_sends(monkeypatch):
    """destroy_process_group has NCCL finish what is under way first, such as the arguments of a rank that has died."""
    calls = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: calls.append("destroy"))
    control = Control(Group(calls), torch.device("cuda", 0), torch.device("cpu"))
    control.close()
    control.close()
    assert calls == ["abort", "destroy"]
