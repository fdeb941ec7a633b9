"""Translates state dicts between a Hugging Face layer and its distributed version, by a mapping of their tensors.

    Rule("attn.c_attn.weight", ("attention.query.weight", "attention.key.weight", "attention.value.weight"), transposed=True)

says that theirs is ours one after another, each transposed. A rule applies where all its tensors are there, so that one list serves
layers with and without biases or cross-attention. Both directions only move numbers: there and back again is the same, bit for bit.

    layers     names like transformer.h.3.attn.c_attn.weight: `h` is the container, a number comes after it
    leftovers  what no rule knows (embeddings, heads, layers that were not distributed) keeps its name
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smpc.errors import ConfigTypeError, UsageError


@dataclass(frozen=True, slots=True)
class FormatRule:
    """One tensor of a layer of theirs is several of ours."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Theirs, from ours."""
        return torch.cat([self._turned(tensor) for tensor in ours], -1 if self.transposed else 0)

    def part(self, theirs: Tensor, index: int) -> Tensor:
        """One of ours, from theirs; a view. ValueError if it does not have that many parts."""
        whole = self._turned(theirs)
        if not whole.dim() or whole.shape[0] % len(self.ours):
            raise ValueError(f"{self.theirs}: expected {len(self.ours)} equal parts, found shape {tuple(theirs.shape)}")
        size = whole.shape[0] // len(self.ours)
        return whole.narrow(0, index * size, size)

    def joined_shape(self, ours: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The shape of theirs."""
        first = sum(shape[0] for shape in ours)
        turned = (first, *ours[0][1:])
        return turned[::-1] if self.transposed else turned

    def part_shape(self, theirs: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of each of ours."""
        turned = theirs[::-1] if self.transposed else theirs
        return (turned[0] // len(self.ours), *turned[1:])

    def _turned(self, tensor: Tensor) -> Tensor:
        return tensor.t() if self.transposed else tensor


def renamed(modules: Mapping[str, str], tensors: tuple[str, ...] = ("weight", "bias")) -> tuple[FormatRule, ...]:
    """Rules for modules, theirs and ours, whose tensors are the same."""
    return tuple(
        FormatRule(f"{theirs}.{name}", (f"{ours}.{name}",)) for theirs, ours in modules.items() for name in tensors
    )


@dataclass(frozen=True, slots=True)
class StateFormat:
    """How the state dicts of a family of models are written."""

    name: str
    container: str  # of the layers
    rules: tuple[FormatRule, ...]
    others: tuple[tuple[FormatRule, ...], ...] = ()  # instead, for layers that are built in other ways
    forgotten: tuple[str, ...] = ()  # buffers that older releases of transformers saved with each layer
    in_files: tuple[tuple[str, str], ...] = ()  # patterns of other names that save_pretrained writes, and the model's

    def rules_of(self, names: Collection[str]) -> tuple[FormatRule, ...]:
        """The rules of a layer, ours or theirs, that has tensors of these names: those that know most of them."""

        def coverage(rules: tuple[FormatRule, ...]) -> int:
            known = {name for rule in rules for name in (rule.theirs, *rule.ours)}
            return sum(name in known for name in names)

        return max((self.rules, *self.others), key=coverage)

    def to_smdistributed(self, state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
        """The state dict of Hugging Face's model, under the names and shapes of one whose layers are distributed.

        `max_seq_len` has no effect: models of current releases of transformers have no causal masks as buffers.
        """
        _check_translation(state_dict, max_seq_len, self.name)
        return self._translate({self.in_model(key): value for key, value in state_dict.items()}, self._ours)

    def to_hf(self, state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
        """The inverse of `to_smdistributed`: of a full state dict, for from_pretrained and load_state_dict.

        Without layers that are distributed it is the one that is given.
        """
        _check_translation(state_dict, max_seq_len, self.name)
        return self._translate(state_dict, self._theirs)

    def block_to_smdistributed(self, state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
        """`to_smdistributed`, also of the state dict of a single layer, whose names have no container."""
        if not self._has_layers(state_dict) and any(rule.theirs in state_dict for rule in self.rules_of(state_dict)):
            return self._ours("", dict(state_dict))
        return self.to_smdistributed(state_dict, max_seq_len)

    def block_to_hf(self, state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
        """`to_hf`, also of the state dict of a single layer."""
        if not self._has_layers(state_dict) and any(rule.ours[0] in state_dict for rule in self.rules_of(state_dict)):
            return self._theirs("", dict(state_dict))
        return self.to_hf(state_dict, max_seq_len)

    def _has_layers(self, state_dict: Mapping[str, Any]) -> bool:
        return any(re.fullmatch(rf"(?:.*?\.)??{self.container}\.\d+\..*", name) for name in state_dict)

    def forgets(self, name: str) -> bool:
        """Whether a tensor of Hugging Face's model is a buffer that ours does not have."""
        return name.endswith(tuple(f".{buffer}" for buffer in self.forgotten))

    def in_model(self, name: str) -> str:
        """The name in Hugging Face's model of a tensor in a file, or of one in the model already."""
        for pattern, replacement in self.in_files:
            name = re.sub(pattern, replacement, name)
        return name

    def layer_to_smdistributed(self, layer: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state dict of one distributed layer, from the Hugging Face layer's."""
        return self._ours("", dict(layer))

    def _translate(
        self,
        state_dict: Mapping[str, Any],
        translate: Callable[[str, dict[str, Any]], dict[str, Any]],
    ) -> dict[str, Any]:
        layers: dict[str, dict[str, Any]] = {}
        order: dict[str, bool] = {}  # prefixes of layers and names of leftovers as they come; whether it is a prefix
        pattern = re.compile(rf"((?:.*?\.)??{self.container}\.\d+\.)(.*)")
        for key, value in state_dict.items():
            match = pattern.fullmatch(key)
            if match is not None:
                layers.setdefault(match[1], {})[match[2]] = value
            order[key if match is None else match[1]] = match is not None
        found: dict[str, Any] = {}
        for key, is_layer in order.items():
            if is_layer:
                found |= {f"{key}{name}": value for name, value in translate(key, layers[key]).items()}
            else:
                found[key] = state_dict[key]
        return found

    def _ours(self, where: str, theirs: dict[str, Any]) -> dict[str, Any]:
        known = {rule.theirs: rule for rule in self.rules_of(theirs)}
        found: dict[str, Any] = {}
        for name, value in theirs.items():
            rule = known.get(name)
            if rule is None:
                if name not in self.forgotten:
                    found[name] = value
                continue
            try:
                found |= {own: rule.part(value, i).contiguous() for i, own in enumerate(rule.ours)}
            except ValueError as error:
                raise UsageError(f"{where}{error}; is this a state dict of {self.name}?") from None
        return found

    def _theirs(self, where: str, ours: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        used: dict[str, None] = {}
        for rule in self.rules_of(ours):
            there = [name for name in rule.ours if name in ours]
            if len(there) == len(rule.ours):
                found[rule.theirs] = rule.join([ours[name] for name in rule.ours]).contiguous()
                used |= dict.fromkeys(rule.ours)
            elif there and rule.theirs not in ours:
                missing = ", ".join(f"{where}{name}" for name in rule.ours if name not in ours)
                raise UsageError(f"state dict of {self.name}: missing: {missing}")
        return found | {name: value for name, value in ours.items() if name not in used}


def _check_translation(state_dict: Mapping[str, Any], max_seq_len: int | None, name: str) -> None:
    """Raises an error for arguments of a translation of state dicts that cannot be."""
    if not isinstance(state_dict, Mapping):
        raise ConfigTypeError(f"state_dict: expected a mapping, found {type(state_dict).__name__}")
    if max_seq_len is not None and (not isinstance(max_seq_len, int) or isinstance(max_seq_len, bool)):
        raise ConfigTypeError(f"max_seq_len: expected an int or None, found {type(max_seq_len).__name__}")
    if max_seq_len is not None:
        warnings.warn(
            f"max_seq_len has no effect: it was the size of causal masks that {name} had as buffers in older releases of transformers",
            stacklevel=4,
        )
