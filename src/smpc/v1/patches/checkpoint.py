"""`smp.checkpoint` and `smp.checkpoint_sequential` under the name that the SMP v1 API gives them."""

from smpc.v1.declare.recompute import checkpoint, checkpoint_sequential

__all__ = ["checkpoint", "checkpoint_sequential"]
