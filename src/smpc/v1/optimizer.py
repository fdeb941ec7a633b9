"""`smp.DistributedOptimizer`: saves and loads the optimizer state of a model that lies on several ranks.

    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

The wrapped optimizer does the work: after the partition it finds gradients at this rank's parameters only, and leaves the others alone. Its
`param_groups` and `state` are the wrapper's, so learning-rate schedulers take either of the two.

Terms
    full state      {"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}: torch's, with the names of parameters in place of
                    their numbers, so that it fits any partition
    partial state   the same with the state of one rank only, and the key `_smp_is_partial`

Parameters that the model does not have are called `#i`, by their number in the optimizer.

Source: public SMP v1 API ("smdistributed.modelparallel.torch.DistributedOptimizer").
"""

from __future__ import annotations

import contextlib
import difflib
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from smpc.checkpoint import Shard
from smpc.errors import CheckpointError, ConfigError, ConfigTypeError
from smpc.nn import parallel
from smpc.v1.control import Control
from smpc.v1.merge import fill, merge, stream, survey
from smpc.v1.model import DistributedModel
from smpc.v1.model_state import PARTIAL
from smpc.v1.slices import Slices, place
from smpc.v1.state import state

KIND, SEPARATOR = "optimizer", "::"  # of the tensors in a checkpoint
_LOSS_SCALE_ARGUMENTS = (
    "init_scale",
    "scale_factor",
    "scale_window",
    "min_scale",
    "delayed_shift",
    "consecutive_hysteresis",
    "dynamic_loss_args",
)


class DistributedOptimizer(Optimizer):
    """Wraps an optimizer of the DistributedModel's parameters; `optimizer` is the wrapped one.

    `static_loss_scale`, `dynamic_loss_scale` and its arguments concern float16 training, and have no effect in float32.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        **dynamic_loss_args: Any,
    ) -> None:
        # Not Optimizer's: everything that it would set up is the wrapped optimizer's own.
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, DistributedOptimizer):
            raise ConfigTypeError(f"optimizer: expected a torch.optim.Optimizer, found {type(optimizer).__name__}")
        _check_loss_scale(static_loss_scale, dynamic_loss_scale, dynamic_loss_args)
        self.optimizer = optimizer
        self._deferred: Mapping[str, Any] | None = None
        state.optimizer = self

    # -- the wrapped optimizer's -----------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """The wrapped optimizer's state."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's parameters."""
        with state.model.optimizer_step() if state.model is not None else contextlib.nullcontext():
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """See torch.optim.Optimizer; the hook gets the wrapped optimizer."""
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """See torch.optim.Optimizer; the hook gets the wrapped optimizer."""
        return self.optimizer.register_step_post_hook(hook)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    # -- state -----------------------------------------------------------------------------------------------------------

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """The optimizer state of this rank's parameters, with the key `_smp_is_partial`.

        `gather_if_shard`: for sharded optimizer states, of which there are none; it changes nothing.
        """
        return {**self._named_state(local=True), PARTIAL: True}

    def state_dict(self, gather_to_rank0: bool = False) -> dict[str, Any]:
        """The optimizer state of the whole model, tensors on the CPU.

        Collective over the replica like `DistributedModel.state_dict`; `gather_to_rank0`: only mp_rank 0 gets it, the others {}.
        """
        model = _model()
        control = model.meet("optimizer.state_dict")
        if control is None:
            return self._named_state(local=False)
        own = self._named_state(local=True)
        part = {(name, key): value for name, items in own["state"].items() for key, value in items.items()}
        wanted = not gather_to_rank0 or control.rank == 0
        with model.watch_checkpoint("optimizer.state_dict"):
            items = survey(part, control, "the optimizer's state", self._slicer(model))
            merged = merge(part, items, control, lambda key: wanted)
        return {"state": _nested(merged, self._names()), "param_groups": own["param_groups"]} if wanted else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a full or a partial state, or that of a torch optimizer in one process over the same parameters; on every rank.

        Loaded at once where the model is partitioned, else in its first step. Partial states are merged over the ranks.
        Raises CheckpointError if the state does not fit the optimizer.
        """
        model = _model()
        if not model.partitioned:
            self._deferred = state_dict
            return
        self._load(model, state_dict)

    def load_deferred(self) -> None:
        """Load what was given before the partition; the model calls it."""
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            self._load(_model(), deferred)

    def _load(self, model: DistributedModel, state_dict: Mapping[str, Any]) -> None:
        names = self._names()
        given = self._by_name(state_dict, names)
        local = self._local_names(model)
        control = model.meet("optimizer.load_state_dict") if state_dict.get(PARTIAL, False) else None
        shapes = self._shapes()
        own = (
            {name: _own_slices(model.slices, name, shapes[name], given[name]) for name in given if name in local}
            if control is None
            else self._from_parts(model, given, local, control)
        )
        self.install(own, state_dict["param_groups"])

    def _from_parts(
        self, model: DistributedModel, given: Mapping[str, Any], local: Collection[str], control: Control
    ) -> dict[str, dict[str, Any]]:
        """This rank's state, out of the parts of all ranks, whatever partition they come from."""
        part = {(name, key): value for name, items in given.items() for key, value in items.items()}
        own: dict[tuple[str, str], Any] = {}
        shapes = self._shapes()
        with model.watch_checkpoint("optimizer.load_state_dict"):
            items = survey(part, control, "the optimizer state to load", self._slicer(model))
            for key, piece, value in stream(part, items, control):
                if key[0] not in local:
                    continue
                if piece is None:
                    own[key] = value
                    continue
                whole, shape = items[key].shape, shapes[key[0]]
                shard = model.slices.get(key[0]) if whole == model.slices.whole_shape(key[0], shape) else None
                if key not in own:
                    own[key] = value.new_empty(whole if shard is None else shape)
                fill(own[key], shard, piece, value)
        return _nested(own, self._names())

    # -- checkpoints -----------------------------------------------------------------------------------------------------

    def shards(self) -> tuple[list[Shard], dict[str, Any]]:
        """What a checkpoint holds of this rank's state: tensors, called `parameter::key`, and plain values by parameter and key."""
        slices, shapes = _model().slices, self._shapes()
        found: list[Shard] = []
        plain: dict[str, Any] = {}
        for name, items in self._named_state(local=True)["state"].items():
            for key, value in items.items():
                if isinstance(value, Tensor):
                    slice_ = slices.of_state(name, key, value, shapes[name])
                    found.append(place(KIND, f"{name}{SEPARATOR}{key}", value, slice_))
                else:
                    plain.setdefault(name, {})[key] = value
        return found, plain

    def targets(self, entries: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> list[Shard]:
        """New tensors for this rank's part of saved tensors, of which `entries` has shape and dtype by name."""
        model = _model()
        local, slices, shapes = self._local_names(model), model.slices, self._shapes()
        devices = {name: p.device for name, p in zip(self._names(), self._parameters(), strict=True)}
        found = []
        for entry, (shape, dtype) in entries.items():
            name = entry.rpartition(SEPARATOR)[0]
            if name not in local:
                continue
            slice_ = slices.get(name) if shape == slices.whole_shape(name, shapes[name]) else None
            device = devices[name] if shape else torch.device("cpu")  # counts of steps; torch moves what must not stay
            own = torch.empty(shape if slice_ is None else shapes[name], dtype=dtype, device=device)
            found.append(place(KIND, entry, own, slice_))
        return found

    def param_groups_by_name(self) -> list[dict[str, Any]]:
        """The options of the groups, with the names of parameters in place of their numbers."""
        groups: list[dict[str, Any]] = self._named_state(local=True)["param_groups"]
        return groups

    def check_groups(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Raises CheckpointError unless saved groups have the parameters of this optimizer's."""
        found = [list(group["params"]) for group in param_groups]
        expected = [group["params"] for group in self.param_groups_by_name()]
        if found != expected:
            raise CheckpointError(
                f"optimizer: expected groups of {[len(names) for names in expected]} parameters, found groups of "
                f"{[len(names) for names in found]}, or other parameters or another order; construct the optimizer as it was saved"
            )

    def install_saved(
        self, filled: Sequence[Shard], plain: Sequence[Mapping[str, Any]], param_groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Load what `targets` made, filled, and the plain values that the ranks of the job that saved had."""
        local = self._local_names(_model())
        found: dict[str, dict[str, Any]] = {}
        for shard in filled:
            name, _, key = shard.name.rpartition(SEPARATOR)
            found.setdefault(name, {})[key] = shard.tensor
        for items in plain:
            for name in items:
                if name in local:
                    found.setdefault(name, {}).update(items[name])
        self.install(found, param_groups)

    def install(self, found: Mapping[str, Mapping[str, Any]], param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Load the state of this rank's parameters, by name, and the options of all groups."""
        numbers = {name: i for i, name in enumerate(self._names())}
        groups, first = [], 0
        for own, group in zip(self.optimizer.param_groups, param_groups, strict=True):
            groups.append({**group, "params": list(range(first, first + len(own["params"])))})
            first += len(own["params"])
        state = {numbers[name]: dict(items) for name, items in found.items()}
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _slicer(self, model: DistributedModel) -> Callable[[tuple[str, str], Tensor], parallel.Shard | None]:
        """Says which slice of a whole a tensor of the state is, by its shape: it may come from another job."""
        shapes = self._shapes()

        def slice_of(key: tuple[str, str], value: Tensor) -> parallel.Shard | None:
            name, entry = key
            shape = shapes.get(name, ())
            if tuple(value.shape) == model.slices.whole_shape(name, shape):
                return None
            return model.slices.of_state(name, entry, value, shape)

        return slice_of

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter on the ranks that hold it."""
        known = _model().shapes()
        return {n: known.get(n, tuple(p.shape)) for n, p in zip(self._names(), self._parameters(), strict=True)}

    def _by_name(self, state_dict: Mapping[str, Any], names: list[str]) -> dict[str, dict[str, Any]]:
        """The per-parameter part of a state by name. Raises CheckpointError if it belongs to other parameters."""
        missing = [key for key in ("state", "param_groups") if key not in state_dict]
        if missing:
            raise CheckpointError(
                f"optimizer state: expected the keys state and param_groups, found {list(state_dict)}"
            )
        sizes = [len(group["params"]) for group in self.optimizer.param_groups]
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
        known = {id(parameter): name for name, parameter in _model().named_parameters()}
        return [known.get(id(parameter), f"#{i}") for i, parameter in enumerate(self._parameters())]

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _local_names(self, model: DistributedModel) -> frozenset[str]:
        foreign = {name for name, _ in model.named_parameters()}
        if model.partitioned:
            foreign -= {name for name, _ in model.local_named_parameters()}
        else:
            foreign = set()
        return frozenset(name for name in self._names() if name not in foreign)

    def _named_state(self, *, local: bool) -> dict[str, Any]:
        names = self._names()
        kept = self._local_names(_model()) if local else frozenset(names)
        inner = self.optimizer.state_dict()
        groups = [{**group, "params": [names[number] for number in group["params"]]} for group in inner["param_groups"]]
        return {
            "state": {names[number]: items for number, items in inner["state"].items() if names[number] in kept},
            "param_groups": groups,
        }


def _own_slices(slices: Slices, name: str, shape: tuple[int, ...], items: Mapping[str, Any]) -> dict[str, Any]:
    """Of whole values of a parameter's state, this rank's slices."""
    whole = slices.whole_shape(name, shape)
    return {
        key: slices.own_part(name, value, shape).clone()
        if isinstance(value, Tensor) and whole != shape and tuple(value.shape) == whole
        else value
        for key, value in items.items()
    }


def _nested(flat: Mapping[Any, Any], order: list[str]) -> dict[str, dict[str, Any]]:
    """{(name, key): value} as {name: {key: value}}, names in order."""
    nested: dict[str, dict[str, Any]] = {}
    for (name, key), value in flat.items():
        nested.setdefault(name, {})[key] = value
    return {name: nested[name] for name in order if name in nested}


def _model() -> DistributedModel:
    model = state.model
    if not isinstance(model, DistributedModel):
        raise ConfigError("the optimizer's state has names once there is a smp.DistributedModel; construct it first")
    return model


def _check_loss_scale(static: Any, dynamic: Any, arguments: Mapping[str, Any]) -> None:
    unknown = [name for name in arguments if name not in _LOSS_SCALE_ARGUMENTS]
    if unknown:
        close = difflib.get_close_matches(unknown[0], _LOSS_SCALE_ARGUMENTS, 1)
        raise ConfigError(f"unknown argument {unknown[0]!r}{f'; did you mean {close[0]!r}?' if close else ''}")
    if static not in (1.0, None) or dynamic or arguments:
        warnings.warn("loss scaling has no effect: it is for float16, and this model trains in float32", stacklevel=3)
