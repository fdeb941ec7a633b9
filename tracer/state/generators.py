"""Random generators that modules hold, `torch.randn(shape, generator=self.generator)`.

A generator is state that every draw changes, so a node that draws from one writes it, as others write buffers: all that draw from one
generator run on one stage, in eager's order. Python that seeds a generator, or reads its state, is no torch call; a fake run draws
nothing. So generators have another state while a model is recorded, and whoever changes that is refused, or called whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from smpc.tracer.paths import item_path

HOLD_GENERATOR = (
    "what to do: keep it as an attribute of a module, "
    "or have the module called whole that makes it (leaf_modules=[...], smpc.mark_leaf)"
)
_ELSEWHERE = 0x5EED  # no seed that a model would set while it is recorded


class Generators:
    """Those that the modules of a model hold, by their paths. In use from its making to `restore`."""

    def __init__(self, model: nn.Module) -> None:
        self._paths: dict[int, str] = {}
        self._found: list[tuple[torch.Generator, torch.Tensor]] = []
        with unset_fake_temporarily():
            for path, generator in _held(model):
                if id(generator) not in self._paths:
                    self._paths[id(generator)] = path
                    self._found.append((generator, generator.get_state()))
            self._moved = [self._move(generator) for generator, _ in self._found]

    @staticmethod
    def _move(generator: torch.Generator) -> torch.Tensor:
        generator.manual_seed(_ELSEWHERE)
        return generator.get_state()

    def restore(self) -> None:
        """Gives them the states that they had."""
        for generator, state in self._found:
            generator.set_state(state)

    def path(self, generator: torch.Generator) -> str:
        """Where a module holds it; "" if none does."""
        return self._paths.get(id(generator), "")

    def check(self, error: Callable[..., Exception]) -> None:
        """Raise what `error` makes of the text if one has changed."""
        path = self.changed()
        if path:
            raise error(f"random generator {path} is seeded, or its state is set, in forward", line="")

    def changed(self) -> str:
        """The path of one that has been seeded or set, which is then undone; "" if none has."""
        found = ""
        with unset_fake_temporarily():
            for (generator, _), moved in zip(self._found, self._moved, strict=True):
                if not torch.equal(generator.get_state(), moved):
                    generator.set_state(moved)
                    found = found or self.path(generator)
        return found


def generators_of(module: nn.Module) -> list[torch.Generator]:
    """Those that a module and its submodules hold."""
    return [generator for _, generator in _held(module)]


def _held(model: nn.Module) -> Iterator[tuple[str, torch.Generator]]:
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            for path, item in _items(f"{prefix}.{name}" if prefix else name, value):
                if isinstance(item, torch.Generator) and path is not None:
                    yield path, item


def _items(path: str, value: Any) -> Iterator[tuple[str | None, Any]]:
    """A value, and what a list or a dict has, with their paths."""
    yield path, value
    if isinstance(value, (list, tuple)):
        yield from ((item_path(path, index), item) for index, item in enumerate(value))
    elif isinstance(value, dict):
        yield from ((item_path(path, key), item) for key, item in value.items())
