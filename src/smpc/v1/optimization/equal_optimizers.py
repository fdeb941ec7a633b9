"""Whether all ranks have the same optimizer: class, groups in order, options and parameters.

    agreement.tell(optimizer, ...)       before every step: this rank's optimizer, in the job's store
    agreement.check()                    before the first update: raises ConfigError that names ranks and differences

Ranks meet in the step before the first update, so all have reported their optimizer by then; nobody waits for a rank that has not (a
replica without data). A script may change options between that step and the update, to which ranks come at different times: what they have
there is told once more, and each compares it with those that have come before. Two ranks that update one model by different rules would
continue with wrong numbers, and nothing else would detect it.

An optimizer made from all parameters is compared whole. One made after the partition, from the parameters of its own stage, may
list other parameters than another stage's; then parameters listed by both must have the same options.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store
from torch.optim import Optimizer

from smpc.errors import ConfigError

_DIGEST, _WHOLE = (
    "smpc/optimizer/digest",
    "smpc/optimizer/whole",
)  # store keys, with the moment and the rank behind them
_STEP, _UPDATE = "step", "update"
_MANY = 12  # lines


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """`options`: as text, by name. `parameters`: names in the module, or shapes of tensors outside it."""

    options: dict[str, str]
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OptimizerDescription:
    """`stage`: the pipeline rank whose parameters alone may be listed; -1 if all are."""

    name: str
    groups: tuple[ParameterGroup, ...]
    stage: int

    @classmethod
    def of(
        cls, optimizer: Optimizer, names: Mapping[int, str], parameter_of: Callable[[Tensor], Tensor], stage: int
    ) -> OptimizerDescription:
        """`names`: of the module's parameters by id. `parameter_of`: the parameter of a master or a part."""
        groups = tuple(
            ParameterGroup(
                {key: _setting_as_text(value) for key, value in sorted(group.items()) if key != "params"},
                tuple(
                    names.get(id(parameter_of(entry)), f"a tensor {tuple(entry.shape)} that is not in the model")
                    for entry in group["params"]
                ),
            )
            for group in optimizer.param_groups
        )
        return cls(f"{type(optimizer).__module__}.{type(optimizer).__qualname__}", groups, stage)

    def to_json(self) -> str:
        """Its text in the store."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def read(cls, payload: bytes) -> OptimizerDescription:
        """The inverse of `to_json`."""
        fields = json.loads(payload)
        groups = tuple(ParameterGroup(dict(group["options"]), tuple(group["parameters"])) for group in fields["groups"])
        return cls(str(fields["name"]), groups, int(fields["stage"]))


def optimizer_differences(
    first: OptimizerDescription, other: OptimizerDescription, owners: tuple[str, str]
) -> list[str]:
    """The differences between two optimizers, a line each."""
    mine, theirs = owners
    if first.name != other.name:
        return [f"class: {first.name} on {mine}, {other.name} on {theirs}"]
    if first.stage != other.stage:
        return _differences_of_stages(first, other, owners)
    if len(first.groups) != len(other.groups):
        return [f"number of groups: {len(first.groups)} on {mine}, {len(other.groups)} on {theirs}"]
    lines = []
    for index, (a, b) in enumerate(zip(first.groups, other.groups, strict=True)):
        lines += _options_apart(f"group {index}", a.options, b.options, owners)
        if a.parameters != b.parameters:
            place = next(
                (i for i, (x, y) in enumerate(zip(a.parameters, b.parameters, strict=False)) if x != y),
                min(len(a.parameters), len(b.parameters)),
            )
            found = [group.parameters[place] if place < len(group.parameters) else "nothing" for group in (a, b)]
            lines.append(
                f"group {index}, parameter {place}: {found[0]} on {mine}, {found[1]} on {theirs} ({len(a.parameters)} and "
                f"{len(b.parameters)} parameters)"
            )
    return lines


def _differences_of_stages(
    first: OptimizerDescription, other: OptimizerDescription, owners: tuple[str, str]
) -> list[str]:
    options = {name: group.options for group in first.groups for name in group.parameters}
    lines = []
    for group in other.groups:
        for name in group.parameters:
            if name in options:
                lines += _options_apart(name, options[name], group.options, owners)
    return lines


def _options_apart(what: str, first: Mapping[str, str], other: Mapping[str, str], owners: tuple[str, str]) -> list[str]:
    mine, theirs = owners
    return [
        f"{what}, {key}: {first.get(key, 'nothing')} on {mine}, {other.get(key, 'nothing')} on {theirs}"
        for key in sorted({*first, *other})
        if first.get(key) != other.get(key)
    ]


def _setting_as_text(value: Any) -> str:
    """A setting of an optimizer as ranks compare it."""
    if isinstance(value, Tensor):
        return repr(value.tolist()) if value.numel() < _MANY and not value.is_meta else f"a tensor {tuple(value.shape)}"
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_setting_as_text, value))})"
    return f"{type(value).__module__}.{type(value).__qualname__}"  # its address says nothing


class OptimizerAgreement:
    """One rank's part, for one optimizer. `store`: of this session's ranks."""

    def __init__(self, store: Store, rank: int, num_ranks: int, stage: int) -> None:
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._stage = stage
        self._told: dict[str, str] = {}  # by moment

    def tell(
        self,
        optimizer: Optimizer,
        module: nn.Module,
        parameter_of: Callable[[Tensor], Tensor],
        *,
        is_cut: bool,
        updates: bool = False,
    ) -> None:
        """Report this rank's optimizer. `is_cut`: the module has been partitioned before the optimizer was made; `updates`: it is about to
        update parameters."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        description = OptimizerDescription.of(optimizer, names, parameter_of, self._stage if is_cut else -1)
        text = description.to_json()
        digest = hashlib.sha256(text.encode()).hexdigest()
        moment = _UPDATE if updates else _STEP
        if digest != self._told.get(moment):
            self._store.set(f"{_WHOLE}/{moment}/{self._rank}", text)
            self._store.set(f"{_DIGEST}/{moment}/{self._rank}", digest)
            self._told[moment] = digest

    def check(self) -> None:
        """Compare all reported optimizers with the first rank's. Raises ConfigError if they differ."""
        lines = self._apart(_STEP) or self._apart(_UPDATE)
        if lines:
            more = [f"and {len(lines) - _MANY} more"] if len(lines) > _MANY else []
            raise ConfigError(
                "\n".join(["expected the same optimizer on all ranks, found different ones:", *lines[:_MANY], *more])
            )

    def _apart(self, moment: str) -> list[str]:
        """How the reports of a moment differ."""
        keys = [f"{_DIGEST}/{moment}/{rank}" for rank in range(self._num_ranks)]
        has_all = self._store.check(keys)
        there = [rank for rank, key in enumerate(keys) if has_all or self._store.check([key])]
        digests = {rank: self._store.get(keys[rank]) for rank in there}
        lines = []
        for rank in [rank for rank in there if digests[rank] != digests[there[0]]][:2]:
            pair = there[0], rank
            described = [OptimizerDescription.read(self._store.get(f"{_WHOLE}/{moment}/{each}")) for each in pair]
            lines += optimizer_differences(described[0], described[1], (f"rank {pair[0]}", f"rank {pair[1]}"))
        return lines
