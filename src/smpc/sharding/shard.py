"""Parameters, gradients and optimizer state in parts on the ranks of a mesh, unit by unit (torch's `fully_shard`).

    between steps     parameters are DTensors, of which this rank has 1 / shards; on a mesh of (replica, shard) each replica has them all
    forward           a unit gathers its parameters before it runs
    backward          a unit gathers them again if it has let go of them, and averages gradients over all ranks of the mesh

How long gathered parameters stay in a step of several microbatches, and what that costs:

    Keep              gathers of a parameter in a step     whole parameters        gradients until the last backward
    NEVER             2 for each microbatch                of about two units      averaged in every microbatch: parts
    MICROBATCH        1 for each microbatch                all, until backward     averaged in every microbatch: parts
    STEP              1                                    all                     whole ones add up; averaged once

Outside of steps every backward averages, and gathered parameters go with it.

Gradients are averaged in their own dtype: the parameters' (or `reduce_dtype`), or fp32 if `smpc.sharding.dtensors` has widened them.
They are divided by the number of ranks of the mesh, or by a unit's `divisor`: experts see the tokens of all expert ranks, so their
gradients are sums over these and must be divided by more than the ranks of their own mesh.

`fully_shard` replaces parameters by other objects; `Sharded.exchanged` maps old ones to new ones, for their holders (optimizers made
earlier). The old ones are left empty.

A model that only one rank has values of (`source`) is divided without them, and filled unit by unit, tensor by tensor:

    rank 0    whole      unit 0 in parts    w0 -> all, let go of    w1 -> all, ...      unit 1 in parts ...
    rank 1    on meta    unit 0 in parts    own part of w0          own part of w1      at most its parts and one tensor

`Incoming` gives tensors of one rank to all, one at a time: the others have room for the largest of them, and for no second one.

    incoming = Incoming.of(model.parameters(), source=0)
    values = incoming.take(weight)                  rank 0's values, on every rank; until the next call

A tensor of its own for each would be two now and then: a communication thread may hold on to the one before.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor

from smpc.config.keep import Keep
from smpc.errors import ConfigUnsupportedError, UsageError
from smpc.sharding.backwards import Backwards
from smpc.sharding.dtensors import has_hooks, local, own_part_of_sharded
from smpc.sharding.forward_writes.writes import KeptWrites
from smpc.sharding.in_step import InStep, ranks_of
from smpc.sharding.output_views import hook_what_is_viewed, without_lost_hooks
from smpc.sharding.unit_containers import keep_containers
from smpc.sharding.used_parameters import Uses
from smpc.sharding.whole_parameters import WholeParameters, stays_whole
from smpc.sharding.wide_gradients import is_wide, keep_wide, widen


class Incoming:
    """`num_bytes`: of the largest tensor. `source`: the rank of the world whose values all get."""

    def __init__(self, num_bytes: int, source: int, device: torch.device | str = "cpu") -> None:
        self._num_bytes, self._source, self._device = num_bytes, source, torch.device(device)
        self._room: Tensor | None = None

    @classmethod
    def of(cls, tensors: Iterable[Tensor], source: int, device: torch.device | str = "cpu") -> Incoming:
        """For these tensors, or others that are no larger."""
        return cls(max((tensor.nbytes for tensor in tensors), default=0), source, device)

    def take(self, own: Tensor) -> Tensor:
        """The source's values, until the next call. Collective.

        `own`: what this rank has, to be written to; on meta, only its shape counts.
        """
        values = self._empty(own) if own.is_meta else own.detach().contiguous()
        if distributed.is_initialized():
            distributed.broadcast(values, self._source)
        return values

    def _empty(self, own: Tensor) -> Tensor:
        assert own.nbytes <= self._num_bytes, "the largest was told"
        if self._room is None:
            self._room = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
        return self._room[: own.nbytes].view(own.dtype).view(own.shape)


@dataclass(frozen=True, slots=True)
class ShardingOptions:
    """How to shard.

    `param_dtype`: what units compute in, where parameters have another one; `reduce_dtype`: what gradients are averaged in;
    `output_dtype`: what the model's outputs are cast to. `cast_inputs`: whether inputs of units are cast to `param_dtype`. `offload`:
    parts wait in CPU memory. `stays_outside`: forwards outside of steps leave parameters whole, until `Sharded.release`.
    """

    keep: Keep = Keep.NEVER
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_inputs: bool = False
    offload: bool = False
    stays_outside: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit that differs from the others: its mesh, what its gradients are divided by, how long it stays whole, its precision."""

    name: str
    mesh: DeviceMesh | None = None
    divisor: float | None = None
    keep: Keep | None = None
    policy: MixedPrecisionPolicy | None = None


@dataclass(slots=True)
class _ShardPart:
    name: str
    module: FSDPModule
    keep: Keep
    is_wide: bool
    is_alike: bool  # all ranks of the model's mesh gather it together
    divisor: float | None = None  # of its gradients, if it has one of its own


@dataclass(slots=True)
class Sharded:
    """A sharded model. `exchanged`: the parameters that have replaced others; `left`: those that the caller has left to each rank."""

    root: nn.Module
    options: ShardingOptions
    exchanged: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    left: frozenset[nn.Parameter] = frozenset()
    _parts: list[_ShardPart] = field(default_factory=list)
    _ignored: frozenset[nn.Parameter] = frozenset()
    _uses: Uses | None = None
    _writes: KeptWrites | None = None

    def keep_steps_alike(self, group: ProcessGroup) -> None:
        """Have ranks' batches use different parameters of units in a step, and keep what forwards write into whole ones."""
        alike = [part.module for part in self._parts if part.is_alike]
        self._uses = Uses(alike, group)
        self._writes = KeptWrites(alike, group)
        self._uses.tells = self._writes.are_there

    def divide_by(self, num_ranks: int | None) -> None:
        """What gradients are divided by in the steps that follow, but for units with a divisor of their own; None: by how many ranks
        there are."""
        for part in (part for part in self._parts if part.divisor is None):
            part.module.set_force_sum_reduction_for_comms(num_ranks is not None)  # gloo has no other sum of factors
            part.module.set_gradient_divide_factor(cast(Any, num_ranks))  # torch's own default is None

    def look(self, at: Callable[[Tensor, Tensor], None] | None) -> None:
        """`at` is called with parameters that all ranks share, and their whole gradients, before these are reduced."""
        if self._uses is not None:
            self._uses.looks = at

    def begin_step(self) -> None:
        """A training step begins. Until `end_step` units keep their parameters as long as they should."""
        for part in self._parts:
            adds_up = part.keep is Keep.STEP
            part.module.set_reshard_after_forward(part.keep is Keep.NEVER, recurse=False)
            part.module.set_reshard_after_backward(not adds_up, recurse=False)
            part.module.set_requires_gradient_sync(not adds_up, recurse=False)
        if any(part.keep is Keep.STEP for part in self._parts):
            self._set_last(False)
        if self._uses is not None:
            self._uses.begin()

    def gather(self) -> None:
        """In a step: gather the parameters of the units that stay whole for it, whichever of them this rank's batches use."""
        self.make_ready()
        for part in self._parts:
            if part.keep is Keep.STEP:
                part.module.unshard()

    def make_ready(self) -> None:
        """Units may be gathered, though the model has not been called."""
        self._parts[-1].module._get_fsdp_state()._lazy_init()

    def note(self, parameter: Tensor) -> None:
        """In a step: a parameter gets its gradient elsewhere than in its unit's backward."""
        if self._uses is not None:
            self._uses.note(parameter)

    def last_backward(self) -> None:
        """The backward that follows is the step's last: it averages the accumulated gradients, and frees whole parameters."""
        for part in self._parts:
            part.module.set_reshard_after_backward(True, recurse=False)
            part.module.set_requires_gradient_sync(True, recurse=False)
        self._set_last(True)

    def end_step(self) -> None:
        """The step is over: average the remaining gradients, free whole parameters, and continue as without steps."""
        waits = any(_has_whole_gradients(part, self._ignored) for part in self._parts)
        if self._uses is not None:
            waits = self._uses.end() or waits
        if waits:
            self.last_backward()
            self._reduce()
        for part in self._parts:
            part.module.set_reshard_after_forward(not self.options.stays_outside, recurse=False)
        self.last_backward()
        self.release()
        if self._writes is not None and self._uses is not None and self._uses.take_told():
            self._writes.settle()

    def settle(self) -> None:
        """Let units keep their parameters as long as they should outside of steps, too, where every backward averages."""
        for part in self._parts:
            part.module.set_reshard_after_forward(part.keep is Keep.NEVER, recurse=False)

    def release(self) -> None:
        """Let go of whole parameters."""
        for part in self._parts:
            part.module.reshard()

    def _set_last(self, is_last: bool) -> None:
        for part in self._parts:
            part.module.set_is_last_backward(is_last)

    def _reduce(self) -> None:
        """Average the existing gradients, as torch does at the end of a backward for units that it has not reached."""
        root = self._parts[-1].module
        root._get_fsdp_state()._root_post_backward_final_callback()


def shard(
    root: nn.Module,
    units: Iterable[str | Unit],
    mesh: DeviceMesh,
    options: ShardingOptions = ShardingOptions(),
    ignored: frozenset[nn.Parameter] = frozenset(),
    source: Incoming | None = None,
    group: ProcessGroup | None = None,
    *,
    in_step: bool = True,
) -> Sharded:
    """Divide the parameters of a model over a mesh of (shard) or (replica, shard), in place. Collective.

    A parameter belongs to the first unit, in their order, that reaches it: others may reach it by another way.

    All ranks must have equal parameters, unless `source` names the rank whose parameters all get; the others' may then be on meta.
    `units`: names as from `find_units`, inner before outer; "" is the model, and comes last whether it is named or not. `ignored`
    parameters stay whole, and their gradients are not averaged. `group`: the ranks of `mesh`, if in a step their batches may use different
    parameters of a unit; what forwards write into whole parameters is kept then, too. `in_step`: without a `group`, have ranks go through
    the model together (`smpc.sharding.in_step`); False if the caller does so, for several models.

    Parameters that have nothing to divide (`smpc.sharding.whole_parameters`) stay whole. Without a `group` their gradients are averaged at
    the end of each backward; else by the caller.

    Raises ConfigUnsupportedError for units whose trained parameters have several dtypes, and for parameters that are not contiguous, or
    have hooks or sparse gradients.
    """
    left, ignored = ignored, ignored | {parameter for parameter in root.parameters() if stays_whole(parameter)}
    known = {unit.name: unit for unit in (u if isinstance(u, Unit) else Unit(u) for u in units)}
    ordered = [*(unit for unit in known.values() if unit.name), known.get("", Unit(""))]
    _check_parameters(root, [unit.name for unit in ordered], ignored)
    before = dict(root.named_parameters(remove_duplicate=False))
    found = Sharded(root, options, left=left, _ignored=ignored)
    taken = set[nn.Parameter]()  # what belongs to earlier units
    for unit in ordered:
        module = root.get_submodule(unit.name)
        own = _untaken_by_shards(module, taken)
        wide = any(is_wide(parameter) for parameter in own)
        if not options.stays_outside:
            module.register_forward_hook(without_lost_hooks)
        policy = unit.policy or _precision_policy(options, wide, is_root=not unit.name)
        made = _made_unit(module, unit, mesh, options, policy, {*ignored, *taken})
        if source is not None:
            _fill_unit(module, own, taken, "cpu" if options.offload else mesh.device_type, source, ignored)
        new = _untaken_by_shards(module, taken)
        if wide:
            widen(new)
            keep_wide(made)
        taken.update(new)
        is_alike = unit.mesh is None or ranks_of(unit.mesh) == ranks_of(mesh)
        found._parts.append(_ShardPart(unit.name, made, unit.keep or options.keep, wide, is_alike, unit.divisor))
    if group is not None:
        found.keep_steps_alike(group)
    elif in_step:
        keep_in_step({"": found}, mesh)
    for name, after in root.named_parameters(remove_duplicate=False):
        found.exchanged[before[name]] = after
    _empty(parameter for parameter in before.values() if parameter not in ignored)
    return found


def _groups_of(mesh: DeviceMesh) -> list[ProcessGroup]:
    return [mesh.get_group(dimension) for dimension in range(mesh.ndim)]


def _made_unit(
    module: nn.Module,
    unit: Unit,
    mesh: DeviceMesh,
    options: ShardingOptions,
    policy: MixedPrecisionPolicy,
    left: set[nn.Parameter],
) -> FSDPModule:
    """A module's parameters in parts. `left`: those that stay as they are."""
    made = fully_shard(
        module,
        mesh=unit.mesh if unit.mesh is not None else mesh,
        reshard_after_forward=not options.stays_outside,
        mp_policy=policy,
        offload_policy=_offload_shards(mesh.device_type) if options.offload else OffloadPolicy(),
        ignored_params=left or None,
    )
    hook_what_is_viewed(made)
    keep_containers(module)
    module.register_forward_pre_hook(_refuse_replaced, prepend=True)
    if unit.divisor is not None:
        made.set_gradient_divide_factor(unit.divisor)
    return made


def _refuse_replaced(module: nn.Module, _: Any) -> None:
    """UsageError before a unit runs with other tensors in the place of its parameters: torch gathers its own, and they would be ignored."""
    group: Any = cast(FSDPModule, module)._get_fsdp_state()._fsdp_param_group
    for each in group.fsdp_params if group is not None and group.is_sharded else ():
        info = each._module_info
        held = info.module._parameters.get(info.param_name)
        if held is not each.sharded_param and held is not getattr(each, "_unsharded_param", None):
            raise UsageError(
                f"expected parameter {info.param_name!r} of a {type(info.module).__name__} in its place when its block runs, found another "
                "tensor (torch.func.functional_call, or an assignment): a block whose parameters are in parts gathers its own, and would "
                "ignore it; compute with that tensor by a function of torch.nn.functional"
            )


def keep_in_step(models: Mapping[str, Sharded], mesh: DeviceMesh) -> InStep | None:
    """Have ranks go through sharded models together (`smpc.sharding.in_step`); `models` by name, "" if there is one. None for one rank.
    Collective."""
    if not models:
        return None
    if mesh.size() == 1:
        KeptWrites((part.module for each in models.values() for part in each._parts if part.is_alike), None)
        return None
    parts = [(f"{model}.{part.name}".strip("."), part) for model, each in models.items() for part in each._parts]
    units = {name: part.module for name, part in parts if part.is_alike}
    roots = {name: each._parts[-1].module for name, each in models.items()}
    left = {parameter for each in models.values() for parameter in each.left}
    wholes = WholeParameters((each.root for each in models.values()), _groups_of(mesh), left)
    made = InStep(roots, units, mesh, is_alone=len(units) == len(parts), wholes=wholes)
    for each in models.values():
        each._uses = made.uses
    return made


def _empty(parameters: Iterable[nn.Parameter]) -> None:
    """Let go of the memory of what was divided, whoever still has it."""
    for old in parameters:
        if not isinstance(old, DTensor):  # a slice: torch lets nobody empty it
            old.grad = None
            old.data = torch.empty(0, dtype=old.dtype, device=old.device)


def _offload_shards(device_type: str) -> CPUOffloadPolicy:
    """Memory that is pinned is for a device to copy from: there is none on a CPU alone."""
    return CPUOffloadPolicy(pin_memory=device_type != "cpu")


@torch.no_grad()
def _fill_unit(
    module: nn.Module,
    old: Sequence[nn.Parameter],
    taken: Collection[nn.Parameter],
    device_type: str,
    source: Incoming,
    ignored: frozenset[nn.Parameter],
) -> None:
    """Give a sharded unit the values of one rank's `old` parameters, and free those. Collective.

    `taken`: parameters of other units, which are filled already. `device_type`: of the shards.
    """
    if any(parameter.is_meta for parameter in old):
        for inner in reversed(own_modules(module)):  # the unit itself last: it takes note of what its modules have then
            if any(p is not None and p.is_meta for p in (*inner._parameters.values(), *inner._buffers.values())):
                inner._apply(_shards_emptied(device_type), recurse=False)  # type: ignore[no-untyped-call]
    for before, after in zip(old, _untaken_by_shards(module, taken), strict=True):  # emptying has made others of them
        values = source.take(before)
        local(after.detach()).copy_(own_part_of_sharded(after, values))
        if before not in ignored:
            before.data = torch.empty(0, dtype=before.dtype, device=before.device)


def _shards_emptied(device_type: str) -> Callable[[Tensor], Tensor]:
    """Parameters on meta get memory; others have values, such as parameters that belong to another unit as well."""
    return lambda tensor: torch.empty_like(tensor, device=device_type) if tensor.is_meta else tensor


def _precision_policy(options: ShardingOptions, wide: bool, *, is_root: bool) -> MixedPrecisionPolicy:
    """torch's policy of mixed precision for a unit."""
    return MixedPrecisionPolicy(
        param_dtype=options.param_dtype,
        reduce_dtype=torch.float32 if wide else options.reduce_dtype,
        output_dtype=options.output_dtype if is_root else None,
        cast_forward_inputs=options.cast_inputs,
    )


def _untaken_by_shards(module: nn.Module, taken: Collection[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters of a unit: its own, but for those that belong to others."""
    return [parameter for parameter in own_parameters(module) if parameter not in taken]


def own_parameters(module: nn.Module, others: Collection[nn.Module] = ()) -> list[nn.Parameter]:
    """The parameters of a module that belong neither to units inside it nor to `others`."""
    held = (p for at in own_modules(module, others) for p in at._parameters.values() if p is not None)
    return list({id(parameter): parameter for parameter in held}.values())


def own_modules(module: nn.Module, others: Collection[nn.Module] = ()) -> list[nn.Module]:
    """A module and those inside of it, but for units inside of it, and `others`."""
    found, waiting, seen = [], [module], {id(module)}
    while waiting:
        at = waiting.pop()
        found.append(at)
        for child in at.children():
            if id(child) not in seen and not isinstance(child, FSDPModule) and all(child is not m for m in others):
                seen.add(id(child))
                waiting.append(child)
    return found


def _has_whole_gradients(part: _ShardPart, ignored: frozenset[nn.Parameter]) -> bool:
    """torch keeps fp32 sums of gradients elsewhere: then whole parameters may have gradients."""
    every = own_parameters(cast(nn.Module, part.module))
    own = [parameter for parameter in every if not isinstance(parameter, DTensor) and parameter not in ignored]
    return any(part.is_wide or parameter.grad is not None for parameter in own)


def _check_parameters(root: nn.Module, names: Sequence[str], ignored: Collection[nn.Parameter]) -> None:
    modules = [root.get_submodule(name) for name in names]
    wrong: list[str] = []
    seen: set[nn.Parameter] = set()
    for name, module in zip(names, modules, strict=True):
        own = [p for p in own_parameters(module, [other for other in modules if other is not module]) if p not in seen]
        seen.update(own)
        dtypes = sorted({str(p.dtype) for p in own if p.requires_grad and p not in ignored})
        if len(dtypes) > 1:
            wrong.append(
                f"the parameters of {name or 'the model'} that train have the dtypes {', '.join(dtypes)}, expected one"
            )
    wrong = [f"{line}; give them one dtype" for line in wrong]
    wrong += [
        f"{name} of the model is not contiguous: its strides are {parameter.stride()}; give it parameter.contiguous()"
        for name, parameter in root.named_parameters()
        if not parameter.is_contiguous() and parameter not in ignored
    ]
    if wrong:
        raise ConfigUnsupportedError("\n".join(f"fully_shard: {line}" for line in wrong))
    check_gradients_of_parts(root, ignored)


def check_gradients_of_parts(root: nn.Module, ignored: Collection[nn.Parameter] = ()) -> None:
    """ConfigUnsupportedError for what expects gradients that parts of parameters do not get: hooks, and sparse embeddings."""
    wrong = [
        f"{name} has a hook on its gradient, which its parts would not call; change gradients between backward and step instead"
        for name, parameter in root.named_parameters()
        if parameter not in ignored and has_hooks(parameter)
    ]
    wrong += [
        f"{name} of class {type(module).__name__} has sparse gradients, which cannot be averaged in parts; give it sparse=False"
        for name, module in root.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        and module.sparse
        and module.weight.requires_grad
        and module.weight not in ignored
    ]
    if wrong:
        raise ConfigUnsupportedError("\n".join(f"fully_shard: {line}" for line in wrong))


@contextmanager
def undivided(root: nn.Module) -> Iterator[None]:
    """In this context modules have neither the classes nor the hooks by which units gather their parameters, for a recording of them."""
    units = [module for module in root.modules() if isinstance(module, FSDPModule)]
    kept = [(unit, type(unit), unit._forward_pre_hooks, unit._forward_hooks) for unit in cast(list[nn.Module], units)]
    try:
        for unit, kind, before, after in kept:
            unit.__class__ = kind.__bases__[1]  # torch derives the class from this and the module's own
            unit._forward_pre_hooks, unit._forward_hooks = _of_scripts(before), _of_scripts(after)
        yield
    finally:
        for unit, kind, before, after in kept:
            unit.__class__, unit._forward_pre_hooks, unit._forward_hooks = kind, before, after


def _of_scripts(hooks: Mapping[int, Any]) -> OrderedDict[int, Any]:
    """Without those that make a module a unit."""
    return OrderedDict((key, hook) for key, hook in hooks.items() if not _is_of_units(hook))


def _is_of_units(hook: Any) -> bool:
    bound = getattr(hook.func if isinstance(hook, functools.partial) else hook, "__self__", None)
    return hook in (without_lost_hooks, _refuse_replaced) or isinstance(bound, FSDPState | Backwards | InStep)


def exchange(model: nn.Module, exchanged: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replace old parameters by new ones."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = exchanged.get(parameter, parameter)
