"""Chains of distributed layers in known stacks, and the name `seq_layers` of their lists.

Between the layers of a chain hidden states stay inside: no rank gathers what the next layer would only split again.

    hidden -> [enter] layer -> layer -> ... -> layer [leave] -> hidden
                       [tp * B, S, H / tp] (memory)
                       [tp * B, S, H]      (speed)

Only in known stacks of Hugging Face's models do layers follow each other directly: a stack's forward passes each layer's hidden state to
the next one of its list. A subclass may do otherwise, so classes are matched exactly. A layer that is not distributed, or that occurs in
several places, ends a chain.

Other inputs of all layers of a stack (masks, cross states, rotary angles) are converted to the inner layout by the first layer of a
chain, or of the chain's part in a pipeline stage: see `smpc.nn.transformer.transformer`.

`name_layers` gives the layers of a stack the name `seq_layers`, the name that SMP's own transformers have for them.

    model.transformer.seq_layers      # of GPT-2: model.transformer.h, once its layers are distributed

SMP distributes whole stacks, whose layers scripts reach by this name. Here the layers are distributed one by one and the stack keeps
its class, so it gets one more name for its list. The list is not a second child: names of parameters do not change.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from smpc.errors import UsageError
from smpc.nn.transformer.transformer import DistributedTransformerLayer

_WISH = "output_hidden_states"


def link(model: nn.Module, stacks: Mapping[str, str], layers: Collection[int]) -> None:
    """Has hidden states stay inside between neighbours of a stack.

    `stacks`: the names of lists of layers, by the qualified name of the class that has them; `layers`: the ids of those that take and
    return what the stack's do.
    """
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    for stack in model.modules():
        name = stacks.get(f"{type(stack).__module__}.{type(stack).__qualname__}")
        listed = None if name is None else stack._modules.get(name)
        if not isinstance(listed, nn.ModuleList):
            continue
        are_linked = False
        for before, after in zip(listed, list(listed)[1:], strict=False):
            if (
                isinstance(before, DistributedTransformerLayer)
                and isinstance(after, DistributedTransformerLayer)
                and all(id(layer) in layers and places[id(layer)] == 1 for layer in (before, after))
            ):
                before.returns_inside = after.takes_inside = are_linked = True
        if are_linked:
            stack.register_forward_pre_hook(_refuse_recording, with_kwargs=True)


def _refuse_recording(stack: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Hidden states between linked layers are slices: a stack that collects them would return something else than it says."""
    given = kwargs
    if args:  # bound to names only where there are some without: every forward pass comes here
        given = dict(inspect.signature(stack.forward).bind_partial(*args).arguments) | kwargs
    wish = given.get(_WISH)
    if wish is None:
        config = vars(stack).get("config")
        wish = config is not None and config.output_hidden_states
    if wish:
        raise UsageError(
            f"{_WISH}: a distributed {type(stack).__name__} neither returns nor takes it; leave it out, or keep the layers whole with "
            "smp.set_tensor_parallelism(layers, False)"
        )


# Models with a head, whose stack scripts call `transformer`: SMP has one class for all of them.
_STACK_OF = {"transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXForCausalLM": "gpt_neox"}


def name_layers(model: nn.Module, stacks: Mapping[str, str], layers: Collection[int]) -> None:
    """Give each stack with a distributed layer the name; `stacks` and `layers` as for `smpc.nn.transformer.chains.link`."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        cls = f"{type(module).__module__}.{type(module).__qualname__}"
        listed = module._modules.get(stacks.get(cls, ""))
        if isinstance(listed, nn.ModuleList) and any(id(layer) in layers for layer in listed):
            vars(module)["seq_layers"] = listed
        stack = module._modules.get(_STACK_OF.get(cls, ""))
        if stack is not None:
            vars(module)["transformer"] = stack
