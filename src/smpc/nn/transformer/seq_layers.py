"""`seq_layers`: the layers of a stack under the name that SMP's own transformers have for them.

    model.transformer.seq_layers      # of GPT-2: model.transformer.h, once its layers are distributed

SMP distributes whole stacks, whose layers scripts reach by this name. Here the layers are distributed one by one and the stack keeps
its class, so it gets one more name for its list. The list is not a second child: names of parameters do not change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

# Models with a head, whose stack scripts call `transformer`: SMP has one class for all of them.
_STACK_OF = {"transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXForCausalLM": "gpt_neox"}


def name_layers(model: nn.Module, stacks: Mapping[str, str], layers: Collection[int]) -> None:
    """Give each stack with a distributed layer the name; `stacks` and `layers` as for `smpc.nn.transformer.chains.link`."""
    for module in model.modules():
        cls = f"{type(module).__module__}.{type(module).__qualname__}"
        listed = module._modules.get(stacks.get(cls, ""))
        if isinstance(listed, nn.ModuleList) and any(id(layer) in layers for layer in listed):
            vars(module)["seq_layers"] = listed
        stack = module._modules.get(_STACK_OF.get(cls, ""))
        if stack is not None:
            vars(module)["transformer"] = stack
