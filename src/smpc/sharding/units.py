"""Which modules of a model are units: their parameters are gathered together, and freed together.

    find_units(model)                         repeated blocks: the members of outermost ModuleLists and Sequentials of which a class has
                                              several with parameters, and what else is large enough
    units_of_classes(model, [Block, Expert])  every module of these classes

A unit must hold all uses of its parameters: while it is not running, no other module can use them. So a module that shares a parameter,
or a module with parameters, with modules outside it (an embedding tied to the head) is not a unit, and its parameters go to the nearest
unit around that holds all uses of them; in the end that is the model itself, which is always the last unit.

Units are named, inner ones before those around them, in the order of the modules. The model itself is "".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import nn


def find_units(model: nn.Module, *, least_elements: int = 0) -> tuple[str, ...]:
    """The names of the repeated blocks, and of the model. Blocks of fewer than `least_elements` elements join the unit around them."""
    wanted = [
        name
        for name in _repeated_units(model, "")
        if sum(parameter.numel() for parameter in model.get_submodule(name).parameters()) >= max(1, least_elements)
    ]
    return holding_all_uses(model, wanted)


def units_of_classes(model: nn.Module, classes: Iterable[type[nn.Module]]) -> tuple[str, ...]:
    """The names of all modules of the given classes, and of the model."""
    kinds = tuple(classes)
    wanted = [name for name, module in model.named_modules() if name and isinstance(module, kinds)]
    return holding_all_uses(model, wanted)


def holding_all_uses(model: nn.Module, wanted: Sequence[str]) -> tuple[str, ...]:
    """The wanted modules that share no parameter with modules outside them, inner ones first, and the model."""
    modules = dict(model.named_modules())  # a module that has several names has its first one
    uses = _unit_uses(modules.values())
    found = []
    for name, module in modules.items():
        if name and name in wanted:
            inside = _unit_uses(module.modules())
            if next(module.parameters(), None) is not None and all(inside[key] == uses[key] for key in inside):
                found.append(name)
    found.sort(key=lambda name: -name.count("."))  # stable: inner before outer, else in order
    return (*found, "")


def _unit_uses(modules: Iterable[nn.Module]) -> dict[int, int]:
    """How many modules hold each parameter, and each module that has parameters, by their identity."""
    found: dict[int, int] = {}
    for module in modules:
        children = (child for child in module.children() if next(child.parameters(), None) is not None)
        for held in {id(each) for each in (*module._parameters.values(), *children) if each is not None}:
            found[held] = found.get(held, 0) + 1
    return found


def _repeated_units(module: nn.Module, prefix: str) -> Iterator[str]:
    """Names of blocks below a module; nothing inside of a block."""
    counts: dict[type[nn.Module], int] = {}
    if isinstance(module, nn.ModuleList | nn.Sequential):
        for child in module.children():
            counts[type(child)] = counts.get(type(child), 0) + 1
    for name, child in module.named_children():
        own = f"{prefix}{name}"
        is_called = not isinstance(child, nn.ModuleList | nn.ModuleDict) or type(child).forward is not nn.Module.forward
        if is_called and counts.get(type(child), 0) > 1 and next(child.parameters(), None) is not None:
            yield own
        else:
            yield from _repeated_units(child, f"{own}.")
