"""Which modules of a model are units, and which are recomputed in backward, as the modules themselves say.

    module._fsdp_wrap = True | False                  decides for that module
    child.fsdp_wrap_fn(module) -> bool | dict         decides for every module below a direct child; a dict is True with options
    module._activation_checkpointing, activation_checkpointing_fn(module)             the same for recomputing

Direct children of the model, and members of lists and dictionaries of modules that are some, are units, unless `_fsdp_wrap` is False or
they have no parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from smpc.errors import ConfigError, ConfigTypeError
from smpc.sharding.units import holding_all_uses

OPTIONS = ("sharding_strategy", "process_group", "mixed_precision", "backward_prefetch", "reshard_after_forward")


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A unit by its name below its root, "" for the root itself, with the options of its own."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


def units_of(root: nn.Module) -> tuple[Wrapped, ...]:
    """The units of `root`, a child of the model: inner ones first, the child itself last.

    A module that shares a parameter with a module outside it is not a unit: its parameters go to the unit around all their uses. Raises
    ConfigTypeError for answers that are neither bool nor dict, and ConfigError for unknown options, and for lists and dictionaries of
    modules, which are never called.
    """
    chosen: dict[str, Mapping[str, Any]] = {}
    for name, module in root.named_modules():
        answer = _wrap_answer(root, module, "_fsdp_wrap", "fsdp_wrap_fn") if name else True
        if answer is True or isinstance(answer, Mapping):
            chosen[name] = answer if isinstance(answer, Mapping) else {}
    for name, options in chosen.items():
        unknown = [key for key in options if key not in OPTIONS]
        if unknown:
            raise ConfigError(
                f"fsdp_wrap_fn({name}): unknown options {', '.join(map(repr, unknown))}; known are {', '.join(OPTIONS)}"
            )
        module = root.get_submodule(name)
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
            raise ConfigError(
                f"fsdp_wrap_fn({name}): expected a module that is called, found a {type(module).__name__}; answer True for its members"
            )
    return tuple(Wrapped(name, chosen.get(name, {})) for name in holding_all_uses(root, list(chosen)))


def recomputed(root: nn.Module) -> list[str]:
    """The names of the modules whose activations are recomputed; none inside of another."""
    found: list[str] = []
    for name, module in root.named_modules():
        inside = "" in found or any(name.startswith(f"{outer}.") for outer in found)
        if not name:
            is_chosen = bool(getattr(module, "_activation_checkpointing", False))
        else:
            is_chosen = bool(_wrap_answer(root, module, "_activation_checkpointing", "activation_checkpointing_fn"))
        if is_chosen and not inside:
            found.append(name)
    return found


def _wrap_answer(root: nn.Module, module: nn.Module, attribute: str, function: str) -> bool | Mapping[str, Any]:
    """What a module, or a function of the model, says of wrapping it."""
    own = getattr(module, attribute, None)
    if own is not None:
        return bool(own)
    decide = getattr(root, function, None)
    if decide is None:
        return False
    answer = decide(module)
    if isinstance(answer, bool) or (function == "fsdp_wrap_fn" and isinstance(answer, Mapping)):
        return answer
    raise ConfigTypeError(
        f"{function}: expected a bool{' or a dict' if function == 'fsdp_wrap_fn' else ''} for {type(module).__name__}, found {answer!r}"
    )
