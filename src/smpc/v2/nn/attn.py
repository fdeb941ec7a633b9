"""Flash attention, as `smpc.nn` has it. Source: "torch.sagemaker.nn.attn" in the public reference of SMP v2."""

from smpc.nn import FlashGroupedQueryAttention, FlashSelfAttention

__all__ = ["FlashGroupedQueryAttention", "FlashSelfAttention"]
