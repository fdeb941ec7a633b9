"""`smp.nn`: the modules of `smpc.nn`, split as the session's configuration says.

`smp.nn.huggingface` has the functions that translate state dicts of Hugging Face's models.

Source: public SMP v1 API ("Supported Modules for Tensor Parallelism").
"""

from smpc.nn import (
    DistributedAttentionLayer,
    DistributedEmbedding,
    DistributedLinear,
    DistributedModule,
    DistributedTransformer,
    DistributedTransformerLayer,
    DistributedTransformerLMHead,
    DistributedTransformerOutputLayer,
    FlashAttentionLayer,
    FusedLayerNorm,
    FusedRMSNorm,
)
from smpc.v1.nn import huggingface

__all__ = [
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLinear",
    "DistributedModule",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
    "FusedLayerNorm",
    "FusedRMSNorm",
    "huggingface",
]
