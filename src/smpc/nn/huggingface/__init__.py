"""Layers of Hugging Face's models as distributed ones, and their state dicts. `smpc.nn.huggingface.families` lists them.

gpt2, gptj, gptneo, gptneox, bert, roberta, t5, vit    each with `translate_hf_state_dict_to_smdistributed_<name>` and
                                                       `translate_state_dict_to_hf_<name>`
"""
