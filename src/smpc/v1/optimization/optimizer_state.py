"""The state of an optimizer whose model is spread over several ranks, under the names of parameters in the user's module.

Terms
    full state      {"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}: torch's, with the names of parameters in place of
                    their numbers, so that it fits any partition. In half precision the state of a parameter also has its fp32 `master`;
                    with fp16 there is a further key `loss_scaler`
    partial state   the same with the state of one rank only, and the key `_smp_is_partial`; `_smp_is_sharded` if it lacks the state
                    that other replicas own, and then `_smp_ranges`: {name: (dimension, start, length)} of the parameters of which it
                    has the state of some rows, in this rank's tensor

Parameters that the model does not have are called `#i`, by their number in the optimizer.

`make_state` gives an optimizer that has made no step yet the state that it would have after one, to load values into.

    make_state(optimizer, [weight, bias])     optimizer.state has entries for both; neither they nor their gradients have changed

It is made by a step with gradients and learning rates of 0, as torch's own `set_optimizer_state_dict` does.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from smpc.checkpoint import Shard
from smpc.checkpoint.stateful import LocalStateDict, held
from smpc.errors import CheckpointError, ConfigError
from smpc.executor.replicas.data_parallel import broadcast
from smpc.nn.parallel import ParameterSlice
from smpc.sharding.dtensors import as_state_of, local, whole
from smpc.v1.layout.placement import place
from smpc.v1.model.distributed_model import DistributedModel
from smpc.v1.optimization.loss_scale import LossScaler
from smpc.v1.optimization.sharded_optimizer_state import Range
from smpc.v1.optimization.update_targets import Updates
from smpc.v1.session.process_state import state
from smpc.v1.session.step_messages import Control
from smpc.v1.state_dicts.merge_ranks import fill, merge, stream, survey
from smpc.v1.state_dicts.rank_state import PARTIAL


@torch.no_grad()
def make_state(optimizer: Optimizer, wanted: Sequence[Tensor]) -> None:
    """Let the optimizer create the state of these entries of its groups."""
    kept = [(entry, entry.grad) for group in optimizer.param_groups for entry in group["params"]]
    rates = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    try:
        for entry, _ in kept:
            entry.grad = None
        for entry in wanted:
            entry.grad = torch.zeros_like(entry)
        for group, rate in rates:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        optimizer.step()
    finally:
        for group, rate in rates:
            group["lr"] = rate
        for entry, grad in kept:
            entry.grad = grad


KIND, SEPARATOR = "optimizer", "::"  # of the tensors in a checkpoint
MASTER, SCALER, SHARDED, RANGES = "master", "loss_scaler", "_smp_is_sharded", "_smp_ranges"
Place = tuple[tuple[int, ...], ParameterSlice | None]  # the shape of a tensor, and which slice of a whole it is


class OptimizerState:
    """Reads and writes the state of a wrapped optimizer. `world`: messages among all ranks, if state is sharded."""

    def __init__(
        self, optimizer: Optimizer, updates: Updates, scaler: LossScaler | None, world: Control | None
    ) -> None:
        self._optimizer, self._updates, self._scaler, self._world = optimizer, updates, scaler, world

    @property
    def is_ready(self) -> bool:
        """Whether the model is partitioned."""
        return _named_model().partitioned

    def local(self, *, gather: bool) -> dict[str, Any]:
        """This rank's state. Collective over all ranks if state is sharded and `gather`."""
        own = {**_gathered_state(self._named_state(local=True)), PARTIAL: True}
        model = _named_model()
        if self._world is None or not model.partitioned:
            return own
        if not gather:
            ranges = {name: (own.dim, own.start, own.length) for name, own in self._ranges().items()}
            return {**own, SHARDED: True, RANGES: ranges}
        self._meet(self._world, "optimizer.local_state_dict")
        held, shapes = self._local_names(model), self._shapes()

        def all_of(name: str, key: str, whole: tuple[int, ...]) -> Place | None:
            return _place_of(model, name, whole, shapes[name], None) if name in held else None

        return {**own, "state": self._from_parts(model, own["state"], all_of, self._world, self._ranges())}

    def full(self, *, only_on_rank_0: bool) -> dict[str, Any]:
        """The whole model's state, on the CPU. Collective over the replica, or over all ranks if state is sharded."""
        model = _named_model()
        control = self._world if model.partitioned else None
        if control is not None:
            self._meet(control, "optimizer.state_dict")
        else:
            control = model.meet("optimizer.state_dict")
        if control is None:
            return _gathered_state(self._named_state(local=False))
        own = _gathered_state(self._named_state(local=True))
        part = {(name, key): value for name, items in own["state"].items() for key, value in items.items()}
        mesh, rank = state.session.mesh, state.session.rank
        wanted = not only_on_rank_0 or mesh.pp_rank(rank) == mesh.tp_rank(rank) == 0
        with model.watch_checkpoint("optimizer.state_dict"):
            items = survey(part, control, "the optimizer's state", self._slicer(model, self._ranges()))
            merged = merge(part, items, control, lambda key: wanted)
        return {**own, "state": _nested(merged, self._names())} if wanted else {}

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Load a full or a partial state; see DistributedOptimizer."""
        self._fill(state_dict, self._by_name(state_dict, self._names()), late=False)
        self._load_scaler(state_dict.get(SCALER))

    def load_early(self, state_dict: Mapping[str, Any]) -> Callable[[], None]:
        """Before the partition: load what needs none, the options of the groups and the loss scale; returns what loads the tensors.

        Raises CheckpointError if the state does not fit the optimizer.
        """
        given = self._by_name(state_dict, self._names())
        self.install_options(state_dict)
        return lambda: self._fill(state_dict, given, late=True)

    def install_options(self, saved: Mapping[str, Any]) -> None:
        """Load the options of all groups, and the loss scale, without tensors, of a state or of a checkpoint's `metadata`."""
        self._optimizer.load_state_dict({"state": {}, "param_groups": self._numbered(saved["param_groups"])})
        self._load_scaler(saved.get(SCALER))

    def _fill(self, state_dict: Mapping[str, Any], given: Mapping[str, Mapping[str, Any]], *, late: bool) -> None:
        """Load the tensors, and the options unless it is `late`. `given`: the state by name."""
        model = _named_model()
        control = self._control_for(model, state_dict)
        wanted = self._wanted(model)
        ranges = {name: Range(*own) for name, own in state_dict.get(RANGES, {}).items()}
        found = (
            {name: _own_parts(items, name, wanted) for name, items in given.items()}
            if control is None
            else self._from_parts(model, given, wanted, control, ranges)
        )
        self._install(found, state_dict["param_groups"], late=late)

    def _control_for(self, model: DistributedModel, state_dict: Mapping[str, Any]) -> Control | None:
        """The ranks over which a partial state is merged; None for a full one, or if one rank has all."""
        if not state_dict.get(PARTIAL, False):
            return None
        if self._world is not None:
            self._meet(self._world, "optimizer.load_state_dict")
            return self._world
        if state_dict.get(SHARDED, False) and state.session.mesh.rdp_size > 1:
            raise CheckpointError(
                "optimizer state: it lacks what other replicas own; save local_state_dict(gather_if_shard=True), or load it with "
                "shard_optimizer_state: true, or use smp.save_checkpoint"
            )
        return model.meet("optimizer.load_state_dict")

    def _meet(self, control: Control, what: str) -> None:
        control.meet(what, datetime.timedelta(seconds=state.cfg.checkpoint_timeout), _named_model().whereabouts)

    def _from_parts(
        self,
        model: DistributedModel,
        given: Mapping[str, Any],
        wanted: Callable[[str, str, tuple[int, ...]], Place | None],
        control: Control,
        ranges: Mapping[str, Range],
    ) -> dict[str, dict[str, Any]]:
        """The `wanted` state, assembled from the parts of all ranks, whatever partition they come from. `ranges`: of the given parts."""
        part = {(name, key): value for name, items in given.items() for key, value in items.items()}
        own: dict[tuple[str, str], Any] = {}
        with model.watch_checkpoint("exchanging optimizer state"):
            items = survey(part, control, "the optimizer state", self._slicer(model, ranges))
            for key, piece, value in stream(part, items, control):
                place = wanted(*key, items[key].shape)
                if place is not None and piece is None:
                    own[key] = value
                elif place is not None and piece is not None:
                    shape, shard = place
                    if key not in own:
                        own[key] = value.new_empty(shape)
                    fill(own[key], shard, piece, value)
                del value  # before the next one comes
        return _nested(own, self._names())

    def _wanted(self, model: DistributedModel) -> Callable[[str, str, tuple[int, ...]], Place | None]:
        """Says which part of a saved value of a given shape this rank loads; None if it loads none.

        A rank loads the part that it updates. A saved master of an fp32 parameter, which has no owner, is loaded by all holders of the
        parameter.
        """
        shapes, ranges = self._shapes(), self._ranges()
        held, own = self._local_names(model), self._own_names(model)

        def wanted(name: str, key: str, whole: tuple[int, ...]) -> Place | None:
            is_value = key == MASTER and self._updates.half is None
            if name not in (held if is_value else own):
                return None
            return _place_of(model, name, whole, shapes[name], None if is_value else ranges.get(name))

        return wanted

    # -- checkpoints -----------------------------------------------------------------------------------------------------

    def metadata(self) -> dict[str, Any]:
        """The state that a checkpoint stores once: the options of the groups, by names of parameters, and the loss scale."""
        found = self._named_state(local=True)
        return {key: found[key] for key in ("param_groups", SCALER) if key in found}

    def shards(self) -> tuple[list[Shard], dict[str, Any]]:
        """This rank's state for a checkpoint: tensors, called `parameter::key`, and plain values by parameter and key."""
        slice_of = self._slicer(_named_model(), self._ranges())
        found: list[Shard] = []
        plain: dict[str, Any] = {}
        for name, items in self._named_state(local=True)["state"].items():
            for key, value in items.items():
                if isinstance(value, Tensor):
                    found += place(KIND, f"{name}{SEPARATOR}{key}", value, slice_of((name, key), value))
                else:
                    plain.setdefault(name, {})[key] = value
        return found, plain

    def held(self, *, to_fill: bool) -> LocalStateDict:
        """This rank's state for torch.distributed.checkpoint to save or fill, in views. For filling, missing state is created."""
        if to_fill and not self._optimizer.state:
            own = self._own_names(_named_model())
            entries = [entry for group in self._optimizer.param_groups for entry in group["params"]]
            named = zip(self._names(), entries, strict=True)
            make_state(self._optimizer, [entry for name, entry in named if name in own and entry.requires_grad])
        slice_of = self._slicer(_named_model(), self._ranges())
        found = self._named_state(local=True)
        states: dict[str, dict[str, Any]] = {}
        for name, items in found["state"].items():
            for key, value in items.items():
                part: Any = value
                if isinstance(value, Tensor):
                    part = held(place(KIND, f"{name}{SEPARATOR}{key}", value, slice_of((name, key), value)))
                if part is not None:
                    states.setdefault(name, {})[key] = part
        return LocalStateDict({**found, "state": states})

    def load_held(self, filled: LocalStateDict) -> None:
        """Apply the state that torch has filled: tensors are this optimizer's own, other values and options have to be copied."""
        found = self._named_state(local=True)["state"]
        for name, items in filled["state"].items():
            plain = {key: value for key, value in items.items() if not isinstance(value, Tensor)}
            found.setdefault(name, {}).update(plain)
        self._load_scaler(filled.get(SCALER))
        self._install(found, filled["param_groups"])

    def targets(
        self, entries: Mapping[str, tuple[tuple[int, ...], torch.dtype]], *, only_masters: bool = False
    ) -> list[Shard]:
        """Tensors to fill with this rank's part of saved ones, whose shape and dtype `entries` has by name: the masters, else new ones."""
        wanted, found = self._wanted(_named_model()), []
        parameters = dict(zip(self._names(), self._updates.parameters(), strict=True))
        for entry, (whole_shape, dtype) in entries.items():
            name, _, key = entry.rpartition(SEPARATOR)
            place_ = wanted(name, key, whole_shape)
            if place_ is None or (only_masters and key != MASTER):
                continue
            shape, slice_ = place_
            parameter = parameters[name]
            # Counts of steps are on the CPU; torch moves what must not stay there.
            device = parameter.device if whole_shape else torch.device("cpu")
            master = self._place_of_master(parameter) if key == MASTER else None
            if master is not None and tuple(master.shape) == shape:
                found += place(KIND, entry, master, slice_)
                continue
            if shape == tuple(parameter.shape) and isinstance(parameter, DTensor):
                empty = torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
            else:
                empty = torch.empty(shape, dtype=dtype, device=device)
            found += place(KIND, entry, empty, slice_)
        return found

    def check_groups(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Raises CheckpointError unless the saved groups have this optimizer's parameters."""
        found = [list(group["params"]) for group in param_groups]
        expected = [group["params"] for group in self._named_state(local=True)["param_groups"]]
        if found != expected:
            raise CheckpointError(
                f"optimizer: expected groups of {[len(names) for names in expected]} parameters, found groups of "
                f"{[len(names) for names in found]}, or other parameters or another order; construct the optimizer as it was saved"
            )

    def install_saved(
        self,
        filled: Sequence[Shard],
        plain: Sequence[Mapping[str, Any]],
        metadata: Mapping[str, Any],
        *,
        only_masters: bool = False,
        late: bool = False,
    ) -> None:
        """Load the filled tensors of `targets`, and the plain values of the saving job's ranks.

        `late`: `install_options` has loaded the options before, and the script may have changed them since.
        """
        own = self._own_names(_named_model())
        found: dict[str, dict[str, Any]] = {}
        runs: dict[str, list[Tensor]] = {}
        for shard in filled:
            runs.setdefault(shard.name, []).append(shard.tensor)
        for entry, tensors in runs.items():
            name, _, key = entry.rpartition(SEPARATOR)
            found.setdefault(name, {})[key] = _named_model().slices.joined(name, tensors)
        for items in () if only_masters else plain:
            for name in items:
                if name in own:
                    found.setdefault(name, {}).update(items[name])
        if only_masters:
            self._install_masters(found)
        else:
            self._install(found, metadata["param_groups"], late=late)
        if not late:
            self._load_scaler(metadata.get(SCALER))

    def replicate(self, group: dist.ProcessGroup, source: int) -> None:
        """Take over the masters and the loss scale of the group's rank `source`. Collective over the group."""
        masters = self._updates.masters
        broadcast(masters.all(), group, source)
        masters.refresh()
        if self._scaler is not None:
            found = [self._scaler.state_dict()]
            dist.broadcast_object_list(found, group=group, group_src=source, device=state.session.message_device)
            self._scaler.load_state_dict(found[0])

    # ------------------------------------------------------------------------------------------------------------------

    def _numbered(self, param_groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Saved groups as torch has them, with numbers of parameters; groups that have been added since keep their options."""
        groups, first = [], 0
        own = self._optimizer.param_groups
        for group in (*param_groups, *own[len(param_groups) :]):
            count = len(group["params"])
            groups.append({**group, "params": list(range(first, first + count))})
            first += count
        return groups

    def _install(
        self,
        found: Mapping[str, Mapping[str, Any]],
        param_groups: Sequence[Mapping[str, Any]],
        *,
        late: bool = False,
    ) -> None:
        """Load the state of this rank's parameters, by name, and the options of all groups; if it is `late`, these stay as they are."""
        numbers = {name: i for i, name in enumerate(self._names())}
        parameters = dict(zip(self._names(), self._updates.parameters(), strict=True))
        found = {
            name: {key: as_state_of(parameters[name], value) for key, value in items.items()}
            for name, items in found.items()
        }
        parameters = dict(zip(self._names(), self._updates.parameters(), strict=True))
        states = {}
        for name, items in found.items():
            rest = dict(items)
            if self._place_of_master(parameters[name]) is not None or self._updates.half is not None:
                rest.pop(MASTER, None)
            if rest:
                states[numbers[name]] = rest
        kept = list(self._optimizer.param_groups)
        self._optimizer.load_state_dict({"state": states, "param_groups": self._numbered(param_groups)})
        if late:
            self._optimizer.param_groups[:] = kept  # the groups themselves: scripts and schedulers hold them
        self._install_masters(found)

    @torch.no_grad()
    def _install_masters(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        for name, parameter in zip(self._names(), self._updates.parameters(), strict=True):
            value, place = found.get(name, {}).get(MASTER), self._place_of_master(parameter)
            if value is None or place is None:
                continue
            own, given = local(place), local(as_state_of(parameter, value))
            if given.data_ptr() != own.data_ptr():
                own.copy_(given)
            if place is not parameter:
                self._updates.write_master(parameter)

    def _place_of_master(self, parameter: Tensor) -> Tensor | None:
        """Where a saved master is loaded: into the master, or into a parameter that is fp32 now and was half precision before."""
        if self._updates.half is None:
            return parameter if parameter.dtype is torch.float32 else None
        return self._updates.master_of(parameter)

    def _load_scaler(self, found: Mapping[str, Any] | None) -> None:
        if found is not None and self._scaler is not None:
            self._scaler.load_state_dict(found)

    def _slicer(
        self, model: DistributedModel, ranges: Mapping[str, Range]
    ) -> Callable[[tuple[str, str], Tensor], ParameterSlice | None]:
        """The slice of a whole tensor that a tensor of the state is, by its shape: it may come from another job, with these `ranges`."""
        shapes = self._shapes()

        def slice_of(key: tuple[str, str], value: Tensor) -> ParameterSlice | None:
            name, entry = key
            shape, rows = shapes.get(name, ()), ranges.get(name)
            if rows is not None and tuple(value.shape) == rows.shape(shape):
                return rows.within(model.slices.get(name), shape[rows.dim])
            if tuple(value.shape) == model.slices.whole_shape(name, shape) != tuple(shape):
                return None
            return model.slices.of_state(name, entry, value, shape)

        return slice_of

    def _ranges(self) -> dict[str, Range]:
        """The rows of which this rank has the state, for each parameter that is in parts."""
        pairs = zip(self._names(), self._updates.parameters(), strict=True)
        found = {name: self._updates.parts.range_of(parameter) for name, parameter in pairs}
        return {name: rows for name, rows in found.items() if rows is not None}

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter on the ranks that hold it."""
        known = _named_model().shapes()
        pairs = zip(self._names(), self._updates.parameters(), strict=True)
        return {name: known.get(name, tuple(parameter.shape)) for name, parameter in pairs}

    def _by_name(self, state_dict: Mapping[str, Any], names: list[str]) -> dict[str, dict[str, Any]]:
        """The per-parameter part of a state by name. Raises CheckpointError if it belongs to other parameters."""
        missing = [key for key in ("state", "param_groups") if key not in state_dict]
        if missing:
            raise CheckpointError(
                f"optimizer state: expected the keys state and param_groups, found {list(state_dict)}"
            )
        sizes = [len(group["params"]) for group in self._optimizer.param_groups]
        found = [len(group["params"]) for group in state_dict["param_groups"]]
        if sizes != found:
            raise CheckpointError(f"optimizer state: expected groups of {sizes} parameters, found groups of {found}")
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        translate: dict[Any, str] = dict(zip(saved, names, strict=True))  # torch numbers parameters in their order
        if any(isinstance(key, str) for key in saved):
            unknown = [key for key in saved if key not in names]
            if unknown:
                raise CheckpointError(
                    f"optimizer state: {len(unknown)} parameters are not in this optimizer, {unknown[0]!r} among them"
                )
            translate = {key: key for key in saved}
        return {translate[key]: dict(items) for key, items in state_dict["state"].items()}

    def _names(self) -> list[str]:
        """Names of the optimizer's parameters, in their order."""
        known = {id(parameter): name for name, parameter in _named_model().named_parameters()}
        return [known.get(id(parameter), f"#{i}") for i, parameter in enumerate(self._updates.parameters())]

    def _local_names(self, model: DistributedModel) -> frozenset[str]:
        """Names of the parameters that this rank holds."""
        foreign = {name for name, _ in model.named_parameters()}
        if model.partitioned:
            foreign -= {name for name, _ in model.local_named_parameters()}
        else:
            foreign = set()
        return frozenset(name for name in self._names() if name not in foreign)

    def _own_names(self, model: DistributedModel) -> frozenset[str]:
        """Names of the parameters that this rank updates."""
        local = self._local_names(model)
        pairs = zip(self._names(), self._updates.parameters(), strict=True)
        return frozenset(name for name, parameter in pairs if name in local and self._updates.owns(parameter))

    def _named_state(self, *, local: bool) -> dict[str, Any]:
        names = self._names()
        kept = self._local_names(_named_model()) if local else frozenset(names)
        inner = self._optimizer.state_dict()
        groups = [{**group, "params": [names[number] for number in group["params"]]} for group in inner["param_groups"]]
        states: dict[str, dict[str, Any]] = {}
        for number, (name, parameter) in enumerate(zip(names, self._updates.parameters(), strict=True)):
            items = dict(inner["state"].get(number, {}))
            master = self._updates.master_of(parameter)
            if master is not None:
                items[MASTER] = master.detach()
            if items and name in kept:
                states[name] = items
        found: dict[str, Any] = {"state": states, "param_groups": groups}
        if self._scaler is not None:
            found[SCALER] = self._scaler.state_dict()
        return found


def _gathered_state(named: Mapping[str, Any]) -> dict[str, Any]:
    """A state with sharded values gathered; collective over the replicas."""
    states = {
        name: {key: whole(value) if isinstance(value, Tensor) else value for key, value in items.items()}
        for name, items in named["state"].items()
    }
    return {**named, "state": states}


def _place_of(
    model: DistributedModel, name: str, saved: tuple[int, ...], shape: tuple[int, ...], rows: Range | None
) -> Place:
    """This rank's region of a value of the shape `saved`, for a parameter of `shape` here, of which it wants `rows`, or all."""
    if saved != model.slices.whole_shape(name, shape):
        return saved, None  # a number of steps, or another value of the whole parameter
    shard = model.slices.get(name)
    if rows is None:
        return (saved, None) if shard is None else (shape, shard)
    return rows.shape(shape), rows.within(shard, shape[rows.dim])


def _own_parts(
    items: Mapping[str, Any], name: str, wanted: Callable[[str, str, tuple[int, ...]], Place | None]
) -> dict[str, Any]:
    """This rank's part of the whole values of a parameter's state."""
    found: dict[str, Any] = {}
    for key, value in items.items():
        place_ = wanted(name, key, tuple(value.shape) if isinstance(value, Tensor) else ())
        if place_ is None:
            continue
        shape, shard = place_
        if isinstance(value, Tensor) and shard is not None:
            runs = [value.narrow(shard.dim, at, length) for _, at, length in shard.runs_of(shape[shard.dim])]
            value = torch.cat(runs, shard.dim)
        found[key] = value
    return found


def _nested(flat: Mapping[Any, Any], order: list[str]) -> dict[str, dict[str, Any]]:
    """{(name, key): value} as {name: {key: value}}, names in order."""
    nested: dict[str, dict[str, Any]] = {}
    for (name, key), value in flat.items():
        nested.setdefault(name, {})[key] = value
    return {name: nested[name] for name in order if name in nested}


def _named_model() -> DistributedModel:
    """The model whose names the state has; ConfigError if there is none."""
    model = state.model
    if not isinstance(model, DistributedModel):
        raise ConfigError("the optimizer's state has names once there is a smp.DistributedModel; construct it first")
    return model
