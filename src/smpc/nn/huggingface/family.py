"""What makes the layers of a family of Hugging Face's models DistributedTransformerLayers.

    layer class (by name: transformers is not imported here)
        arguments   reads a layer and its configuration: arguments of DistributedTransformerLayer; ConfigError where it cannot be one
        call        the arguments of a call, by name, in general terms
        result      what the layer returns, from new hidden states and biases by position
        fills       how weights are drawn, by name, where not from a normal distribution of the configuration's initializer_range
        format      how the state dict is written

A call may be bound by other names in other releases of transformers; what is not there counts as not given.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from smpc.errors import ConfigError, UsageError
from smpc.nn.registration import Arguments, Fill, Registration
from smpc.nn.state_format import Format
from smpc.nn.transformer import DistributedTransformerLayer
from smpc.nn.variant import Call

Given = Mapping[str, Any]
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "quick_gelu": "quick_gelu",
    "tanh": "tanh",
}
_RECORDED = ("hidden_states", "attentions", "cross_attentions")
_NOT_TAKEN = ("head_mask", "cross_attn_head_mask", "layer_head_mask", "cu_seq_lens_q", "cu_seq_lens_k")


@dataclass(frozen=True, slots=True)
class Family:
    """One class of layers; see above."""

    layer: str  # module and qualified name
    format: Format
    arguments: Callable[[Any], dict[str, Any]]
    call: Callable[[Given], Call]
    result: Callable[[Tensor, Tensor | None], Any]
    fills: Callable[[Any], Mapping[str, Fill]] = lambda layer: {}

    def registration(self, cls: type[nn.Module]) -> Registration:
        """How `cls`, the layer class, is distributed."""
        signature = inspect.signature(cls.forward)

        def read(layer: Any) -> Arguments:
            self._check_tensors(layer)
            return (), {"use_normal_initialization": True, **self.arguments(layer)}

        def forward(*args: Any, **kwargs: Any) -> Arguments:
            given = dict(signature.bind(None, *args, **kwargs).arguments)
            for parameter in signature.parameters.values():
                if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                    given |= given.pop(parameter.name, {})
            _check_wishes(given, cls.__name__)
            return ((given["hidden_states"],),), {"call": self.call(given)}

        def back(output: tuple[Tensor, Tensor | None]) -> Any:
            return self.result(*output)

        return Registration(
            cls,
            DistributedTransformerLayer,
            forward_hook=forward,
            return_hook=back,
            read_arguments=read,
            format=self.format,
            fills=self.fills,
        )

    def _check_tensors(self, layer: nn.Module) -> None:
        """Raises ConfigError for a layer that someone has changed, with adapters or quantized weights, say."""
        names = list(layer.state_dict())
        known = {rule.theirs for rule in self.format.rules_of(names)} | set(self.format.forgotten)
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ConfigError(f"it has tensors that such layers do not have: {', '.join(unknown[:3])}")


def activation(name: Any) -> str:
    """Our name of an activation of Hugging Face's. ConfigError for one that is not known."""
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ConfigError(f"its activation {name!r} is none of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def normal(std: float) -> Fill:
    """Draws from a normal distribution."""
    return lambda block: block.normal_(0.0, std)


def is_eager(config: Any) -> bool:
    """Whether attention is not left to a fused kernel."""
    return bool(config._attn_implementation == "eager")


def attended(mask: Any) -> Tensor | None:
    """A mask of Hugging Face's, true where a key is attended to or added to the scores; one of padding [N, S] is 1 where there is none."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise UsageError(
            f"attention_mask: expected a tensor, found {type(mask).__name__}; distributed layers take what attn_implementation eager, "
            "sdpa and flash_attention_2 give them"
        )
    return mask.bool()[:, None, None, :] if mask.dim() == 2 else mask


def needed(given: Given, name: str) -> Any:
    """An argument that must be there. UsageError if it is not."""
    if given.get(name) is None:
        raise UsageError(f"{name}: expected what Hugging Face's model gives its layers, found None")
    return given[name]


def hidden_only(hidden: Tensor, bias: Tensor | None) -> Tensor:
    """The result of layers that return hidden states alone."""
    return hidden


def _check_wishes(given: Given, name: str) -> None:
    """Raises UsageError for what a distributed layer does not return, or does not take."""
    wishes = [key for key in ("output_attentions",) if given.get(key)]
    wishes += [key for key in _NOT_TAKEN if given.get(key) is not None]
    wishes += _recorded()
    if wishes:
        raise UsageError(
            f"{', '.join(wishes)}: a distributed {name} neither returns nor takes it; leave it out, or keep the layers whole with "
            "smp.set_tensor_parallelism(layers, False)"
        )


def _recorded() -> list[str]:
    """What Hugging Face's hooks are to record of layers in this call: they do not know the distributed ones."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = None if capturing is None else vars(capturing).get("_active_collector")
    wanted = None if collector is None else collector.get()
    return [f"output_{key}" for key in _RECORDED if wanted is not None and key in wanted]
