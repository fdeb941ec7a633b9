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

import difflib
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from smpc.errors import CheckpointError, ConfigError, ConfigTypeError
from smpc.v1.merge import merge, survey
from smpc.v1.model import DistributedModel
from smpc.v1.model_state import PARTIAL
from smpc.v1.state import state

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
            merged = merge(part, survey(part, control, "the optimizer's state"), control, lambda key: wanted)
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
        if control is not None:
            part = {(name, key): value for name, items in given.items() for key, value in items.items()}
            with model.watch_checkpoint("optimizer.load_state_dict"):
                items = survey(part, control, "the optimizer state to load")
                given = _nested(merge(part, items, control, lambda key: key[0] in local), names)
        numbers = {name: i for i, name in enumerate(names)}
        groups, first = [], 0
        for own, group in zip(self.optimizer.param_groups, state_dict["param_groups"], strict=True):
            groups.append({**group, "params": list(range(first, first + len(own["params"])))})
            first += len(own["params"])
        found = {numbers[name]: items for name, items in given.items() if name in local}
        self.optimizer.load_state_dict({"state": found, "param_groups": groups})

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
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return [known.get(id(parameter), f"#{i}") for i, parameter in enumerate(parameters)]

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
