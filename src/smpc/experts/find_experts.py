"""Experts found in a model, by what its modules are made of. Names of models and classes play no part.

Two forms are found:

    stacked    a module whose parameters share a leading dimension E, one of them with three dimensions or more, and whose forward takes
               hidden states [.., H], the experts of each token [.., k] and their weights [.., k]; `smpc.experts.confirm_cut` runs it on
               invented values to see that it computes what that means
    listed     E modules of one class, with parameters of the same names and shapes, a matrix among them, in a ModuleList or ModuleDict
               (or a subclass) beside a router: a parameter of two dimensions, one of which is E. It belongs to the module that holds the
               list, or to a part of that without experts of its own: a list of routers, too, but no list of layers with tensors of more
               dimensions. The block is the module whose forward calls the experts: the container, if it has a forward of its own, else
               the module that holds it

Experts inside of experts are found once, as the inner ones. What a user registers (`register_experts`) is taken as it is.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

LEAVE_WHOLE = "leave these experts whole (`experts=` of `shard`; in a training script, no expert_parallel_degree)"  # a way out in errors
_OUTPUT = 3  # hidden states, experts, weights
_REGISTERED = "_smpc_experts"


@dataclass(frozen=True, slots=True)
class Stacked:
    """One module with all experts. `parameters`: names, in it, of the parameters whose first dimension counts the experts."""

    name: str
    module: nn.Module
    num_experts: int
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Listed:
    """One module for each expert. `block` is the module whose forward calls the members."""

    name: str  # of the container
    block_name: str
    block: nn.Module
    container: nn.Module
    keys: tuple[str, ...]  # of the members in the container, in order
    beside: tuple[str, ...] = ()  # the names of other lists of experts that the same block calls

    @property
    def members(self) -> list[nn.Module]:
        """The experts, in order."""
        return [self.container.get_submodule(key) for key in self.keys]

    @property
    def num_experts(self) -> int:
        """How many."""
        return len(self.keys)


Found = Stacked | Listed


def shared_and_trained(found: Stacked) -> str | None:
    """Why experts cannot be cut where gradients are averages over ranks: trained parameters that all of them share.

    The gradient of an expert is divided by the ranks that send it tokens. The gradient of a shared parameter is a sum over all ranks, and
    would be divided once more.
    """
    names = [
        name for name, each in found.module.named_parameters() if each.requires_grad and name not in found.parameters
    ]
    return f"all experts share {', '.join(names)}; freeze it, or keep it outside of their module" if names else None


def uses_of_parameters(model: nn.Module, experts: Iterable[Found]) -> dict[int, int]:
    """By identity of a parameter, how many modules hold it; or how many experts, if more: these may share a module that does."""
    containers = {id(one.container if isinstance(one, Listed) else one.module): one for one in experts}
    holders: dict[int, set[int]] = {}
    owners: dict[int, set[tuple[int, ...]]] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    waiting: list[tuple[nn.Module, tuple[int, ...]]] = [(model, ())]
    while waiting:
        module, owner = waiting.pop()
        if (id(module), owner) in seen:
            continue
        seen.add((id(module), owner))
        one = containers.get(id(module))
        own = (id(module),) if isinstance(one, Stacked) else owner
        for parameter in module._parameters.values():
            holders.setdefault(id(parameter), set()).add(id(module))
            owners.setdefault(id(parameter), set()).add(own)
        for child in module.children():
            waiting.append((child, (id(module), id(child)) if isinstance(one, Listed) else own))
    return {each: max(len(found), len(owners[each])) for each, found in holders.items()}


def register_experts(module_class: type[nn.Module], parameters: Sequence[str]) -> type[nn.Module]:
    """Declares that modules of a class hold experts stacked along the first dimension of these parameters; returns the class.

    For classes that the search does not know by their structure: with further parameters that all experts share, say, which stay whole.
    `forward(hidden, index, weights)` must be what the search expects: hidden states [.., H], experts [.., k], weights [.., k] to [.., H].
    """
    setattr(module_class, _REGISTERED, tuple(parameters))
    return module_class


def find_experts(model: nn.Module, patterns: Sequence[str] | None = None) -> list[Found]:
    """All experts of a model, in the order of its modules.

    `patterns` (of names, as in `fnmatch`) restrict the search to modules and containers that one of them matches; these need no router.
    """
    found: list[Found] = []
    inside: set[int] = set()
    names = {id(module): name for name, module in model.named_modules()}
    for name, module in model.named_modules():
        if id(module) in inside or not _matches_expert_pattern(name, patterns):
            continue
        stacked = _stacked_experts(name, module)
        if stacked is not None:
            found.append(stacked)
            inside.update(id(part) for part in module.modules())
            continue
        listed = _listed_experts(name, module, model, names, needs_router=patterns is None)
        if listed is not None and not any(_holds_experts(member) for member in listed.members):
            found.append(listed)
            inside.update(id(part) for member in listed.members for part in member.modules())
    return [_with_those_beside(one, found) for one in found]


def _with_those_beside(one: Found, every: list[Found]) -> Found:
    """The same experts, which know the others of their block."""
    if not isinstance(one, Listed):
        return one
    lists = (other for other in every if isinstance(other, Listed) and other.block is one.block)
    return replace(one, beside=tuple(other.name for other in lists if other.name != one.name))


def _matches_expert_pattern(name: str, patterns: Sequence[str] | None) -> bool:
    return patterns is None or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _holds_experts(module: nn.Module) -> bool:
    """Whether there are experts inside: then it is a layer."""
    names = {id(part): name for name, part in module.named_modules()}
    return any(
        _stacked_experts(name, part) is not None
        or _listed_experts(name, part, module, names, needs_router=True) is not None
        for name, part in module.named_modules()
    )


def _stacked_experts(name: str, module: nn.Module) -> Stacked | None:
    """The experts that a module is, all in the same tensors; None if it is none."""
    registered = getattr(type(module), _REGISTERED, None)
    if registered is not None:
        first = module.get_parameter(registered[0])
        return Stacked(name, module, first.shape[0], registered)
    own = dict(module.named_parameters(recurse=False))
    if not own or len(own) != len(list(module.parameters())) or not takes_routing(module):
        return None
    sizes = {parameter.shape[0] if parameter.dim() > 1 else 0 for parameter in own.values()}
    num_experts = min(sizes)
    if len(sizes) > 1 or num_experts < 2 or max(parameter.dim() for parameter in own.values()) < 3:
        return None
    return Stacked(name, module, num_experts, tuple(own))


def takes_routing(module: nn.Module) -> bool:
    """Whether its forward takes hidden states, experts and weights, and needs nothing else."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    more = [p for p in places[_OUTPUT:] if p.default is p.empty]
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    return len(places) >= _OUTPUT and not more and not keywords


def _listed_experts(
    name: str, container: nn.Module, model: nn.Module, names: dict[int, str], *, needs_router: bool
) -> Listed | None:
    """The experts that a list of modules is; None if it is none."""
    if not isinstance(container, nn.ModuleList | nn.ModuleDict) or not name:
        return None
    members = {key: child for key, child in container.named_children() if next(child.parameters(), None) is not None}
    shapes = {_shape_of(member) for member in members.values()}
    if len(members) < 2 or len({id(m) for m in members.values()}) < len(members) or len(shapes) != 1:
        return None
    if not any(parameter.dim() > 1 for parameter in next(iter(members.values())).parameters()):
        return None  # norms, one for each layer
    if any(type(member).forward is nn.Module.forward for member in members.values()):
        return None  # lists of modules, which the model calls one by one
    parent = model.get_submodule(name.rpartition(".")[0])
    has_forward = type(container).forward is not nn.Module.forward
    if isinstance(parent, nn.Sequential | nn.ModuleList | nn.ModuleDict) and not has_forward:
        return None
    if needs_router and len(members) not in _router_sizes(parent, container):
        return None
    block = container if has_forward else parent
    return Listed(name, names[id(block)], block, container, tuple(members))


def _shape_of(module: nn.Module) -> tuple[object, ...]:
    """What equal experts have in common."""
    parameters = tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())
    return type(module), parameters


def _router_sizes(parent: nn.Module, container: nn.Module) -> set[int]:
    """The sizes of the parameters of two dimensions beside the experts."""
    return {
        size
        for parameter in _outside_of_expert_structure(parent, container)
        if parameter.dim() == 2
        for size in parameter.shape
    }


def _outside_of_expert_structure(parent: nn.Module, container: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters beside experts: of what holds them and of its parts, but for parts with experts of their own and lists of layers."""
    yield from parent.parameters(recurse=False)
    for part in parent.children():
        is_layers = isinstance(part, nn.ModuleList | nn.ModuleDict) and any(p.dim() > 2 for p in part.parameters())
        if part is not container and not is_layers and not _holds_experts(part):
            yield from part.parameters()
