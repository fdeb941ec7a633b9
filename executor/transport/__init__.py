"""How tensors get from rank to rank."""

from smpc.executor.transport.gloo import GlooTransport
from smpc.executor.transport.loopback import LoopbackTransport, loopback_transports
from smpc.executor.transport.messages import Receipt, Transport, WireFormat
from smpc.executor.transport.nccl import NcclTransport

__all__ = [
    "GlooTransport",
    "LoopbackTransport",
    "NcclTransport",
    "Receipt",
    "Transport",
    "WireFormat",
    "loopback_transports",
]
