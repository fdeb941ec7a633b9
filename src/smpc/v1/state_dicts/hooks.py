"""The hooks of modules on their state dicts, run as torch runs them, for values that are spread over several ranks.

    entries = collect(module, run_hooks=True)      every key with the module's own tensor: before any hook has changed the dict
    state = finish(module, entries, values)        the state dict of these values, as the hooks of all modules leave it

    given = Given.of(module, state)                a state dict as the hooks before loading leave it: what each module is to get
    given.finish(module, missing, unexpected)      the hooks after loading

Terms
    before saving    register_state_dict_pre_hook: on all ranks, before values are read
    after saving     _register_state_dict_hook, register_state_dict_post_hook: on the ranks that get the whole state dict, with whole values
    before loading   register_load_state_dict_pre_hook: on every rank, with the whole state dict that is to be loaded
    after loading    register_load_state_dict_post_hook: on every rank, once its tensors are filled; may take keys from those missing

A hook that reads its module's parameters, not the dict, finds what this rank holds: slices, and nothing of other stages. State that is
saved and loaded in parts has no dict for hooks to change: hooks before saving and after loading run, and `changing` lists modules whose
other hooks do not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from smpc.errors import CheckpointError


class IncompatibleKeys(NamedTuple):
    """The result of `load_state_dict(strict=False)`, as in torch."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True, slots=True)
class ModuleEntries:
    """Every key with the module's value; the keys of each module itself, by prefix; torch's metadata."""

    values: OrderedDict[str, Any] = field(default_factory=OrderedDict)
    own: dict[str, tuple[str, ...]] = field(default_factory=dict)
    metadata: OrderedDict[str, dict[str, Any]] = field(default_factory=OrderedDict)


def collect(module: nn.Module, *, run_hooks: bool = False) -> ModuleEntries:
    """Parameters, buffers and extra state, by key. `run_hooks`: those before saving."""
    found = ModuleEntries()

    def visit(each: nn.Module, prefix: str) -> None:
        found.metadata[prefix[:-1]] = {"version": each._version}
        for hook in each._state_dict_pre_hooks.values() if run_hooks else ():
            hook(each, prefix, True)
        own: OrderedDict[str, Any] = OrderedDict()
        each._save_to_state_dict(own, prefix, True)
        found.own[prefix] = tuple(own)
        found.values.update(own)
        for name, child in _children(each):
            visit(child, f"{prefix}{name}.")

    visit(module, "")
    return found


def finish(module: nn.Module, entries: ModuleEntries, values: Mapping[str, Any]) -> dict[str, Any]:
    """The whole state dict of `values` by key, after the hooks after saving."""
    whole: OrderedDict[str, Any] = OrderedDict()
    whole._metadata = entries.metadata  # type: ignore[attr-defined]  # as torch's has it

    def visit(each: nn.Module, prefix: str) -> Any:
        for key in entries.own[prefix]:
            whole[key] = values[key]
        for name, child in _children(each):
            visit(child, f"{prefix}{name}.")
        result: Any = whole
        for hook in each._state_dict_hooks.values():
            made = hook(each, result, prefix, entries.metadata[prefix[:-1]])
            if made is not None and getattr(hook, "_from_public_api", False):
                raise CheckpointError(
                    f"a hook after saving of {prefix[:-1] or 'the model'} returned a value; it may only change the dict"
                )
            result = result if made is None else made  # counts for the root only, as in torch
        return result

    found: dict[str, Any] = visit(module, "")
    return found


@dataclass(frozen=True, slots=True)
class Given:
    """Each module's part of a state dict. `missing`, `unexpected`: keys that hooks have added, by prefix."""

    values: dict[str, Any]
    missing: dict[str, tuple[str, ...]]
    unexpected: dict[str, tuple[str, ...]]
    errors: tuple[str, ...]

    @staticmethod
    def of(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> Given:
        """Run the hooks before loading. The state dict itself is not changed."""
        metadata = getattr(state, "_metadata", None) or {}  # torch keeps it there, and plain dicts have none
        found: dict[str, Any] = {}
        missing: dict[str, tuple[str, ...]] = {}
        unexpected: dict[str, tuple[str, ...]] = {}
        errors: list[str] = []

        def visit(each: nn.Module, own: dict[str, Any], prefix: str) -> None:
            lacks: list[str] = []
            strange: list[str] = []
            for hook in each._load_state_dict_pre_hooks.values():
                hook(own, prefix, metadata.get(prefix[:-1], {}), strict, lacks, strange, errors)
            missing[prefix], unexpected[prefix] = tuple(lacks), tuple(strange)
            children = {f"{prefix}{name}.": child for name, child in _children(each)}
            parts: dict[str, dict[str, Any]] = {child: {} for child in children}
            for key, value in own.items():
                name, dot, _ = key.removeprefix(prefix).partition(".")
                parts.get(f"{prefix}{name}." if dot and key.startswith(prefix) else "", found)[key] = value
            for child_prefix, child in children.items():
                visit(child, parts[child_prefix], child_prefix)

        visit(module, dict(state), "")
        return Given(found, missing, unexpected, tuple(errors))


def after_loading(
    module: nn.Module,
    entries: ModuleEntries,
    missing: Sequence[str] = (),
    unexpected: Sequence[str] = (),
    given: Given | None = None,
) -> IncompatibleKeys:
    """Run the hooks after loading; each may change the lists of keys, which include the keys of modules that torch loads before it."""
    result = IncompatibleKeys([], [])
    lacking, strange = dict.fromkeys(missing), dict.fromkeys(unexpected)

    def visit(each: nn.Module, prefix: str) -> None:
        if given is not None:
            result.missing_keys.extend(given.missing[prefix])
            result.unexpected_keys.extend(given.unexpected[prefix])
        children = dict(_children(each))
        for key in [key for key in entries.own[prefix] if key in lacking]:
            result.missing_keys.append(key)
        for key in [key for key in strange if key.startswith(prefix)]:
            if key.removeprefix(prefix).partition(".")[0] not in children:
                result.unexpected_keys.append(key)
                del strange[key]
        for name, child in children.items():
            visit(child, f"{prefix}{name}.")
        for hook in each._load_state_dict_post_hooks.values():
            if hook(each, result) is not None:
                raise CheckpointError(
                    f"a hook after loading of {prefix[:-1] or 'the model'} returned a value; it may only change the lists of keys it gets"
                )

    visit(module, "")
    result.unexpected_keys.extend(strange)
    return result


def forgives(module: nn.Module) -> bool:
    """Whether there are hooks after loading, which may take keys from those missing."""
    return any(each._load_state_dict_post_hooks for each in module.modules())


def changing(module: nn.Module, *, loading: bool) -> list[str]:
    """The modules whose hooks change state dicts, when they are loaded or when they are saved; torch's own hooks left out."""
    found = []
    for name, each in module.named_modules():
        hooks = each._load_state_dict_pre_hooks if loading else each._state_dict_hooks
        if any(not _of_torch(hook) for hook in hooks.values()):
            found.append(name or type(each).__name__)
    return found


def _of_torch(hook: Any) -> bool:
    inner = getattr(hook, "hook", hook)  # torch wraps those before loading
    return str(getattr(inner, "__module__", type(inner).__module__)).startswith("torch.")


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in module._modules.items() if child is not None]
