"""Expert parallelism in a training script: the configuration's `expert_parallel_degree`.

    smp.init({"pipeline_parallel_degree": 2, "expert_parallel_degree": 2, "ddp": True})
    model = smp.DistributedModel(AnyMixture())                                # nothing is annotated
    sampler = DistributedSampler(data, num_replicas=smp.data_size(), rank=smp.data_rank())

The ranks of a group are replicas, each with a batch of its own. Of every mixture each rank holds only some experts, which serve the tokens
of all ranks (`smpc.experts`). So gradients of experts are averaged over the ranks that hold the same experts
(`smpc.executor.replicas.divided_modules`), all other gradients over all replicas. State dicts, checkpoints and norms see experts as slices
along their first dimension.

If experts are modules of their own, each rank has all rows of some, and no rows of the others.

Experts are cut when the model is made, before anything is recorded: with the values of replica 0. Delayed parameters are drawn as slices.
Parameters stay the same objects, so optimizers may be made before.

Every step compares which step function the ranks of a group run, and whether it trains: different ones would exchange different tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smpc.errors import ConfigError, ConfigUnsupportedError, StepError
from smpc.executor.collectives import TensorGroup
from smpc.executor.replicas.data_parallel import broadcast
from smpc.executor.replicas.divided_modules import ExpertReplicas, ExpertsApart
from smpc.executor.replicas.group_hooks import StepHooks
from smpc.experts.confirm_cut import Confirmations, Confirmed
from smpc.experts.dispatch import owned
from smpc.experts.find_experts import Found, Listed, Stacked, find_experts, shared_and_trained, uses_of_parameters
from smpc.experts.listed import ListedBlock, rows_of_rank, spread_out, unsuited_as_rows
from smpc.experts.stacked import Options, become_part, look_at
from smpc.mesh import Axis
from smpc.nn.init.note_slices import note_rows
from smpc.nn.parallel import ParameterSlice
from smpc.sharding.dtensors import has_hooks
from smpc.tracer.ir import Trace
from smpc.v1.layout.placement import Placement, Slices
from smpc.v1.session.object_messages import gather_objects
from smpc.v1.session.process_state import Session
from smpc.v1.session.step_errors import describe, raise_first_step_error
from smpc.v1.session.wait_limits import exchange

_KEY = "expert_parallel_degree"


class DividedExperts:
    """One rank's part of a model's experts. Construction cuts them, in place; collective over the replicas.

    ConfigError for a model without experts that can be cut, or replicas with different models; ConfigUnsupportedError for experts
    that these ranks cannot divide. Warns of experts that stay whole on all ranks while others are cut.
    """

    def __init__(self, module: nn.Module, session: Session, slices: Slices) -> None:
        self._session, self._members = session, session.groups[Axis.EP]
        self._group = TensorGroup.of(self._members)
        self._seed = torch.initial_seed()  # of delayed parameters
        confirmed = _confirmed_in_layout(module, self._group.size, session)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._shapes: dict[str, tuple[ParameterSlice, torch.Size]] = {}
        self._parameters: dict[int, nn.Parameter] = {}
        stacked = [one for one in confirmed if isinstance(one, Confirmed)]
        listed = [one for one in confirmed if isinstance(one, Listed)]
        self._modules = (*(one.experts.module for one in stacked), *(one.container for one in listed))
        tensors = [
            *(own for one in stacked for own in _rows(one, self._group)),
            *(own for one in listed for own in rows_of_rank(one, self._group)),
        ]
        self._agree([(names[id(tensor)], tuple(tensor.shape), tensor.is_meta) for tensor, _ in tensors])
        for tensor, rows in tensors:
            name = names[id(tensor)]
            self._cut(name, tensor, rows)
            slices.add(name, self._shapes[name][0])
        options = Options(gradient_scale=1 / self._group.size)
        for one in stacked:
            become_part(one, self._group, options)
        mine = {names[id(tensor)]: rows for tensor, rows in tensors}
        rows_of = {name: (self._shapes[name][0].size, rows) for name, rows in mine.items()}
        of_one = [names[id(tensor)] for one in listed for tensor, _ in rows_of_rank(one, self._group)]
        whole = [name for name in names.values() if name not in rows_of]
        note_rows(module, rows_of, self._group, of_one=of_one, whole=whole)
        look_at(module, options)
        in_parts = session.is_sharded
        self._called = _Called(
            tuple(spread_out(one, self._group, options, keeps=True, in_parts=in_parts) for one in listed)
        )

    def __contains__(self, parameter: object) -> bool:
        """Whether the ranks of the group have different values of a parameter."""
        return id(parameter) in self._parameters

    @property
    def names(self) -> frozenset[str]:
        """The parameters of which this rank holds only some experts, by the model's names."""
        return frozenset(self._shapes)

    def place(self, placement: Placement) -> None:
        """Registers the sizes of this rank's parameters, and the delayed ones."""
        placement.seed = self._seed
        for name, (shard, shape) in self._shapes.items():
            placement.slice(name, shard, shape, is_cut=True)

    def held(self, stages: Mapping[int, nn.Module]) -> list[nn.Parameter]:
        """The experts of this rank's stages, in an order that is the same on all ranks that have these stages."""
        every = (p for index in sorted(stages) for p in stages[index].parameters() if p in self)
        return list({id(parameter): parameter for parameter in every}.values())

    def hooks(self, stages: Mapping[int, nn.Module], inner: StepHooks | None, passes: int) -> StepHooks:
        """The hooks that average gradients of experts, around `inner`. Collective over the ranks that hold the same experts."""
        group = TensorGroup.of(self._session.groups[Axis.EXPERT_DATA])
        dividing, called = (self._group, self._called) if self._called.blocks else (None, None)
        with exchange("making the replicas of experts equal"):
            return ExpertReplicas(self.held(stages), group, inner, passes, dividing, called)

    def hooks_of_parts(self, stages: Mapping[int, nn.Module], inner: StepHooks | None, passes: int) -> StepHooks | None:
        """What says which experts have gradients, where they are in parts and `inner` averages."""
        if not self._called.blocks:
            return inner
        group = TensorGroup.of(self._session.groups[Axis.EXPERT_DATA])
        return ExpertReplicas(self.held(stages), group, inner, passes, self._group, self._called, in_parts=True)

    def apart(self, stages: Mapping[int, nn.Module], mesh: DeviceMesh) -> ExpertsApart:
        """The experts of this rank's stages, sharded over the ranks of a mesh that hold the same experts."""
        return ExpertsApart(self._modules, tuple(self.held(stages)), mesh, self._session.groups[Axis.EXPERT_DATA])

    def alike(self, trace: Trace) -> Trace:
        """A recorded trace as all ranks of the group have it: without the rows of experts that are wholly on one of them."""
        if not self._called.blocks:
            return trace
        state, storages = list(trace.state), list(trace.storages)
        for place, each in enumerate(trace.state):
            if not self.names.isdisjoint(each.names):
                storages[each.storage] = 0
                state[place] = replace(each, spec=replace(each.spec, shape=(0, *each.spec.shape[1:])))
        return replace(trace, state=tuple(state), storages=tuple(storages))

    def exchange(self, exchanged: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Some parameters were replaced by others, as with `fully_shard`."""
        self._parameters = {id(new): new for new in (exchanged.get(p, p) for p in self._parameters.values())}

    def agree(self, step_name: str, trains: bool | None, failure: Exception | None) -> Exception | None:
        """Before a step, on pipeline rank 0: the reason why this step cannot run, the same on all ranks of the group. Collective over the
        group.

        `trains`: whether the step may do a backward; `failure`: the error that this rank has found.
        """
        found = self._gather((describe(failure), (step_name, trains)))
        try:
            raise_first_step_error([error for error, _ in found], failure)
        except Exception as error:
            return error
        if len({asked for _, asked in found}) == 1:
            return None
        ranks = list(self._session.mesh.group(Axis.EP, self._session.rank))
        described = [f"{name}, {'with' if trains else 'without'} gradients" for _, (name, trains) in found]
        return StepError(
            f"step function {step_name}: expected the ranks of an expert-parallel group, which send each other tokens, to call the same "
            f"step function, all to train or all to evaluate; found on ranks {ranks}: {'; '.join(described)}"
        )

    def _agree(self, mine: list[tuple[str, tuple[int, ...], bool]]) -> None:
        """Raise ConfigError on all replicas if their experts differ; delayed parameters use replica 0's seed."""
        session = self._session
        with exchange("comparing the experts of the replicas"):
            found = gather_objects((mine, self._seed), session.groups[Axis.RDP], session.message_device, session.device)
        if any(experts != found[0][0] for experts, _ in found):
            counts = [len(experts) for experts, _ in found]
            raise ConfigError(
                f"{_KEY}: expected the same experts on all replicas, found {counts} parameters of experts on ranks "
                f"{list(session.mesh.group(Axis.RDP, session.rank))}, or others, or delayed ones; build the same model on every rank"
            )
        self._seed = found[0][1]

    @torch.no_grad()
    def _cut(self, name: str, parameter: nn.Parameter, mine: range) -> None:
        """Replaces all rows by this rank's rows of replica 0's values; delayed parameters only get the new size."""
        session = self._session
        own = torch.Size((len(mine), *parameter.shape[1:]))
        self._shapes[name] = ParameterSlice(0, parameter.shape[0], mine.start), own
        self._parameters[id(parameter)] = parameter
        if parameter.is_meta:
            return
        whole = parameter.data.to(session.device).contiguous()
        with exchange("giving the replicas their experts"):
            broadcast([whole], session.groups[Axis.RDP])
        parameter.grad = None
        parameter.data = whole[mine.start : mine.stop].clone().to(parameter.device)

    def _gather(self, mine: Any) -> list[Any]:
        return gather_objects(mine, self._members, self._session.message_device, self._session.device)


@dataclass(frozen=True, slots=True)
class _Called:
    """See `smpc.executor.replicas.divided_modules.CalledExperts`: for blocks whose experts are modules of their own."""

    blocks: tuple[ListedBlock, ...]

    def parameters(self) -> set[int]:
        """The parameters of the experts that this rank's tokens have called, by identity."""
        return {id(parameter) for block in self.blocks for parameter in block.wanted_parameters()}

    def forget(self) -> None:
        """Begin anew."""
        for block in self.blocks:
            block.wanted.clear()


def divide_experts(
    module: nn.Module, session: Session, slices: Slices, *, needs_some: bool = True
) -> DividedExperts | None:
    """None if every rank has all experts. `needs_some`: a model without experts is an error."""
    if session.mesh.ep_size == 1 or not (needs_some or find_experts(module)):
        return None
    return DividedExperts(module, session, slices)


def _rows(found: Confirmed, group: TensorGroup) -> Iterator[tuple[nn.Parameter, range]]:
    """The parameters of experts in one module, and this rank's rows of them: its experts."""
    mine = owned(found.experts.num_experts, group)
    return ((found.experts.module.get_parameter(name), mine) for name in found.experts.parameters)


def _confirmed_in_layout(module: nn.Module, degree: int, session: Session) -> list[Confirmed | Listed]:
    """The experts to cut. Raises an error if there are none, and for experts that cannot be divided."""
    every = find_experts(module)
    uses = uses_of_parameters(module, every)
    cuttable: list[Confirmed | Listed] = []
    refused, whole, confirmations = [], [], Confirmations()
    for one in every:
        reason = _unsuited_in_layout(one, degree, uses, session.is_sharded)
        outcome = reason or confirmations.of(one)
        if not isinstance(outcome, str):
            cuttable.append(outcome)
        elif reason is not None and isinstance(one, Stacked):
            refused.append(f"{one.name}: {reason}")
        else:
            whole.append(f"{one.name}: {outcome}")
    if any(
        isinstance(one, Confirmed) for one in cuttable
    ):  # which are known to be experts; lists of modules only look so
        whole += [f"{one.name}: there are experts in one module" for one in cuttable if isinstance(one, Listed)]
        cuttable = [one for one in cuttable if isinstance(one, Confirmed)]
    if refused:
        raise ConfigUnsupportedError(f"{_KEY}: {'; '.join(refused)}")
    if not cuttable:
        raise ConfigError(
            f"{_KEY}: expected a model with experts that {degree} ranks can divide among them, found none: "
            f"{'; '.join(whole) or 'no module looks like experts'}; leave it out (docs/expert_parallelism.md)"
        )
    if whole and session.rank == 0:
        warnings.warn(f"{_KEY}: every rank has all of these experts: {'; '.join(whole)}", stacklevel=5)
    return cuttable


def _unsuited_in_layout(found: Found, degree: int, uses: Mapping[int, int], in_parts: bool) -> str | None:
    """Why experts cannot be cut, independent of what they compute. `in_parts`: a rank's experts will be sharded."""
    if found.num_experts % degree:
        return f"expected a number of experts that {degree} divides, found {found.num_experts}"
    own: list[nn.Parameter]
    if isinstance(found, Stacked):
        if (reason := shared_and_trained(found)) is not None:
            return reason
        own, modules = [found.module.get_parameter(name) for name in found.parameters], [found.module]
    else:
        own, modules = [each for member in found.members for each in member.parameters()], [found.block, *found.members]
        if (reason := unsuited_as_rows(found, in_parts=in_parts)) is not None:
            return reason
        inside = [module for member in found.members for module in member.modules()]
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in inside):
            return "there is a BatchNorm in its experts, which depends on all rows that an expert gets"
    if any(uses[id(parameter)] > 1 for parameter in own):
        return "other modules share its parameters"
    if any(has_hooks(parameter) for parameter in own):
        return "there are hooks on its gradients, which would see this rank's experts alone"
    if any("forward" in vars(module) for module in modules):
        return "somebody has replaced the forward of the instance"
    return None
