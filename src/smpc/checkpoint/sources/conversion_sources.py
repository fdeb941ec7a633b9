"""Sources of conversions: tensors that are read one at a time, in any format.

    open_source(path)    a checkpoint of this library, a Hugging Face folder or a .safetensors file, a torch.distributed.checkpoint
                         folder, or a legacy .pt/.bin/.pth file, told apart by what is there

    CheckpointSource     kinds and names as they were saved
    SafetensorsSource    one file, or the files of a folder with or without model.safetensors.index.json; kind "model"; by their checksums
    LegacySource         torch.save of a mapping of tensors, read with weights_only=True and no fallback; kind "model"

A source lists its tensors (Item) and brings one (`read`). It holds no more than that one; a legacy file is mapped, not read. For
torch.distributed.checkpoint see `smpc.checkpoint.distributed`.

`tensors_of` and `groups_of` read the optimizer in a Trainer's checkpoint (`smpc.composer`, mosaicml), as checkpoints of this library have
it:

{"optimizers": {"AdamW": {"state": {"a.weight": {"exp_avg": tensor}}, "param_groups": [...]}}}      mosaicml
{"optimizers": {"AdamW": {"state": ...}}, "plain": '{"groups": [{"lr": 0.1, "params": ["a.weight"]}]}'}      smpc.composer

tensors_of(state)          {"a.weight::exp_avg": tensor}
groups_of(state)           [{"lr": 0.1, "params": ["a.weight"]}]; None where they do not say their parameters

Sources as seen through other names:

View(source, items)       some of its tensors
Named(source, aliases)    some of its tensors under more names: a state dict has tied parameters several times
with_tied(source)         Named, by what the metadata of a checkpoint say is tied (`tied_names`)
Canonical(source, names)  its tensors by the canonical names of a module
Computed(source, f)       what a function of the user's makes of them; all are in memory
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from smpc.checkpoint.folder.files import read_file
from smpc.checkpoint.format.draft_content import VALUES
from smpc.checkpoint.format.dtypes import num_bytes
from smpc.checkpoint.format.header_checksums import KEY
from smpc.checkpoint.format.manifest import is_plain_name, without_duplicates
from smpc.checkpoint.format.regular_file import is_file, printable, read_regular
from smpc.checkpoint.format.tensorfile import OWN, TensorFile
from smpc.checkpoint.reader import Checkpoint, verify
from smpc.errors import CheckpointError

SEPARATOR = "::"


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of the optimizer's state."""
    return {
        f"{name}{SEPARATOR}{key}": value
        for saved in state.get("optimizers", {}).values()
        for name, values in saved.get("state", {}).items()
        for key, value in values.items()
        if isinstance(value, Tensor)
    }


def groups_of(state: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The options of the parameter groups. Raises ValueError for text that is no JSON."""
    if "plain" in state:
        groups = json.loads(state["plain"]).get("groups", [])
    else:
        groups = [group for saved in state.get("optimizers", {}).values() for group in saved.get("param_groups", ())]
    if not groups or any("params" not in group for group in groups):
        return None
    return [{key: _source_option(key, value) for key, value in group.items()} for group in groups]


def _source_option(key: str, value: Any) -> Any:
    return tuple(value) if isinstance(value, list) and key != "params" else value


INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SAVE = "smpc_save"  # note: a number drawn for each save, the same in all its files
PART = "smpc_part"  # note: which of how many files of a save this is, "1/3"
_MAX_INDEX = 256 << 20
_MOST_STRETCHED = 256 << 20  # bytes of an expanded tensor, such as a mask


@dataclass(frozen=True, slots=True)
class SourceItem:
    """A whole tensor of a source."""

    kind: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """When contiguous."""
        return num_bytes(self.shape, self.dtype)


class Source(Protocol):
    """Where tensors come from. A context manager."""

    @property
    def items(self) -> list[SourceItem]:
        """All tensors."""

    @property
    def metadata(self) -> Any:
        """The metadata of a checkpoint of this library; {} for other sources."""

    def read(self, item: SourceItem) -> Tensor:
        """One of them, on the CPU and contiguous."""

    def __enter__(self) -> Source: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class _Closing:
    """The common base of sources."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of files."""


class CheckpointSource(_Closing):
    """A checkpoint of this library."""

    def __init__(self, folder: str, *, any_name: bool = False) -> None:
        self.checkpoint = Checkpoint.open(folder, any_name=any_name)
        self.items = [
            SourceItem(entry.kind, entry.name, entry.dtype, entry.shape)
            for entry in self.checkpoint.entries.values()
            if entry.kind != VALUES
        ]
        self.metadata = self.checkpoint.metadata

    def read(self, item: SourceItem) -> Tensor:
        """See Source; verified."""
        return self.checkpoint.read(item.kind, item.name)

    def close(self) -> None:
        """Let go of files."""
        self.checkpoint.close()


class SafetensorsSource(_Closing):
    """Safetensors files without a manifest. `notes`: the texts in their headers.

    Raises CheckpointError if the structure or a header is damaged, or the files do not belong together; `read` if a tensor is, as far as
    the files have checksums.
    """

    def __init__(self, path: str) -> None:
        self.metadata: Any = {}
        self._files: list[TensorFile] = []
        self._where: dict[str, TensorFile] = {}
        self.notes: dict[str, str] = {}
        try:
            is_folder = not is_file(path)
            for name in files_of(path) if is_folder else [path]:
                self._add(TensorFile(name))
            wrong = [line for file in self._files for line in file.damage] + self._strangers()
            wrong += _wrong_index(path, self._where) if is_folder else []
            if wrong:
                raise CheckpointError("\n".join(wrong))
        except BaseException:
            self.close()
            raise
        self.items = [SourceItem("model", name, *file.header.tensors[name][:2]) for name, file in self._where.items()]

    def read(self, item: SourceItem) -> Tensor:
        """See Source; verified as far as there are checksums."""
        return self._where[item.name].read(item.name)

    def damaged(self, rank: int, size: int) -> list[str]:
        """The damage in this rank's part of all blocks with checksums, one line each."""
        blocks = [(file, block) for file in self._files for block in file.blocks]
        return [line for file, block in blocks[rank::size] if (line := file.check(block)) is not None]

    def close(self) -> None:
        """Let go of files."""
        files, self._files = self._files, []
        for file in files:
            file.close()

    def _add(self, file: TensorFile) -> None:
        self._files.append(file)
        twice = sorted(set(file.header.tensors) & set(self._where))
        if twice:
            names = ", ".join(map(printable, twice[:5]))
            raise CheckpointError(f"{names}: in {file.path} and in {self._where[twice[0]].path}")
        self._where |= dict.fromkeys(file.header.tensors, file)
        self.notes |= file.header.metadata

    def _strangers(self) -> list[str]:
        """Checks that all files belong to one save, and that none is missing, by their notes, if this library wrote them."""
        first, wrong = self._files[0], []
        for file in self._files:
            own, others = _notes_alike_in_source_files(file), _notes_alike_in_source_files(first)
            if own != others:
                wrong.append(f"{file.path}: it is not of the same save as {first.path}; take all files from one")
        parts = [file.header.metadata[PART] for file in self._files if PART in file.header.metadata]
        numbers = {part.partition("/")[0] for part in parts}
        if parts and not wrong and parts[0].partition("/")[2] != str(len(numbers)):
            wrong.append(
                f"{os.path.dirname(first.path)}: expected {parts[0].partition('/')[2]} files of tensors, found {len(numbers)}"
            )
        return wrong


def _is_stretched(tensor: Tensor) -> bool:
    """Whether a tensor takes far more memory than was saved of it."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    size = tensor.numel() * tensor.element_size()
    return size > max(_MOST_STRETCHED, tensor.untyped_storage().nbytes())


def _notes_alike_in_source_files(file: TensorFile) -> dict[str, str]:
    """The notes that are the same in all files of a save."""
    notes = {key: text for key, text in file.header.metadata.items() if key.startswith(OWN) and key not in (KEY, PART)}
    return notes | {PART: file.header.metadata.get(PART, "").partition("/")[2]}


def damaged_of(source: Source, rank: int = 0, size: int = 1) -> list[str]:
    """The damage in a rank's part of a source, one line each; without checksums none can be found."""
    if isinstance(source, CheckpointSource):
        return verify(source.checkpoint, rank=rank, size=size)
    return source.damaged(rank, size) if isinstance(source, SafetensorsSource) else []


class LegacySource(_Closing):
    """A file of torch.save that holds a mapping of tensors, possibly under "model", "model_state_dict", "state_dict" or "module".

    From a Trainer's file, which has the model under "state", the optimizer is read too.
    """

    def __init__(self, path: str) -> None:
        found = read_file(path, map_location="cpu", mmap="archives")  # older files cannot be mapped
        trained: Mapping[str, Any] = {}
        if isinstance(found, Mapping) and isinstance(found.get("state"), Mapping) and "model" in found["state"]:
            found = trained = found["state"]
        for key in ("model", "model_state_dict", "state_dict", "module"):
            if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
                found = found[key]
                break
        if not isinstance(found, Mapping) or not any(isinstance(value, Tensor) for value in found.values()):
            raise CheckpointError(f"{path}: expected a mapping of names to tensors, found {type(found).__name__}")
        of_model = {str(key): value for key, value in found.items() if isinstance(value, Tensor)}
        if len(of_model) != sum(isinstance(value, Tensor) for value in found.values()):
            raise CheckpointError(f"{path}: two of its tensors have the same name")
        self.metadata: Any = {}
        of_optimizer = self._read_optimizer(trained, path)
        everything = {**of_model, **of_optimizer}
        wrong = [printable(name) for name, tensor in everything.items() if _is_stretched(tensor)]
        if wrong:
            raise CheckpointError(
                f"{path}: {', '.join(wrong[:5])}: expanded tensors, of far more elements than the file has; save them with contiguous()"
            )
        self._of = {"model": of_model, "optimizer": of_optimizer}
        self.items = [
            SourceItem(kind, name, t.dtype, tuple(t.shape)) for kind, own in self._of.items() for name, t in own.items()
        ]

    def read(self, item: SourceItem) -> Tensor:
        """See Source."""
        return self._of[item.kind][item.name].detach().contiguous()

    def _read_optimizer(self, state: Mapping[str, Any], path: str) -> dict[str, Tensor]:
        try:
            groups = groups_of(state)
            if groups is not None:
                self.metadata = {"optimizer": {"param_groups": groups}}
            return tensors_of(state)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path}: the optimizer is not as a Trainer writes it: {type(error).__name__}: {str(error)[:200]}"
            ) from error


def files_of(folder: str) -> list[str]:
    """The safetensors files of a Hugging Face folder, of which an index may say the names."""
    index = os.path.join(folder, INDEX)
    if os.path.lexists(index):
        names = sorted({*_weight_map(index).values()})
        wrong = [name for name in names if not is_plain_name(name)]
        if wrong:
            raise CheckpointError(
                f"{index}: expected the plain names of files in the same folder, found {', '.join(map(repr, wrong[:5]))}"
            )
    elif os.path.lexists(os.path.join(folder, SINGLE)):
        names = [SINGLE]
    else:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors") and is_plain_name(name))
    if not names:
        raise CheckpointError(f"{folder}: no .safetensors files")
    return [os.path.join(folder, name) for name in names]


def _weight_map(index: str) -> dict[str, str]:
    """The file of each tensor, as an index says."""
    data = read_regular(index, _MAX_INDEX)
    try:
        found = json.loads(data, object_pairs_hook=without_duplicates)["weight_map"]
        if not isinstance(found, dict) or any(not isinstance(name, str) for name in found.values()):
            raise ValueError("weight_map: expected names of files by names of tensors")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index}: damaged: {type(error).__name__}: {str(error)[:200]}") from error
    return found


def _wrong_index(folder: str, where: Mapping[str, TensorFile]) -> list[str]:
    """Checks that each tensor is in the file that the folder's index names, and that there are no others."""
    index = os.path.join(folder, INDEX)
    if not os.path.lexists(index):
        return []
    said = _weight_map(index)
    there = {name: os.path.basename(file.path) for name, file in where.items()}
    wrong = [
        f"{printable(name)} is in {there.get(name)}, not in {printable(file)}"
        for name, file in said.items()
        if there.get(name) != file
    ]
    wrong += [f"{printable(name)}, in {file}, is not in it" for name, file in there.items() if name not in said]
    more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
    return [f"{index}: damaged: {'; '.join(wrong[:5])}{more}"] if wrong else []


TIED = "tied"  # in metadata: canonical names of tied parameters by their other names


class SourceView:
    """Some tensors of a source."""

    def __init__(self, source: Source, items: list[SourceItem]) -> None:
        self.source, self.items, self.metadata = source, items, source.metadata

    def read(self, item: SourceItem) -> Tensor:
        """See Source."""
        return self.source.read(item)

    def __enter__(self) -> SourceView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.source.__exit__(kind, error, trace)


class RenamedSource(SourceView):
    """A source with more names. `aliases`: the source's name of each."""

    def __init__(self, source: Source, aliases: Mapping[str, str]) -> None:
        there = {item.name: item for item in source.items if item.kind == "model"}
        more = [replace(there[name], name=key) for key, name in aliases.items() if name in there]
        super().__init__(source, [*source.items, *more])
        self._aliases = aliases

    def read(self, item: SourceItem) -> Tensor:
        """See Source."""
        return self.source.read(
            replace(item, name=self._aliases.get(item.name, item.name)) if item.kind == "model" else item
        )


def tied_names(source: Source) -> dict[str, str]:
    """The names that its metadata say beside those that a source has, each with the source's name of the same tensor."""
    tied = source.metadata.get(TIED) if isinstance(source.metadata, Mapping) else None
    there = {item.name for item in source.items if item.kind == "model"}
    return {str(key): str(name) for key, name in tied.items() if key not in there} if isinstance(tied, Mapping) else {}


def with_tied(source: Source) -> Source:
    """A source with the other names that its metadata say."""
    return RenamedSource(source, tied_names(source))


class CanonicalSource(SourceView):
    """A source's model by canonical names. `names`: the source's name of each; others keep theirs."""

    def __init__(self, source: Source, names: Mapping[str, str]) -> None:
        own = {name: canonical for canonical, name in names.items()}
        items = [replace(item, name=own.get(item.name, item.name)) for item in source.items if item.kind == "model"]
        super().__init__(source, items)
        self._names = dict(names)

    def read(self, item: SourceItem) -> Tensor:
        """See Source."""
        return self.source.read(replace(item, name=self._names.get(item.name, item.name)))


class ComputedSource(SourceView):
    """A source whose tensors a function of the user's has made others of."""

    def __init__(self, source: Source, translate: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
        found = translate({item.name: source.read(item) for item in source.items if item.kind == "model"})
        if not isinstance(found, Mapping):
            raise CheckpointError(
                f"translate_function: expected it to return a state dict, found {type(found).__name__}"
            )
        self._tensors = {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
        super().__init__(
            source, [SourceItem("model", name, t.dtype, tuple(t.shape)) for name, t in self._tensors.items()]
        )

    def read(self, item: SourceItem) -> Tensor:
        """See Source."""
        return self._tensors[item.name]
