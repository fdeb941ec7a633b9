"""Tensor parallelism in a training script: declaring it, registering classes for it, and which parts of a model are distributed.

    with smp.tensor_parallelism():                    # what is created inside and has a distributed version is replaced by it
        model = MyModel()                             # when smp.DistributedModel wraps the model
    smp.set_tensor_parallelism(model.head, False)     # ... but for the head

    smp.tp_register_with_module(MyLayer, smp.nn.DistributedTransformerLayer, init_hook=..., forward_hook=..., return_hook=...)

`smpc.nn.distribution.distribute` and `smpc.nn.distribution.registry` have the rules. With `tensor_parallel_degree: 1` modules are also
replaced, by distributed ones over one rank: names of parameters do not depend on the degree.

Source: "Tensor Parallelism API for PyTorch" in the public reference of SMP v1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from smpc.errors import StepError
from smpc.executor.replicas.group_hooks import StepHooks, TensorReplicas
from smpc.mesh import Axis
from smpc.nn.distribution.distribute import distribute
from smpc.nn.distribution.registry import Registry
from smpc.nn.init.note_slices import note_distributed
from smpc.nn.parallel import DistributedModule, distributed_modules
from smpc.nn.registration import StateHook, Translation
from smpc.v1.layout.found_tensor_parallelism import CompiledTensors
from smpc.v1.layout.placement import Slices, digest_of
from smpc.v1.session.object_messages import gather_objects
from smpc.v1.session.process_state import Session, state

Module = TypeVar("Module", bound=nn.Module)


def tp_register(
    dist_module: type[DistributedModule],
    init_hook: Translation | None = None,
    forward_hook: Translation | None = None,
    return_hook: Translation | None = None,
    state_hook: StateHook | None = None,
) -> Callable[[type[Module]], type[Module]]:
    """Registers `dist_module` as the distributed version of the decorated class.

    `init_hook`, `forward_hook`, `return_hook`, `state_hook`: see `smpc.nn.distribution.registry`. Raises UsageError for a class or a
    hook that does not fit.
    """

    def decorate(module_cls: type[Module]) -> type[Module]:
        state.registry.register(module_cls, dist_module, init_hook, forward_hook, return_hook, state_hook)
        return module_cls

    return decorate


def tp_register_with_module(
    module_cls: type[nn.Module],
    dist_module: type[DistributedModule],
    init_hook: Translation | None = None,
    forward_hook: Translation | None = None,
    return_hook: Translation | None = None,
    state_hook: StateHook | None = None,
) -> None:
    """Registers `dist_module` as the distributed version of `module_cls`, an existing class.

    `init_hook`, `forward_hook`, `return_hook`, `state_hook`: see `smpc.nn.distribution.registry`. Raises UsageError for a class or a
    hook that does not fit.
    """
    state.registry.register(module_cls, dist_module, init_hook, forward_hook, return_hook, state_hook)


class Distribution:
    """The distributed parts of a model. Replaces its modules in place by the classes registered in `registry`."""

    def __init__(self, module: nn.Module, session: Session, registry: Registry) -> None:
        self._session = session
        self._parallel = session.parallel
        self.module = distribute(module, registry, self._parallel)
        self.slices = Slices(self.module)
        if any(True for _ in distributed_modules(self.module)):
            note_distributed(self.module, self._parallel.group)
        self._compiled: CompiledTensors | None = None
        self.checks_batch = (  # in the first step
            self._parallel.group.size > 1
            and self._parallel.prescaled_batch
            and session.mesh.pp_rank(session.rank) == 0  # the others' arguments do not count
        )
        sharded: dict[int, None] = {}
        scaled: dict[int, None] = {}
        for _, owner in distributed_modules(self.module):
            for name, parameter in owner.named_parameters(recurse=False):
                if name in owner.shards:
                    sharded[id(parameter)] = None
                if name not in owner.local_batch:
                    scaled[id(parameter)] = None
        self._sharded, self._scaled = frozenset(sharded), frozenset(scaled)

    def take_over(self, compiled: CompiledTensors) -> None:
        """The compiler distributes the model, which has no distributed modules: the whole model acts on the group's samples."""
        self._compiled = compiled

    def modules(self) -> Iterator[DistributedModule]:
        """The distributed modules."""
        return (module for _, module in distributed_modules(self.module))

    def is_sharded(self, tensor: Tensor) -> bool:
        """Whether each rank holds its own slice of the parameter."""
        return id(tensor) in self._sharded if self._compiled is None else self._compiled.is_sliced(tensor)

    def is_scaled(self, tensor: Tensor) -> bool:
        """Whether the parameter acts on the samples of the whole tensor-parallel group."""
        return id(tensor) in self._scaled or self._compiled is not None

    @property
    def shares_parameters(self) -> bool:
        """Whether distributed modules act on the samples of several ranks."""
        return self._parallel.group.size > 1 and bool(self._scaled)

    def divides_gradient_of(self, tensor: Tensor) -> bool:
        """Whether a gradient is divided by the number of ranks, as each rank's counts the samples of all ranks: see `TensorReplicas`."""
        return self.shares_parameters and id(tensor) in self._scaled and not self._parallel.prescaled_batch

    def exchange(self, exchanged: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Some parameters were replaced by others, as with `fully_shard`."""
        moved = {id(old): id(new) for old, new in exchanged.items()}
        self._sharded = frozenset(moved.get(key, key) for key in self._sharded)
        self._scaled = frozenset(moved.get(key, key) for key in self._scaled)
        if self._compiled is not None:
            self._compiled.exchange(exchanged)

    def hooks(self, stages: Mapping[int, nn.Module], inner: StepHooks | None, passes: int) -> StepHooks | None:
        """The hooks that reduce the gradients of these stages; `inner` averages over replicas."""
        if self._parallel.group.size == 1 or self._compiled is not None:
            return inner
        named: dict[int, tuple[str, nn.Parameter]] = {}
        for index in sorted(stages):
            for name, parameter in stages[index].named_parameters():
                named.setdefault(id(parameter), (name, parameter))
        return TensorReplicas(
            [parameter for key, (_, parameter) in named.items() if key in self._scaled],
            [pair for key, pair in named.items() if key not in self._scaled],
            [parameter for key, (_, parameter) in named.items() if key not in self._sharded]
            + [buffer for index in sorted(stages) for buffer in stages[index].buffers()],
            self._parallel.group,
            inner,
            own_samples=not self._parallel.prescaled_batch,
            backward_passes_per_step=passes,
        )

    def check_batch(self, arguments: Mapping[str, Any], step_name: str) -> None:
        """If `checks_batch`: raises StepError on all ranks of a group if they got different tensors."""
        self.checks_batch = False
        session = self._session
        digests = gather_objects(
            {name: digest_of(value) for name, value in arguments.items() if isinstance(value, Tensor)},
            session.groups[Axis.TP],
            session.message_device,
            session.device,
        )
        wrong = sorted({name for digest in digests for name in digest if digest[name] != digests[0].get(name)})
        if wrong:
            raise StepError(
                f"step function {step_name}: prescaled_batch is set, so all ranks of a tensor-parallel group must be given the same batch; "
                f"found different values of {', '.join(wrong)}; shard the data by smp.rdp_rank() and smp.rdp_size(), not smp.dp_rank()"
            )
