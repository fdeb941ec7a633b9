"""Random numbers whose source a trace does not hold: generators that forward seeds, sets or draws from by itself.

A trace holds that an operation draws from torch's generator. It does not hold the state of generators:

    torch.manual_seed, set_rng_state, fork_rng in forward        the draws that follow would be others
    random.random(), numpy.random.rand() in forward              a number, which would be the same in every step

The module that does so is called whole. One that leaves torch's generator, or the seed of Python's or numpy's, otherwise than it found them
is refused: what other ranks draw later depends on it.

Functions are watched by name (`watching`), which gives the line; and the states themselves (`UsableGenerators`), as generators have
methods, and functions other names. Fakes draw nothing: so a recorded draw advances torch's generator by itself, and code that resets
it is noticed.

While a model is recorded nothing of this reaches the user's generators: `kept` puts them back.

`ModuleGenerators`: torch's generators that modules hold, `torch.randn(shape, generator=self.generator)`.

A generator is state that every draw changes, so a node that draws from one writes it, as others write buffers: all that draw from one
generator run on one stage, in eager's order. Python that seeds a generator, or reads its state, is no torch call; a fake run draws
nothing. So generators have another state while a model is recorded, and code that changes it is refused, or its module is called
whole.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from smpc.tracer.structure import item_path

GENERATORS = (random.Random, numpy.random.Generator, numpy.random.RandomState)  # torch's: `ModuleGenerators`


def generator_state(generator: Any) -> Any:
    """The state of a generator of random numbers: Python's or numpy's."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    is_new = isinstance(generator, numpy.random.Generator)
    return generator.bit_generator.state if is_new else generator.get_state(legacy=False)


def comparable_state(generator: Any) -> Any:
    """This state with plain values in place of arrays, to be compared by ==."""
    return _plain(generator_state(generator))


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tobytes() if isinstance(state, numpy.ndarray) else state


def set_generator_state(generator: Any, state: Any) -> None:
    """Puts a generator back into a state."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, numpy.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


_NUMPY = numpy.random.mtrand._rand
_TORCH_FUNCTIONS = ("manual_seed", "seed", "set_rng_state", "fork_rng")
_CUDA_FUNCTIONS = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all")
_SEEDING = ("seed", "setstate", "set_state", *_TORCH_FUNCTIONS[:3], *_CUDA_FUNCTIONS)

EVERYONES = ("Python's", "numpy's")  # generators that belong to no model

Use = Callable[[str, bool], None]  # name of a function that is called, whether it seeds


class UsableGenerators:
    """The generators that a model may use: torch's, Python's, numpy's, and those that its modules, or their files, hold."""

    def __init__(self, model: nn.Module) -> None:
        self._torch = torch_state()
        self._held = _held(model)
        self._states = self.states()

    def states(self) -> tuple[Any, ...]:
        """The states of all but torch's, comparable."""
        return tuple(comparable_state(generator) for generator in self._held.values())

    def used(self, before: tuple[Any, ...]) -> tuple[str, ...]:
        """The names of the generators whose states have changed."""
        return tuple(name for name, old, new in zip(self._held, before, self.states(), strict=True) if old != new)

    def is_torch_moved(self) -> bool:
        """Whether somebody has moved torch's generator, beside the draws that were recorded."""
        return torch_state() != self._torch

    def draw(self) -> None:
        """Moves torch's generator as a draw does; that is no draw of the call that is being measured."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            torch.empty(1).uniform_()
        self._torch = torch_state()

    def stir(self) -> None:
        """Moves all generators: who seeds one with the seed that it has already is noticed, too."""
        self.draw()
        random._inst.random()
        _NUMPY.random_sample()


def torch_state() -> bytes:
    """The state of torch's generators."""
    with torch._C.DisableTorchFunction(), unset_fake_temporarily():
        states = [torch.default_generator.get_state()]
        states += [generator.get_state() for generator in _cuda_generators()]
        return b"".join(state.numpy().tobytes() for state in states)


def _cuda_generators() -> tuple[torch.Generator, ...]:
    is_initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.default_generators if is_initialized else ()


def _held(model: nn.Module) -> dict[str, Any]:
    """Generators by their common names."""
    found: dict[str, Any] = dict(zip(EVERYONES, (random._inst, _NUMPY), strict=True))
    files = {type(module).__module__: None for module in model.modules()}
    homes = [(f"module {name!r}", module) for name, module in model.named_modules()]
    homes += [(f"the file {name}", sys.modules[name]) for name in files if name in sys.modules]
    for home, holder in homes:
        for key, value in (*vars(holder).items(), *vars(type(holder)).items()):
            items = (
                value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else (value,)
            )
            for item in items:
                if isinstance(item, GENERATORS) and all(item is not known for known in found.values()):
                    found[f"{key} of {home}"] = item
    return found


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Generators are afterwards what they were."""
    own = [torch.default_generator, *_cuda_generators()]
    states = [generator.get_state() for generator in own]
    others = [(generator, generator_state(generator)) for generator in _held(model).values()]
    try:
        yield
    finally:
        for generator, state in zip(own, states, strict=True):
            generator.set_state(state)
        for generator, state in others:
            set_generator_state(generator, state)


@contextmanager
def watching(note: Use) -> Iterator[None]:
    """In this context `note` is called before every function of the modules `random`, `numpy.random` and `torch` that uses a generator."""
    replaced = [(home, name, function) for home, name, function in _random_functions()]
    for home, name, function in replaced:
        setattr(home, name, _noting_draws(function, f"{home.__name__}.{name}", name in _SEEDING, note))
    try:
        yield
    finally:
        for home, name, function in replaced:
            setattr(home, name, function)


def _random_functions() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """The functions of `random` and `numpy.random` that use the generator of the process."""
    for home, generator in ((random, random._inst), (numpy.random, _NUMPY)):
        for name in dir(home):
            function = getattr(home, name)
            if callable(function) and getattr(function, "__self__", None) is generator and not name.startswith("get"):
                yield home, name, function
    yield random, "getrandbits", random.getrandbits
    yield from ((numpy.random, name, getattr(numpy.random, name)) for name in ("seed", "default_rng"))
    for home in (torch, torch.random):
        yield from ((home, name, vars(home)[name]) for name in _TORCH_FUNCTIONS if name in vars(home))
    for home in (torch.cuda, torch.cuda.random):
        yield from ((home, name, vars(home)[name]) for name in _CUDA_FUNCTIONS if name in vars(home))


def _noting_draws(function: Callable[..., Any], name: str, seeds: bool, note: Use) -> Callable[..., Any]:
    """The function, whose calls by users are noted."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not _is_internal(sys._getframe(1)):
            note(name, seeds)
        return function(*args, **kwargs)

    return call


def _is_internal(frame: Any) -> bool:
    """Whether the caller is one of these modules itself, or torch: what they do with their generators they have to put back."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("random", "numpy", "torch", "smpc")


HOLD_GENERATOR = (
    "what to do: keep it as an attribute of a module, "
    "or have the module called whole that makes it (leaf_modules=[...], smpc.mark_leaf)"
)
_ELSEWHERE = 0x5EED  # no seed that a model would set while it is recorded


class ModuleGenerators:
    """The generators that the modules of a model hold, by their paths. In use from construction to `restore`."""

    def __init__(self, model: nn.Module) -> None:
        self._paths: dict[int, str] = {}
        self._found: list[tuple[torch.Generator, torch.Tensor]] = []
        with unset_fake_temporarily():
            for path, generator in _in_modules(model):
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
    """The generators that a module and its submodules hold."""
    return [generator for _, generator in _in_modules(module)]


def _in_modules(model: nn.Module) -> Iterator[tuple[str, torch.Generator]]:
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            for path, item in _items(f"{prefix}.{name}" if prefix else name, value):
                if isinstance(item, torch.Generator) and path is not None:
                    yield path, item


def _items(path: str, value: Any) -> Iterator[tuple[str | None, Any]]:
    """A value, and the members of a list or a dict, with their paths."""
    yield path, value
    if isinstance(value, (list, tuple)):
        yield from ((item_path(path, index), item) for index, item in enumerate(value))
    elif isinstance(value, dict):
        yield from ((item_path(path, key), item) for key, item in value.items())
