"""Full checkpoints of Hugging Face's models under Hugging Face's names, also where layers are distributed; tensor by tensor.

    Terms
    theirs    names and shapes of the model as Hugging Face has it, which from_pretrained opens
    ours      names and shapes of the model with distributed layers (`smpc.nn.state_format` has the rules between both)

    texts_of(module)          config.json and generation_config.json, to be beside the tensors
    format_of(module)         the rules, None where ours are theirs; raises CheckpointError where no rules lead to theirs
    Theirs(source, format)    a source of ours, as theirs
    Ours(source, format)      a source of theirs, as ours
    readings(source, format)  the ways in which a source may be meant: as it is, and as files of save_pretrained have it, which some
                              families write under other names than those in the model; each as theirs and as ours

transformers is not imported: a script that has such a model has done so.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smpc.checkpoint.sources.conversion_sources import Source, SourceItem, SourceView
from smpc.errors import CheckpointError
from smpc.nn.huggingface.families import FAMILIES
from smpc.nn.state_format import FormatRule, StateFormat


def is_hugging_face(module: nn.Module) -> bool:
    """Whether this is a model of Hugging Face's."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def texts_of(module: nn.Module) -> dict[str, str]:
    """The files beside the tensors, by name."""
    found: Any = module
    config = json.loads(found.config.to_json_string(use_diff=True))
    config |= {
        "architectures": [type(found).__name__],
        "dtype": str(next(iter(found.parameters())).dtype).removeprefix("torch."),
    }
    texts = {"config.json": json.dumps(config, indent=2, sort_keys=True) + "\n"}
    if found.can_generate():
        texts["generation_config.json"] = found.generation_config.to_json_string(use_diff=True)
    return texts


def format_of(module: nn.Module) -> StateFormat | None:
    """The rules between ours and theirs; None if they are the same. Raises CheckpointError if none lead from one to the other."""
    found: Any = module
    with torch.device("meta"):
        theirs = set(type(found)(found.config).state_dict())
    ours = [SourceItem("model", name, value.dtype, tuple(value.shape)) for name, value in _tensors(module)]
    if {item.name for item in ours} == theirs:
        return None
    formats: list[StateFormat] = [family.installed for family in FAMILIES.values()]
    for form in formats:
        if {made.item.name for made in _to_hugging_face(ours, form)} == {
            name for name in theirs if not form.forgets(name)
        }:
            return form
    differ = sorted(theirs.symmetric_difference(item.name for item in ours))
    raise CheckpointError(f"its modules have other names than Hugging Face's: {', '.join(differ[:3])}, ...")


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor, and how it is made from a source's tensors: `names`, all in the dtype of the first."""

    item: SourceItem
    names: tuple[str, ...]
    make: Callable[[list[Tensor]], Tensor]


class _Translated(SourceView):
    """A source whose tensors are made of another's."""

    def __init__(self, source: Source, made: Iterator[_Made]) -> None:
        super().__init__(source, [])
        self._made = {each.item.name: each for each in made}
        self._from = {item.name: item for item in source.items if item.kind == "model"}
        self.items = [each.item for each in self._made.values()]

    def read(self, item: SourceItem) -> Tensor:
        """See Source."""
        made = self._made[item.name]
        return made.make([self.source.read(self._from[name]) for name in made.names]).contiguous()


class Theirs(_Translated):
    """A source of ours as Hugging Face's."""

    def __init__(self, source: Source, form: StateFormat) -> None:
        super().__init__(source, _to_hugging_face([item for item in source.items if item.kind == "model"], form))


class Ours(_Translated):
    """A source of Hugging Face's as ours."""

    def __init__(self, source: Source, form: StateFormat) -> None:
        super().__init__(source, _from_hugging_face([item for item in source.items if item.kind == "model"], form))


class _InModel(_Translated):
    """A source of files of save_pretrained by the names in the model."""

    def __init__(self, source: Source, form: StateFormat) -> None:
        items = [item for item in source.items if item.kind == "model"]
        made = (_Made(_like(item, form.in_model(item.name), item.shape), (item.name,), _alone) for item in items)
        super().__init__(source, made)


def readings(source: Source, form: StateFormat | None) -> Iterator[Source]:
    """The source as it is, then other readings of it; `form`: the rules between theirs and ours, if they differ."""
    seen: dict[tuple[str, ...], None] = {}
    written = [_InModel(source, family.installed) for family in FAMILIES.values() if family.installed.in_files]
    for reading in (source, *written):
        names = tuple(item.name for item in reading.items)
        if names not in seen:
            seen[names] = None
            yield reading
            if form is not None:
                yield Ours(reading, form)


def _to_hugging_face(items: list[SourceItem], form: StateFormat) -> Iterator[_Made]:
    """Tensors under the names of Hugging Face."""
    for prefix, layer in _layers(items, form):
        used: dict[str, None] = {}
        for rule in form.rules_of(list(layer)) if prefix is not None else ():
            if all(name in layer for name in rule.ours):
                used |= dict.fromkeys(rule.ours)
                parts = [layer[name] for name in rule.ours]
                shape = rule.joined_shape([part.shape for part in parts])
                yield _Made(_like(parts[0], f"{prefix}{rule.theirs}", shape), _names(parts), rule.join)
        yield from (_Made(item, (item.name,), _alone) for name, item in layer.items() if name not in used)


def _from_hugging_face(items: list[SourceItem], form: StateFormat) -> Iterator[_Made]:
    """Tensors under the names of distributed layers."""
    for prefix, layer in _layers(items, form):
        known = {rule.theirs: rule for rule in form.rules_of(list(layer))} if prefix is not None else {}
        for name, item in layer.items():
            if name in known:
                yield from _parts(item, prefix or "", known[name])
            elif prefix is None or name not in form.forgotten:
                yield _Made(item, (item.name,), _alone)


def _parts(item: SourceItem, prefix: str, rule: FormatRule) -> Iterator[_Made]:
    shape = rule.part_shape(item.shape)
    for index, own in enumerate(rule.ours):
        yield _Made(_like(item, f"{prefix}{own}", shape), (item.name,), functools.partial(_part, rule, index))


def _layers(items: list[SourceItem], form: StateFormat) -> Iterator[tuple[str | None, dict[str, SourceItem]]]:
    """The tensors of each layer, by their names in it, with the layer's prefix; None and the tensors outside layers."""
    pattern = re.compile(rf"((?:.*?\.)??{form.container}\.\d+\.)(.*)")
    layers: dict[str | None, dict[str, SourceItem]] = {None: {}}
    for item in items:
        match = pattern.fullmatch(item.name)
        prefix, name = (None, item.name) if match is None else (match[1], match[2])
        layers.setdefault(prefix, {})[name] = item
    yield from layers.items()


def _part(rule: FormatRule, index: int, whole: list[Tensor]) -> Tensor:
    return rule.part(whole[0], index)


def _alone(tensors: list[Tensor]) -> Tensor:
    return tensors[0]


def _like(item: SourceItem, name: str, shape: tuple[int, ...]) -> SourceItem:
    return SourceItem(item.kind, name, item.dtype, shape)


def _names(items: list[SourceItem]) -> tuple[str, ...]:
    return tuple(item.name for item in items)


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in module.state_dict().items() if isinstance(value, Tensor)]
