"""Sharded data parallelism: every stage's parameters, gradients and optimizer state lie in parts on the replicas (FSDP2, `fully_shard`).

    between steps     parameters are DTensors, of which this rank has 1 / replicas
    in a step         the first forward of a stage gathers its parameters, once for all microbatches; backwards add up whole gradients;
                      the last one averages them over the replicas, leaves each its part, and lets go of the whole parameters
    evaluation        the same without gradients; the parameters are let go of at the end

Gradients are averaged in their own dtype: that of the parameters, or fp32 if `smpc.executor.wide_gradients` has widened them.

`fully_shard` puts other objects in the place of parameters; `StageShards.exchanged` says which, for whoever holds one (the model,
optimizers that were made before). The old ones are left empty.

Programs of other inputs have stage modules of their own over the same parameters. All of them run inside one module for each stage, whose
hooks FSDP uses, and first take over the parameters that are there now.

Example: `shards = StageShards(stages, group)`, then `Interpreter(program, shards.modules(stages), transport, hooks=shards)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from smpc.errors import ConfigUnsupportedError
from smpc.executor.data_parallel import broadcast
from smpc.executor.wide_gradients import is_wide, keep_wide, widen


class _Root(nn.Module):
    """What is sharded: the first stage module; runs any that has the same parameters."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, run: Callable[..., Any], *inputs: Tensor) -> Any:
        """Called by FSDP's hooks, with the whole parameters in place."""
        return run(*inputs)


class _Member(nn.Module):
    """A stage module of some program, run inside its root."""

    def __init__(self, stage: nn.Module, root: nn.Module) -> None:
        super().__init__()
        self.stage = stage
        # Not a submodule: its parameters are the stage's own.
        object.__setattr__(self, "_root", root)
        self._moves = _moves(stage, root.get_submodule("stage"))

    def forward(self, *inputs: Tensor) -> Any:
        """Run the stage."""
        root: Any = self._root
        return root(self._run, *inputs)

    def _run(self, *inputs: Tensor) -> Any:
        for own, name, source, source_name in self._moves:
            own[name] = source[source_name]
        return self.stage(*inputs)


class StageShards:
    """Shards the parameters of stages over `group`; the hooks of an interpreter, in place of `StageReplicas`.

    Construction gives all ranks the parameters and buffers of the group's rank 0. `broadcast_buffers`: its buffers replace the others' at
    the start of every training step. A stage's parameters that train must have one dtype, and no two stages of a rank may share one.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        group: dist.ProcessGroup,
        *,
        device_type: str = "cpu",
        broadcast_buffers: bool = True,
    ) -> None:
        _check(stages)
        self._group, self._device = group, device_type
        self._stages = [stages[index] for index in sorted(stages)]
        self._buffers_of = self._stages if broadcast_buffers else []
        # torch keeps layouts by meshes that are equal, even of groups that were destroyed: a name of its own for each group.
        mesh = DeviceMesh.from_group(group, device_type, mesh_dim_names=(f"replicas_{group.group_name}",))
        self.exchanged: dict[nn.Parameter, nn.Parameter] = {}
        self._roots: dict[int, nn.Module] = {}
        self._sharded: dict[int, FSDPModule] = {}
        self._wide: list[FSDPModule] = []
        for index in sorted(stages):
            stage = stages[index]
            broadcast([*stage.parameters(), *stage.buffers()], group)
            root = self._roots[index] = _Root(stage)
            if any(True for _ in stage.parameters()):
                self._sharded[index] = self._shard(root, mesh)

    def _shard(self, root: nn.Module, mesh: DeviceMesh) -> FSDPModule:
        before = dict(root.named_parameters(remove_duplicate=False))
        wide = any(is_wide(parameter) for parameter in before.values())
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if wide else None, cast_forward_inputs=False)
        sharded = fully_shard(root, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
        for name, new in root.named_parameters(remove_duplicate=False):
            self.exchanged[before[name]] = new
        if wide:
            widen(root.parameters())
            self._wide.append(sharded)
        for old in before.values():
            old.grad = None
            old.data = torch.empty(0, dtype=old.dtype, device=old.device)
        return sharded

    def modules(self, stages: Mapping[int, nn.Module]) -> dict[int, nn.Module]:
        """What an interpreter runs in place of the stage modules of a program."""
        return {index: _Member(stage, self._roots[index]) for index, stage in stages.items()}

    def release(self) -> None:
        """Let go of whole parameters. A training step has done so in its last backwards, if there were any."""
        for sharded in self._sharded.values():
            sharded.reshard()

    def start_of_step(self) -> None:
        """Broadcast buffers; gradients add up until the last backward."""
        for stage in self._buffers_of:
            broadcast(stage.buffers(), self._group)
        for sharded in self._sharded.values():
            _set_last(sharded, False)

    def before_last_backward(self, stage: int, roots: Sequence[Tensor]) -> None:
        """Average gradients in the backward that follows, and let go of the whole parameters."""
        if stage in self._sharded:
            self._reduce_next(self._sharded[stage])

    def end_of_step(self) -> None:
        """Average what the last backward of a stage has not: there was none, or it did not reach the stage."""
        for index in sorted(self._sharded, reverse=True):
            root = self._roots[index]
            if self._has_whole_gradients(index):
                self._reduce_next(self._sharded[index])
                with torch.enable_grad():
                    token = torch.zeros((), device=self._device, requires_grad=True)
                    root(lambda value: value.view_as(value), token).backward()

    def _has_whole_gradients(self, index: int) -> bool:
        """Of those that are to be reduced in fp32 FSDP keeps the sum elsewhere: then parameters that are whole may have some."""
        wide = self._sharded[index] in self._wide
        parameters = [p for p in self._roots[index].parameters() if not isinstance(p, DTensor)]
        return any(wide or parameter.grad is not None for parameter in parameters)

    def _reduce_next(self, sharded: FSDPModule) -> None:
        _set_last(sharded, True)
        if sharded in self._wide:
            keep_wide(sharded)

    def did_not_train(self) -> None:
        """Nothing was counted."""


def _set_last(sharded: FSDPModule, is_last: bool) -> None:
    sharded.set_is_last_backward(is_last)
    sharded.set_requires_gradient_sync(is_last)
    sharded.set_reshard_after_backward(is_last)


def exchange(model: nn.Module, exchanged: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Put new parameters in the places of old ones."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = exchanged.get(parameter, parameter)


def _moves(stage: nn.Module, first: nn.Module) -> list[tuple[dict[str, Any], str, dict[str, Any], str]]:
    """Where the stage has parameters of its own dictionaries, and where those are that FSDP exchanges."""
    names: dict[int, tuple[dict[str, Any], str]] = {}
    exchanged: set[int] = set()
    for module in first.modules():
        exchanged.add(id(module._parameters))
        for name, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), (module._parameters, name))
    return [
        (module._parameters, name, *names[id(parameter)])
        for module in stage.modules()
        if id(module._parameters) not in exchanged
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def _check(stages: Mapping[int, nn.Module]) -> None:
    owner: dict[int, int] = {}
    wrong = []
    for index in sorted(stages):
        dtypes = sorted({str(parameter.dtype) for parameter in stages[index].parameters() if parameter.requires_grad})
        if len(dtypes) > 1:
            wrong.append(
                f"the parameters of stage {index} that train have the dtypes {', '.join(dtypes)}, expected one"
            )
        for name, parameter in stages[index].named_parameters():
            first = owner.setdefault(id(parameter), index)
            if first != index:
                wrong.append(
                    f"parameter {name!r} is used by stages {first} and {index} of one rank, expected one of them"
                )
    if wrong:
        raise ConfigUnsupportedError("\n".join(f"fully_shard: {line}; leave fully_shard out" for line in wrong))
