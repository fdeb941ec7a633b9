"""FlashAttention: the op with its Triton kernels and its formula in torch."""

from smpc.kernels.attention.op import flash_attention, flash_attention_with_lse

__all__ = ["flash_attention", "flash_attention_with_lse"]
