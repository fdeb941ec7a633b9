"""`smp.DistributedModel`."""

from smpc.v1.model.distributed_model import DistributedModel

__all__ = ["DistributedModel"]
