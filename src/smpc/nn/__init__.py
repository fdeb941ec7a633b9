"""Modules for model-parallel training: tensor-parallel layers, flash attention, fused norms. `smpc.v1` offers them as `smp.nn`."""

from smpc.nn.attention.attention import DistributedAttentionLayer
from smpc.nn.attention.flash_attention import (
    FlashAttentionLayer,
    FlashGroupedQueryAttention,
    FlashSelfAttention,
    LlamaFlashAttention,
)
from smpc.nn.layers.embedding import DistributedEmbedding
from smpc.nn.layers.linear import DistributedLinear
from smpc.nn.layers.losses import CrossEntropyLoss, LinearCrossEntropyLoss, VocabParallelCrossEntropyLoss
from smpc.nn.layers.norms import DistributedLayerNorm, FusedLayerNorm, FusedRMSNorm
from smpc.nn.parallel import DistributedModule, ParameterSlice, TensorParallel
from smpc.nn.random import RandomStreams
from smpc.nn.transformer.lm_head import DistributedTransformerLMHead
from smpc.nn.transformer.output_layer import DistributedTransformerOutputLayer
from smpc.nn.transformer.transformer import DistributedTransformer, DistributedTransformerLayer

__all__ = [
    "CrossEntropyLoss",
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLayerNorm",
    "DistributedLinear",
    "DistributedModule",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
    "FlashGroupedQueryAttention",
    "FlashSelfAttention",
    "FusedLayerNorm",
    "FusedRMSNorm",
    "LinearCrossEntropyLoss",
    "LlamaFlashAttention",
    "ParameterSlice",
    "RandomStreams",
    "TensorParallel",
    "VocabParallelCrossEntropyLoss",
]
