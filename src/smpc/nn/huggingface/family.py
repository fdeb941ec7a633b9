"""Makes DistributedTransformerLayers of a Hugging Face model family's layers.

    layer class (by name: transformers is not imported here)
        arguments   reads a layer and its configuration: arguments of DistributedTransformerLayer; ConfigError where it cannot be one
        call        the arguments of a call, by name, in general terms; what the layer's forward does not have is not there
        result      what the layer returns, from new hidden states, biases by position, and the cache where one is returned
        has_cache   whether the layer returns its cache, where `use_cache` asks for it or, if it is no argument, always
        fills       how weights are drawn, by name, where not from a normal distribution of the configuration's initializer_range
        format      how the state dict is written; `older`: in releases before 5, if not so

Releases of transformers differ in the arguments and results of layers (smpc.nn.huggingface.family). Layers of old releases have no
configuration of their own; they use the surrounding model's.

Differences between releases of transformers.

    4.30      a layer returns a tuple: its hidden states; its keys and values, where it is asked to use a cache; the rest
    4.5x      a tuple, too; caches are objects that the caller has
    5         the hidden states, or a tuple where there is more to it

Which of them holds is read from the arguments of the layer's forward where they tell, else from the release.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import Parameter
from typing import Any

from torch import Tensor, nn

from smpc.errors import ConfigError, UsageError
from smpc.nn.attention.variant import AttentionCall, TupleCache
from smpc.nn.registration import Arguments, Fill, Registration
from smpc.nn.state_format import StateFormat
from smpc.nn.transformer.transformer import DistributedTransformerLayer

Signature = Mapping[str, Parameter]
Result = Callable[
    ..., Any
]  # of the layer's parameters, new hidden states, biases by position, and the cache where one is returned


def is_before(major: int, minor: int = 0) -> bool:
    """Whether the transformers that is installed is older than a release; none at all is not."""
    return _installed_release() < (major, minor)


@functools.cache
def _installed_release() -> tuple[float, ...]:
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return (float("inf"),)
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def hidden_only(parameters: Signature, hidden: Tensor, bias: Tensor | None, *cache: Any) -> Any:
    """The result of layers that return hidden states alone, in a tuple where they could be asked for attention weights."""
    return (hidden, *cache) if "output_attentions" in parameters else hidden


def without_weights(parameters: Signature, hidden: Tensor, bias: Tensor | None, *cache: Any) -> tuple[Any, ...]:
    """The result of layers that return their attention weights besides, which distributed ones do not have."""
    return (hidden, *cache) if is_before(4, 54) else (hidden, None)


def with_biases(parameters: Signature, hidden: Tensor, bias: Tensor | None, *cache: Any) -> tuple[Any, ...]:
    """The result of layers that return their position biases, and None for cross-attention's."""
    return hidden, *cache, bias, None


def until_positions(parameters: Signature) -> bool:
    """Whether layers return their caches: in releases that do not pass them cache positions."""
    return "output_attentions" in parameters and "cache_position" not in parameters


def until_keywords(parameters: Signature) -> bool:
    """Whether layers return their caches: in releases whose layers take no further keyword arguments."""
    return not any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())


def until_objects(parameters: Signature) -> bool:
    """Layers return their caches until 4.54."""
    return is_before(4, 54)


Given = Mapping[str, Any]
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
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
_MASKS = ("head_mask", "cross_attn_head_mask", "layer_head_mask", "cross_attn_layer_head_mask")
_NOT_TAKEN = (*_MASKS, "cu_seq_lens_q", "cu_seq_lens_k")
_CACHES = ("past_key_values", "past_key_value", "layer_past")


@dataclass(frozen=True, slots=True)
class Family:
    """One class of layers; see above."""

    layer: str  # module and qualified name
    format: StateFormat
    arguments: Callable[[Any, Any], dict[str, Any]]
    call: Callable[[Given], AttentionCall]
    result: Result
    has_cache: Callable[[Signature], bool] = lambda parameters: False
    fills: Callable[[Any, Any], Mapping[str, Fill]] = lambda layer, config: {}
    older: StateFormat | None = None

    def registration(self, cls: type[nn.Module]) -> Registration:
        """How `cls`, the layer class, is distributed."""
        signature = inspect.signature(cls.forward)
        absent = {name: None for name, parameter in signature.parameters.items() if parameter.kind in _NAMED}
        has_cache = self.has_cache(signature.parameters)

        def read(layer: Any, config: object) -> Arguments:
            self._check_tensors(layer)
            return (), {"use_normal_initialization": True, **self.arguments(layer, _config_of(layer, config))}

        def forward(*args: Any, **kwargs: Any) -> Arguments:
            given = absent | signature.bind(None, *args, **kwargs).arguments
            for parameter in signature.parameters.values():
                if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                    given |= given.pop(parameter.name, {})
            _check_wishes(given, cls.__name__)
            return ((given["hidden_states"],),), {"call": _with_cache(self.call(given), given, has_cache)}

        def back(output: tuple[Any, ...]) -> Any:
            return self.result(signature.parameters, *output)

        def fills(layer: Any, config: object) -> Mapping[str, Fill]:
            return self.fills(layer, _config_of(layer, config))

        return Registration(
            cls,
            DistributedTransformerLayer,
            forward_hook=forward,
            return_hook=back,
            read_arguments=read,
            format=self.installed,
            fills=fills,
        )

    @property
    def installed(self) -> StateFormat:
        """How the models of the transformers that is installed write their state."""
        return self.format if self.older is None or not is_before(5) else self.older

    def to_smdistributed(self, state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
        """See Format."""
        return self.installed.to_smdistributed(state_dict, max_seq_len)

    def to_hf(self, state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
        """See Format."""
        return self.installed.to_hf(state_dict, max_seq_len)

    def _check_tensors(self, layer: nn.Module) -> None:
        """Raises ConfigError for a layer that someone has changed, with adapters or quantized weights, say."""
        names = list(layer.state_dict())
        form = self.installed
        known = {rule.theirs for rule in form.rules_of(names)} | set(form.forgotten)
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
    return getattr(config, "_attn_implementation", "eager") == "eager"  # releases before 4.36 have no other


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


def required_layer_argument(given: Given, name: str) -> Any:
    """An argument of a layer of the family that must be there. UsageError if it is not."""
    if given.get(name) is None:
        raise UsageError(f"{name}: expected what Hugging Face's model gives its layers, found None")
    return given[name]


def layer_index(attention: Any) -> int:
    """Which layer of its stack it is, where caches ask for it."""
    return getattr(attention, "layer_idx", None) or 0


def unseen(attention: nn.Module, config: Any) -> str:
    """See Variant: whether a layer has a causal mask of its own, to which the call's mask is added."""
    return "least" if is_eager(config) and "bias" in attention._buffers else ""


def past(given: Given) -> Any:
    """Keys and values of earlier calls, or None."""
    return next((given[name] for name in _CACHES if given.get(name) is not None), None)


def _config_of(layer: nn.Module, config: object) -> Any:
    """The layer's own configuration, else the surrounding model's. ConfigError if there is none."""
    for module in layer.modules():
        config = vars(module).get("config", config)
        if "config" in vars(module):
            break
    if config is None:
        raise ConfigError("neither it nor a module around it has a `config`")
    return config


def _with_cache(call: AttentionCall, given: Given, has_cache: bool) -> AttentionCall:
    """The call with a cache where the layer is to return one, though it is given none, and with one for tuples."""
    cache, returns = past(given), has_cache and bool(given.get("use_cache", True))
    if isinstance(cache, tuple | list) or (cache is None and returns):
        cache = TupleCache(tuple(cache or ()), has_crossed="layer_past" not in given)  # GPT-2 computes those again
    return replace(call, cache=cache, returns_cache=returns)


def _check_wishes(given: Given, name: str) -> None:
    """Raises UsageError for results or arguments that a distributed layer does not support."""
    wishes = [key for key in ("output_attentions",) if given.get(key)]
    wishes += [key for key in _NOT_TAKEN if given.get(key) is not None]
    wishes += _recorded_by_family_hooks()
    if wishes:
        raise UsageError(
            f"{', '.join(wishes)}: a distributed {name} neither returns nor takes it; leave it out, or keep the layers whole with "
            "smp.set_tensor_parallelism(layers, False)"
        )


def _recorded_by_family_hooks() -> list[str]:
    """The outputs of layers that Hugging Face's hooks should record in this call: they do not know distributed layers."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = None if capturing is None else vars(capturing).get("_active_collector")
    wanted = None if collector is None else collector.get()
    return [f"output_{key}" for key in _RECORDED if wanted is not None and key in wanted]
