"""Checkpoints of PyTorch modules and optimizers as they are: plain, in DistributedDataParallel, or of DTensors (FSDP2, tensor parallelism).

    save(root, "step_100", module_content(model, optimizer, metadata={"step": 100}), channel)
    load_modules(root.find("step_100"), model, optimizer, channel)

Every rank saves and loads its part of each DTensor: nothing is gathered, and a checkpoint loads on another mesh, or without one. Names
are the module's, without prefixes of wrappers; a tied parameter is saved once. `smp.save_checkpoint` writes the same kind of checkpoint:
each reads the other's.

An optimizer may update fp32 masters in the places of half-precision parameters. `masters` then has the master of each such parameter:

    masters = {p: m for p, m in zip(model.parameters(), group["params"])}             # or, of a smp.DistributedOptimizer,
    masters = {optimizer.parameter_of(m): m for m in optimizer.masters}               # whose own optimizer is optimizer.optimizer
    load_modules(root.find("step_100"), model, optimizer, channel, masters=masters)

They get the masters that were saved, bit by bit, and are made of the parameters where none were. Loaded with their optimizer, fp32
parameters of which half-precision ones and masters were saved take the masters' values.

    kind "model"        parameters and persistent buffers by name
    kind "optimizer"    tensors of the optimizer's state, `parameter::key`, and masters, `parameter::master`; other values of it in the
                        ranks' state
    metadata            what is given, and "extra_state", "tied" (other names), and "optimizer", the options of the parameter groups

`shard_of` is a rank's part of a tensor: all of it, or for a DTensor (FSDP2, torch's tensor parallelism) its local part with its offsets.

    shard_of("model", "head.weight", dtensor)     the Shard of this rank, a view; perhaps an empty one

Replicated DTensors are shards that several ranks hold alike, so one of them writes them. DTensors that are still to be summed (Partial)
have no values yet, and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from smpc.checkpoint.channel import Channel, together
from smpc.checkpoint.format.draft_content import Content, Shard
from smpc.checkpoint.format.manifest import Entry
from smpc.checkpoint.format.regular_file import printable
from smpc.checkpoint.load import Loaded, load
from smpc.checkpoint.reader import Checkpoint
from smpc.checkpoint.rng import capture_rng
from smpc.checkpoint.sources.conversion_sources import TIED
from smpc.errors import CheckpointError


def shard_of(kind: str, name: str, tensor: Tensor) -> Shard | None:
    """This rank's part of a tensor, to be saved or filled; None if it is not in its mesh. CheckpointError for a DTensor without values."""
    if not isinstance(tensor, DTensor):
        return Shard.whole(kind, name, tensor.detach())
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(
            f"{kind} {name}: a DTensor that is still to be summed, {tensor.placements}; redistribute it first"
        )
    if tensor.device_mesh.get_coordinate() is None:
        return None  # this rank is not in its mesh
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = (
        tensor.to_local().detach()
    )  # in this order: writing into it then counts in the version of what the DTensor holds
    if tuple(local.shape) != tuple(shape):
        raise CheckpointError(
            f"{kind} {name}: expected a local part of shape {list(shape)}, found {list(local.shape)}; DTensors must be split as torch "
            "splits them"
        )
    return Shard.of(kind, name, local, tuple(tensor.shape), tuple(offsets))


def empty_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A new tensor of the same shape, device and placement."""
    return torch.empty_like(tensor.detach(), dtype=dtype, memory_format=torch.contiguous_format)


MODEL, OPTIMIZER, SEPARATOR = "model", "optimizer", "::"
_MASTER = "master"
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # of torch.compile, checkpointing, FSDP


def module_content(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    masters: Mapping[Tensor, Tensor] | None = None,
    metadata: Mapping[str, Any] | None = None,
    user: Any = None,
) -> Content:
    """This rank's content for saving a model and its optimizer; views, not copies. It includes this rank's random state."""
    named, own_masters = _named_tensors(model), _named_masters(model, masters)
    found: list[Shard | None] = []
    for name, tensor in named.items():
        shard = shard_of(MODEL, name, tensor)
        found.append(shard and replace(shard, varies=not isinstance(tensor, nn.Parameter)))
    found += [shard_of(OPTIMIZER, _master_key(name), master) for name, master in own_masters.items()]
    described: dict[str, Any] = {
        **(metadata or {}),
        "extra_state": _extra_state_of_modules(model),
        TIED: _tied_in_module(model),
    }
    rank_state: dict[str, Any] = {"rng": capture_rng()}
    if optimizer is not None:
        state = optimizer.state_dict()
        names = _parameter_names(model, optimizer, own_masters)
        plain: dict[str, dict[str, Any]] = {}
        for number, items in state["state"].items():
            for key, value in items.items():
                if isinstance(value, Tensor):
                    found.append(shard_of(OPTIMIZER, f"{names[number]}{SEPARATOR}{key}", value))
                else:
                    plain.setdefault(names[number], {})[key] = value
        groups = [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]]
        described[OPTIMIZER] = {"param_groups": groups}
        rank_state[OPTIMIZER] = plain
    return Content([shard for shard in found if shard is not None], described, rank_state, user)


def load_modules(
    folder: str,
    model: nn.Module,
    optimizer: Optimizer | None,
    channel: Channel,
    *,
    masters: Mapping[Tensor, Tensor] | None = None,
    strict: bool = True,
    cast: bool = False,
) -> Loaded:
    """Fill a model and, unless None, its optimizer, which is constructed as it was when it was saved. Collective; see `load`.

    Raises CheckpointError on every rank, listing what does not fit; nothing has been changed then.
    """
    opened: list[Checkpoint] = []
    states: list[_OptimizerState] = []
    wanted: list[Shard] = []
    known = [(MODEL, name) for name in _tied_in_module(model)]
    saved_extra: dict[str, Any] = {}
    unsaved: dict[str, Tensor] = {}  # masters that are to be made of the parameters

    def prepare() -> None:
        """The work that may fail on one rank alone."""
        opened.append(Checkpoint.open(folder))
        own_masters = _named_masters(model, masters)
        if optimizer is not None:
            states.append(_OptimizerState(model, optimizer, opened[0], own_masters))
        saved_extra.update(opened[0].metadata.get("extra_state", {}))
        named = _named_tensors(model)
        places = _places_of_masters(opened[0], named, own_masters, is_for_parameters=optimizer is not None)
        shards = [shard_of(OPTIMIZER, _master_key(name), place) for name, place in places.items()]
        taken = [name for name, place in places.items() if place is named[name]]
        shards += [shard_of(MODEL, name, tensor) for name, tensor in named.items() if name not in taken]
        shards += [shard for each in states for shard in each.shards]
        wanted.extend(shard for shard in shards if shard is not None)
        known.extend((MODEL, name) for name in taken)
        known.extend((OPTIMIZER, name) for each in states for name in each.left)
        unsaved.update({name: master for name, master in own_masters.items() if name not in places})

    try:
        together(channel, prepare)
        kinds = [MODEL, *([OPTIMIZER] if states else [])]
        loaded = load(folder, wanted, channel, strict=strict, cast=cast, kinds=kinds, known=known)
        for name, master in unsaved.items():
            _copy_local(master, _named_tensors(model)[name])
        for each in states:
            each.install()
        for key in _extra_keys(model):
            if _plain_name(model, key) in saved_extra:
                model.get_submodule(key.rpartition(".")[0]).set_extra_state(saved_extra[_plain_name(model, key)])
    finally:
        for checkpoint in opened:
            checkpoint.close()
    return loaded


class _OptimizerState:
    """The state that a checkpoint has for an optimizer, in new tensors, sharded like its parameters."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, checkpoint: Checkpoint, masters: Mapping[str, Tensor]
    ) -> None:
        self._optimizer = optimizer
        self._names = _parameter_names(model, optimizer, masters)
        saved = checkpoint.metadata.get(OPTIMIZER)
        if saved is None:
            raise CheckpointError(f"{checkpoint.folder} has no optimizer state; load the model alone, with None")
        self._groups: Sequence[Mapping[str, Any]] = saved["param_groups"]
        found, own = [list(group["params"]) for group in self._groups], self._grouped()
        if found != own:
            raise CheckpointError(
                f"optimizer: expected groups of {[len(names) for names in own]} parameters, found groups of "
                f"{[len(names) for names in found]}, or other parameters or another order; construct the optimizer as it was saved"
            )
        numbers = {name: number for number, name in enumerate(self._names)}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._state: dict[int, dict[str, Any]] = {}
        self.shards: list[Shard | None] = []
        self.left: list[str] = []  # masters, which are no state
        for (kind, full), entry in checkpoint.entries.items():
            name, _, key = full.rpartition(SEPARATOR)
            if kind == OPTIMIZER and key == _MASTER:
                self.left.append(full)
            elif kind == OPTIMIZER and name in numbers:
                number = numbers[name]
                known = optimizer.state.get(parameters[number], {}).get(key)
                value = _room_for_module_tensor(full, entry, parameters[number], known)
                self._state.setdefault(number, {})[key] = value
                self.shards.append(shard_of(OPTIMIZER, full, value))
        for rank in range(checkpoint.manifest.world_size):
            plain = checkpoint.rank_state(rank) if checkpoint.manifest.ranks[rank] else {}
            for name, items in plain.get(OPTIMIZER, {}).items():
                if name in numbers:
                    self._state.setdefault(numbers[name], {}).update(items)

    def install(self) -> None:
        """Give the optimizer what has been filled."""
        groups, first = [], 0
        for group in self._groups:
            count = len(group["params"])
            groups.append({**group, "params": list(range(first, first + count))})
            first += count
        self._optimizer.load_state_dict({"state": self._state, "param_groups": groups})

    def _grouped(self) -> list[list[str]]:
        groups, first = [], 0
        for group in self._optimizer.param_groups:
            groups.append(self._names[first : first + len(group["params"])])
            first += len(group["params"])
        return groups


def _room_for_module_tensor(name: str, entry: Entry, parameter: Tensor, known: object) -> Tensor:
    """A tensor for a saved one: the optimizer's own, or a new one sharded like the parameter."""
    if isinstance(known, Tensor) and tuple(known.shape) == entry.shape:
        return empty_like(known, entry.dtype)
    if tuple(parameter.shape) == entry.shape:
        return empty_like(parameter, entry.dtype)
    if isinstance(parameter, DTensor) and torch.Size(entry.shape).numel() != 1:
        raise CheckpointError(
            f"optimizer {printable(name)}: has the shape {list(entry.shape)}, its parameter is a DTensor of {list(parameter.shape)}, so "
            "its place is not known; take one step before loading"
        )
    device = parameter.device if entry.shape else torch.device("cpu")  # counts of steps
    return torch.empty(entry.shape, dtype=entry.dtype, device=device)


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name."""
    saved = {id(value) for value in model.state_dict(keep_vars=True).values()}
    pairs = [*model.named_parameters(), *model.named_buffers()]
    return {_plain_name(model, name): tensor for name, tensor in pairs if id(tensor) in saved}


def _tied_in_module(model: nn.Module) -> dict[str, str]:
    """The names under which parameters and buffers are in the state dict besides, and the first name of each."""
    names = {id(tensor): name for name, tensor in _named_tensors(model).items()}
    keys = {_plain_name(model, key): names.get(id(value)) for key, value in model.state_dict(keep_vars=True).items()}
    return {key: name for key, name in keys.items() if name is not None and name != key}


def _extra_state_of_modules(model: nn.Module) -> dict[str, Any]:
    """Extra state by name; the same on every rank."""
    values = model.state_dict(keep_vars=True)
    return {_plain_name(model, key): values[key] for key in _extra_keys(model)}


def _extra_keys(model: nn.Module) -> list[str]:
    """The keys of the state dict that are neither parameters nor buffers."""
    named = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return [key for key, value in model.state_dict(keep_vars=True).items() if id(value) not in named]


def _named_masters(model: nn.Module, masters: Mapping[Tensor, Tensor] | None) -> dict[str, Tensor]:
    """Masters by the names of their parameters. Raises CheckpointError for masters of unknown parameters, or of another shape."""
    names = {id(parameter): _plain_name(model, name) for name, parameter in model.named_parameters()}
    found, wrong = {}, []
    for parameter, master in (masters or {}).items():
        name = names.get(id(parameter))
        if name is None:
            wrong.append(
                f"masters: one of shape {list(master.shape)} is that of a tensor that is no parameter of the model"
            )
        elif master.shape != parameter.shape or isinstance(master, DTensor) != isinstance(parameter, DTensor):
            wrong.append(
                f"masters: {name}: expected what the parameter is, {_tensor_form(parameter)}, found {_tensor_form(master)}"
            )
        else:
            found[name] = master
    if wrong:
        raise CheckpointError("\n".join(wrong))
    return found


def _tensor_form(tensor: Tensor) -> str:
    return f"a {type(tensor).__name__} of shape {list(tensor.shape)}"


def _places_of_masters(
    checkpoint: Checkpoint, named: Mapping[str, Tensor], masters: Mapping[str, Tensor], *, is_for_parameters: bool
) -> dict[str, Tensor]:
    """Where saved masters go, by the parameters' names: to masters; if `is_for_parameters`, to fp32 parameters of which less was saved."""
    places: dict[str, Tensor] = {}
    for name, tensor in named.items():
        entry, saved = checkpoint.entries.get((OPTIMIZER, _master_key(name))), checkpoint.entries.get((MODEL, name))
        if entry is None:
            continue
        if name in masters:
            places[name] = masters[name]
        elif is_for_parameters and tensor.dtype is entry.dtype and saved is not None and saved.dtype is not entry.dtype:
            places[name] = tensor
    return places


def _master_key(name: str) -> str:
    return f"{name}{SEPARATOR}{_MASTER}"


@torch.no_grad()
def _copy_local(target: Tensor, source: Tensor) -> None:
    """Copy this rank's part of one tensor into another that is sharded alike."""
    own, given = shard_of(OPTIMIZER, _MASTER, target), shard_of(MODEL, _MASTER, source)
    if own is not None and given is not None:
        own.tensor.copy_(given.tensor)


def _parameter_names(model: nn.Module, optimizer: Optimizer, masters: Mapping[str, Tensor]) -> list[str]:
    known = {id(parameter): _plain_name(model, name) for name, parameter in model.named_parameters()}
    known |= {id(master): name for name, master in masters.items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [known.get(id(parameter), f"#{number}") for number, parameter in enumerate(parameters)]


def _plain_name(model: nn.Module, name: str) -> str:
    parts = name.split(".")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        parts = parts[1:]
    return ".".join(part for part in parts if part not in _WRAPPERS)
