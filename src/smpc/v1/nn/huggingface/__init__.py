"""Translates state dicts between Hugging Face's models and models with distributed layers; one module for each family.

from smpc.v1.nn.huggingface.gptneox import translate_state_dict_to_hf_gptneox
"""

from smpc.v1.nn.huggingface import bert, gpt2, gptj, gptneo, gptneox, roberta, t5, vit

__all__ = ["bert", "gpt2", "gptj", "gptneo", "gptneox", "roberta", "t5", "vit"]
