"""Context parallelism in a training script: the configuration's `context_parallel_degree`.

    smp.init({"pipeline_parallel_degree": 2, "context_parallel_degree": 2, "ddp": True})
    model = smp.DistributedModel(AnyModel())                                  # nothing is annotated
    sampler = DistributedSampler(data, num_replicas=smp.data_size(), rank=smp.data_rank())

The ranks of a group have the same parameters and get the same batch; each computes its slice of every sequence
(`smpc.codegen.rewrite.context_parallel`). In everything else they are replicas, but their gradients are summands of one loss, so the
average over replicas is turned into a sum over the group (`smpc.executor.replicas.group_hooks`). Parameters, optimizer state and
checkpoints are treated as in replicas, and a step's results are the same on all ranks of a group.

Every step compares the ranks' inputs before any of them computes: slices of different samples would give wrong numbers, and
different programs would wait for each other. Ranks whose program draws random numbers continue from the first rank's random state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from smpc.codegen.rewrite.context_parallel.rewrite import ContextPlan
from smpc.codegen.rewrite.expert_parallel import parts_of_experts
from smpc.codegen.rewrite.tensor_parallel.rewrite import CONTEXT, group_attribute
from smpc.compile.passes import ContextSharing
from smpc.errors import StepError, TraceError
from smpc.executor.collectives import TensorGroup
from smpc.executor.shared_draws import draw_as_first
from smpc.mesh import Axis
from smpc.sample_inputs import Inputs
from smpc.tracer.constants import is_constant, normalise
from smpc.tracer.ir import NodeKind, Trace
from smpc.v1.layout.placement import digest_of
from smpc.v1.session.object_messages import gather_objects
from smpc.v1.session.process_state import Session
from smpc.v1.session.step_errors import describe, raise_first_step_error
from smpc.v1.steps.arguments import Arguments, map_leaves

_DIVIDE = (
    "divide the data by smp.data_rank() and smp.data_size(), as smpc.dist.get_sampler does, and draw what a step function draws alike on "
    "all of them"
)


class SharedSequences:
    """One rank's part. `is_begun`: whether the first program is made; later ones may lack the requested outputs."""

    def __init__(self, module: nn.Module, session: Session) -> None:
        self._module = module
        self._session, self._members = session, session.groups[Axis.CP]
        self._group = TensorGroup.of(self._members)
        self._outputs = session.config.kept_outputs
        self.is_begun = False
        vars(module)[group_attribute(CONTEXT)] = self._group  # parameters that the programs read

    @property
    def sharing(self) -> ContextSharing:
        """How the ranks share the sequences of a recorded model."""
        plan = ContextPlan(sums_later=True)
        experts = parts_of_experts(self._module)
        return ContextSharing(self._group.size, plan, self._outputs, may_lack_outputs=self.is_begun, experts=experts)

    def agree(self, step_name: str, asked: Any, digests: Mapping[str, str], failure: Exception | None) -> None:
        """Before a step, on pipeline rank 0: checks that all ranks run `asked` and have the same inputs. Collective over the group.

        `asked`: the function, its program or the signature to compile, and the form of its arguments, if it is new. `digests`: see
        `digests_of`. `failure`: this rank's. Raises on all ranks the error of any rank, and StepError for differences.
        """
        found = self._gather((describe(failure), asked, digests))
        raise_first_step_error([error for error, _, _ in found], failure)
        where = (
            f"step function {step_name}: expected the ranks of a context-parallel group, which share its sequences, to"
        )
        if any(other != asked for _, other, _ in found):
            raise StepError(
                f"{where} call the same step function with arguments of the same shapes, and the model in the same modes; found "
                f"others on some of ranks {self._ranks}; {_DIVIDE}"
            )
        names = {name: None for _, _, each in found for name in each}
        wrong = [name for name in names if len({each.get(name) for _, _, each in found}) > 1]
        if wrong:
            raise StepError(
                f"{where} be given the same batch; found different values of {', '.join(wrong)} on ranks {self._ranks}; {_DIVIDE}"
            )

    def check_model(self, trace: Trace | None, failure: Exception | None) -> None:
        """Raise one rank's recording error, or TraceError for different models, on all ranks of the group. Collective over it."""
        found = self._gather((describe(failure), "" if trace is None else trace.fingerprint))
        raise_first_step_error([error for error, _ in found], failure)
        fingerprints = [text for _, text in found]
        if len(set(fingerprints)) > 1:
            raise TraceError(
                f"the context-parallel ranks {self._ranks} recorded different models, fingerprints by rank: "
                f"{[text[:12] for text in fingerprints]}; build the same model on every rank (same configuration, same library versions, "
                "no code that depends on the rank); if the model's Python goes through a set, PYTHONHASHSEED=0 gives sets the same order"
            )

    def begin_step(self, trace: Trace) -> None:
        """Continue from the first rank's random state, if the program draws. Modules called whole may draw. Collective over the group."""
        if any(node.random or node.kind is NodeKind.CALL_MODULE for node in trace.nodes):
            draw_as_first(self._group, self._session.device)

    def _gather(self, mine: Any) -> list[Any]:
        return gather_objects(mine, self._members, self._session.message_device, self._session.device)

    @property
    def _ranks(self) -> list[int]:
        return list(self._session.mesh.group(Axis.CP, self._session.rank))


def make_shared_sequences(module: nn.Module, session: Session) -> SharedSequences | None:
    """None if every rank has whole sequences."""
    return None if session.mesh.cp_size == 1 else SharedSequences(module, session)


def digests_of(arguments: Arguments, microbatches: Sequence[Inputs]) -> dict[str, str]:
    """Digests of a step's inputs, by path: tensors and plain values among its arguments, and tensors that it makes itself."""
    digests: dict[int, str] = {}
    known: set[tuple[str, int]] = set()
    found: dict[str, str] = {}

    def argument(leaf: Any, path: str) -> Any:
        if isinstance(leaf, Tensor):
            known.add(_storage(leaf))
            found[path] = digests.get(id(leaf)) or digests.setdefault(id(leaf), digest_of(leaf))
        elif is_constant(normalise(leaf)):
            found[path] = repr(normalise(leaf))
        return leaf

    def made(leaf: Any, path: str) -> Any:
        if isinstance(leaf, Tensor) and _storage(leaf) not in known:
            found[path] = digest_of(leaf)
        return leaf

    for name, value in arguments.items():
        map_leaves(value, argument, name)
    for index, (args, kwargs) in enumerate(microbatches):
        map_leaves(list(args), made, f"the model's arguments in microbatch {index}: ")
        map_leaves(dict(kwargs), made, f"the model's arguments in microbatch {index}: ")
    return found


def _storage(tensor: Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()
