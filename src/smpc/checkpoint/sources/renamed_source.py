"""Sources as seen through other names; see `smpc.checkpoint.sources.conversion_sources`.

View(source, items)       some of its tensors
Named(source, aliases)    some of its tensors under more names: a state dict has tied parameters several times
with_tied(source)         Named, by what the metadata of a checkpoint say is tied (`tied_names`)
Canonical(source, names)  its tensors by the canonical names of a module
Computed(source, f)       what a function of the user's makes of them; all are in memory
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

from torch import Tensor

from smpc.checkpoint.sources.conversion_sources import Source, SourceItem
from smpc.errors import CheckpointError

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
