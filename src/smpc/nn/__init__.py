"""Modules for model-parallel training: tensor-parallel layers, flash attention, fused norms. `smpc.v1` offers them as `smp.nn`."""

from smpc.nn.attention import DistributedAttentionLayer
from smpc.nn.embedding import DistributedEmbedding
from smpc.nn.flash_attention import FlashAttentionLayer, FlashGroupedQueryAttention, FlashSelfAttention
from smpc.nn.layer_norm import DistributedLayerNorm
from smpc.nn.linear import DistributedLinear
from smpc.nn.llama_flash_attention import LlamaFlashAttention
from smpc.nn.lm_head import DistributedTransformerLMHead
from smpc.nn.losses import CrossEntropyLoss, LinearCrossEntropyLoss, VocabParallelCrossEntropyLoss
from smpc.nn.norms import FusedLayerNorm, FusedRMSNorm
from smpc.nn.output_layer import DistributedTransformerOutputLayer
from smpc.nn.parallel import DistributedModule, Shard, TensorParallel
from smpc.nn.random import RandomStreams
from smpc.nn.transformer import DistributedTransformer, DistributedTransformerLayer

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
    "RandomStreams",
    "Shard",
    "TensorParallel",
    "VocabParallelCrossEntropyLoss",
]
