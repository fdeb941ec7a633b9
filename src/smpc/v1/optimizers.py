"""`smp.optimizers`: the fused optimizers of `smpc.optimizers`, with norms over the ranks of the session.

See `smpc.v1.optimization.fused`. Source: public SMP v1 API ("smdistributed.modelparallel.torch.optimizers").
"""

from smpc.v1.optimization.fused import FusedAdamW, FusedLAMB, FusedLamb, FusedNovoGrad, clip_grad_norm_

__all__ = ["FusedAdamW", "FusedLAMB", "FusedLamb", "FusedNovoGrad", "clip_grad_norm_"]
