"""Full checkpoints: the model as plain safetensors, and what else a job needs in a folder of `smpc.checkpoint` beside it.

    path/tag                  a safetensors file with every key of the state dict; or, of a Hugging Face model whose parameters have their
                              own names, a folder with config.json that from_pretrained opens
    path/user_content_tag/    optimizer, random state and user content
    path/newest_full          the tag of the last one, written last

A full model is also loaded from what others have written: .safetensors, Hugging Face folders, .pt and .bin files of torch.save.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from smpc.checkpoint import (
    Channel,
    Content,
    Root,
    Shard,
    open_source,
    read_file,
    save,
    save_full,
    together,
    write_file_of,
    write_folder,
)
from smpc.checkpoint.folders import check_tag, write_new
from smpc.checkpoint.manifest import is_plain_name
from smpc.checkpoint.sources import Item, Source
from smpc.errors import CheckpointError
from smpc.v1.model import DistributedModel

MARKER, CONTENT, _INNER = "newest_full", "user_content_", "content"


def save_model(
    path: str,
    tag: str,
    shards: Sequence[Shard],
    rest: Content,
    model: DistributedModel,
    translate: bool,
    channel: Channel,
) -> None:
    """Write the model and the rest. Collective. The model's file comes after the rest, the marker last."""
    target = os.path.join(path, tag)
    texts: list[dict[str, str] | None] = [None]

    def begin() -> None:
        check_tag(tag)
        if os.path.lexists(target):
            raise CheckpointError(f"{target} exists and is not overwritten; choose another tag")
        if translate and channel.rank == 0:  # which alone writes the model's file
            texts[0] = _translated(model.get_module())

    together(channel, begin)
    folder = Root(os.path.join(path, f"{CONTENT}{tag}"))
    save(folder, _INNER, rest, channel, force=True)  # that of a job that died before it wrote the model
    if texts[0] is not None:
        save_full(target, Content(shards), channel, functools.partial(write_folder, files=texts[0]))
    else:
        aliases = model.checkpoint_state.aliases()
        save_full(target, Content(shards), channel, lambda source, file: write_file_of(_Named(source, aliases), file))

    def mark() -> None:
        if channel.rank == 0:
            draft = os.path.join(path, f".{MARKER}.draft")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
            write_new(draft, f"{tag}\n".encode())
            os.replace(draft, os.path.join(path, MARKER))

    together(channel, mark)


def load_model(
    path: str,
    tag: str,
    model: DistributedModel,
    strict: bool,
    translate: Callable[[dict[str, Any]], Mapping[str, Any]] | None,
    channel: Channel,
) -> None:
    """Load the model. Collective. Nothing is written before all ranks have found that it fits."""
    target = os.path.join(path, tag)
    opened: list[Source] = []
    try:

        def compare() -> None:
            opened.append(open_source(target))
            if translate is not None:
                opened[0] = _Translated(opened[0], translate)
            opened[0] = _renamed(opened[0], model)
            _check(opened[0], model, strict, target)

        together(channel, compare)
        together(channel, lambda: _fill(opened[0], model))
    finally:
        for source in opened:
            source.__exit__(None, None, None)


def rest_of(path: str, tag: str) -> str | None:
    """The folder of what was saved beside a full model, if there is one."""
    rest = Root(os.path.join(path, f"{CONTENT}{tag}"))
    return rest.find(_INNER) if os.path.isdir(rest.path) else None


def legacy_content(path: str, tag: str) -> Any:
    """What lies beside a model of others: user_content.pt or user_content_tag, if it is a file that is not empty."""
    for name in (f"{CONTENT}{tag}", "user_content.pt"):
        file = os.path.join(path, name)
        if os.path.isfile(file) and os.path.getsize(file):
            return read_file(file, map_location="cpu")
    return None


def newest(path: str) -> str | None:
    """The tag of the last full checkpoint."""
    try:
        with open(os.path.join(path, MARKER), "rb") as file:
            tag = file.read(300).decode("utf-8", "replace").strip()
    except OSError:
        return None
    if not is_plain_name(tag) or not os.path.exists(os.path.join(path, tag)):
        warnings.warn(
            f"{os.path.join(path, MARKER)} names {tag!r}, which is not there; ask for one by its tag", stacklevel=4
        )
        return None
    return tag


# ----------------------------------------------------------------------------------------------------------------------


class _Named:
    """A source, and some of its tensors under more names: a state dict has tied parameters several times."""

    def __init__(self, source: Source, aliases: Mapping[str, str]) -> None:
        self._source, self._aliases, self.metadata = source, aliases, source.metadata
        there = {item.name: item for item in source.items}
        more = [replace(there[name], name=key) for key, name in aliases.items() if name in there]
        self.items = [*source.items, *more]

    def read(self, item: Item) -> Tensor:
        """See Source."""
        return self._source.read(replace(item, name=self._aliases.get(item.name, item.name)))

    def __enter__(self) -> _Named:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._source.__exit__(kind, error, trace)


class _Translated(_Named):
    """A source whose tensors a function of the user's has made others of. All are in memory."""

    def __init__(self, source: Source, translate: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
        super().__init__(source, {})
        found = translate({item.name: source.read(item) for item in source.items if item.kind == "model"})
        if not isinstance(found, Mapping):
            raise CheckpointError(
                f"translate_function: expected it to return a state dict, found {type(found).__name__}"
            )
        self._tensors = {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
        self.items = [Item("model", name, t.dtype, tuple(t.shape)) for name, t in self._tensors.items()]

    def read(self, item: Item) -> Tensor:
        """See Source."""
        return self._tensors[item.name]


class _Canonical(_Named):
    """A source by the canonical names of a module. `names`: the source's name of each."""

    def __init__(self, source: Source, names: Mapping[str, str]) -> None:
        super().__init__(source, {})
        own = {name: canonical for canonical, name in names.items()}
        self._own = dict(names)
        self.items = [
            replace(item, name=own.get(item.name, item.name)) for item in source.items if item.kind == "model"
        ]

    def read(self, item: Item) -> Tensor:
        """See Source."""
        return self._source.read(replace(item, name=self._own.get(item.name, item.name)))


def _renamed(source: Source, model: DistributedModel) -> Source:
    """The source by canonical names: of tied parameters any name will do, and Hugging Face's base models lack a prefix."""
    own = model.checkpoint_state.saved_names()
    aliases = model.checkpoint_state.aliases()
    there = [item.name for item in source.items if item.kind == "model"]
    module = model.get_module()
    prefix = f"{module.base_model_prefix}." if isinstance(module, _hugging_face()) else ""
    names: dict[str, str] = {}
    left: list[str] = []
    for name in there:
        guesses = [name, f"{prefix}{name}", name.removeprefix(prefix)]
        canonical = next((n for g in guesses for n in (g, aliases.get(g)) if n in own), None)
        if canonical is None:
            left.append(name)
        elif canonical not in names or name == canonical:
            names[canonical] = name
    wanted = {*names.values(), *left}
    return _Canonical(_Only(source, wanted), names)


class _Only(_Named):
    """Some tensors of a source."""

    def __init__(self, source: Source, names: set[str]) -> None:
        super().__init__(source, {})
        self.items = [item for item in source.items if item.name in names]


def _check(source: Source, model: DistributedModel, strict: bool, target: str) -> None:
    there = {item.name: item for item in source.items}
    wrong: list[str] = []
    own = {shard.name: shard for shard in model.checkpoint_state.shards()}
    every = model.checkpoint_state.saved_names()
    if strict:
        wrong += [f"missing: {name}" for name in own if name not in there]
        wrong += [f"unexpected: {name}" for name in there if name not in every]
    for name, shard in own.items():
        item = there.get(name)
        if item is not None and item.shape != shard.global_shape:
            wrong.append(f"shape of {name}: expected {list(shard.global_shape)}, found {list(item.shape)}")
        if item is not None and strict and item.dtype != shard.dtype:
            wrong.append(f"dtype of {name}: expected {shard.dtype}, found {item.dtype}")
    if wrong:
        lines = [
            f"{target} does not fit, nothing was loaded (strict=False allows missing and unexpected keys and casts)"
        ]
        raise CheckpointError("\n".join([*lines, *wrong]))


@torch.no_grad()
def _fill(source: Source, model: DistributedModel) -> None:
    own = {shard.name: shard for shard in model.checkpoint_state.shards()}
    for item in source.items:
        shard = own.get(item.name)
        if shard is not None:
            place = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.shape, strict=True))
            shard.tensor.copy_(source.read(item)[place])


def _hugging_face() -> tuple[type[nn.Module], ...]:
    """The class of Hugging Face's models, if the script has imported it."""
    transformers = sys.modules.get("transformers")
    return () if transformers is None else (transformers.PreTrainedModel,)


def _translated(module: nn.Module) -> dict[str, str] | None:
    """The texts beside a Hugging Face model's tensors; None if it is none, or its parameters have other names than Hugging Face's."""
    if not isinstance(module, _hugging_face()):
        return None
    found: Any = module
    with torch.device("meta"):
        plain = type(found)(found.config)
    ours, theirs = set(found.state_dict()), set(plain.state_dict())
    if ours != theirs:
        warnings.warn(
            f"{type(module).__name__} is saved as plain tensors, as its distributed modules have other names than Hugging Face's: "
            f"{', '.join(sorted(ours ^ theirs)[:3])}, ...",
            stacklevel=5,
        )
        return None
    config = json.loads(found.config.to_json_string(use_diff=True))
    config |= {
        "architectures": [type(found).__name__],
        "dtype": str(next(iter(found.parameters())).dtype).removeprefix("torch."),
    }
    texts = {"config.json": json.dumps(config, indent=2, sort_keys=True) + "\n"}
    if found.can_generate():
        texts["generation_config.json"] = found.generation_config.to_json_string(use_diff=True)
    return texts
