"""Llama's attention, as `smpc.nn` has it. Source: "torch.sagemaker.nn.huggingface.llama_flashattn" in the public reference of SMP v2."""

from smpc.nn import LlamaFlashAttention

__all__ = ["LlamaFlashAttention"]
