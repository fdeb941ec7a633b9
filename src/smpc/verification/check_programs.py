"""Whether compiled programs do what the model does: one microbatch through both, and an error that says where they part.

    verified = verify_compilation(model, compilation, inputs)      # VerificationError if they differ
    print(verified)             # "57 results of one microbatch are those of plain PyTorch, bit by bit"

Compared are outputs, gradients, buffers, parameters that the model writes into, attributes of modules, and the states of random generators.
`smpc.verification.bounds` says what may differ, and by how much. The model, its inputs and all generators are afterwards as before.

This proves that the recording, the cut, the stage code, its inputs and outputs, and the order of a microbatch's instructions are right for
this microbatch. It does not prove messages between processes, sums over microbatches and replicas, or inputs of another kind, which have
other programs.

Random numbers are drawn in the order of the stages. If the model draws in another order, the recording is used in between: it is compared
with plain PyTorch in the model's order, and with the programs in the stages' order; attributes are then left out.

A model whose own results differ from run to run is recognised by a second run; these results are compared within rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from smpc.compile.result import Compilation
from smpc.errors import VerificationError
from smpc.sample_inputs import Inputs
from smpc.tracer.environment.environment_guards import Environment
from smpc.tracer.ir import Trace
from smpc.tracer.structure import flatten, input_path
from smpc.verification.attributes import Place, settled_places
from smpc.verification.bounds import Bounds
from smpc.verification.first_difference import FirstDifference, differences, locate, owner_first
from smpc.verification.paired_runs import Conditions, RunResults, by_stage, run_compiled, run_eager, run_replayed
from smpc.verification.random_state import RandomState, kept

_MOST_LINES = 5
_WAY_OUT = (
    "what to do: have that module called whole, which runs its Python as it is (smpc.mark_leaf(module) before the model is given to smpc), "
    "and report the model, for this is a defect of smpc; without verify, it would train with these differences"
)


@dataclass(frozen=True)
class Verified:
    """How many results were compared, and how; `unstable`: those that eager itself does not repeat."""

    num_compared: int
    bounds: Bounds
    unstable: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.num_compared} results of one microbatch are those of plain PyTorch, {self.bounds.text}"
        if self.unstable:
            text += (
                f"; {self.unstable[0]} and {len(self.unstable) - 1} more differ from run to run in plain PyTorch, too"
            )
        return text


def verify_compilation(
    model: nn.Module,
    compilation: Compilation,
    inputs: Inputs,
    conditions: Conditions | None = None,
    *,
    environment: Environment | None = None,
    shown: Collection[str] = (),
) -> Verified:
    """Run one microbatch of `inputs` (args, kwargs) by the model and by its programs, and compare.

    `environment`: the recording's, whose settled caches may hold either value; by default the compilation's. `shown`: paths of masks
    of ones that the recording has left out. Raises VerificationError if something differs, or if one of the two cannot run.
    """
    check = _Check(
        model, compilation, inputs, conditions or Conditions(), _tolerated_bounds(compilation, inputs, shown)
    )
    settled = settled_places(model, environment or compilation.environment)
    with kept(check.conditions.device) as start:
        in_order = by_stage(compilation)
        if in_order is compilation.trace:
            return check.compare(start, check.eager, check.compiled, settled)
        check.compare(start, check.eager, lambda: check.replayed(compilation.trace), None)
        return check.compare(start, lambda: check.replayed(in_order), check.compiled, None)


@dataclass(frozen=True)
class _Check:
    """One microbatch of a model and its programs, under some conditions."""

    model: nn.Module
    compilation: Compilation
    inputs: Inputs
    conditions: Conditions
    bounds: Bounds

    def eager(self) -> RunResults:
        """Plain PyTorch."""
        try:
            return run_eager(self.model, self.conditions, self.inputs, self.compilation.trace)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise VerificationError(
                f"the model itself, in plain PyTorch, raises {type(error).__name__}: {error}; the programs cannot be compared with it: "
                "mend the model, or leave out verify"
            ) from error

    def compiled(self) -> RunResults:
        """The programs."""
        return self._guarded(lambda: run_compiled(self.model, self.conditions, self.inputs, self.compilation))

    def replayed(self, trace: Trace) -> RunResults:
        """The recording."""
        return self._guarded(lambda: run_replayed(self.model, self.conditions, self.inputs, trace))

    def _guarded(self, run: Callable[[], RunResults]) -> RunResults:
        try:
            return run()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            text = f"the model runs by itself, and its compiled programs raise {type(error).__name__}: {error}"
            raise VerificationError(f"{text}; nothing has been trained; {_WAY_OUT}") from error

    def compare(
        self,
        start: RandomState,
        reference: Callable[[], RunResults],
        run: Callable[[], RunResults],
        settled: frozenset[Place] | None,
    ) -> Verified:
        """Run both from the same random state. `settled`: attributes not to compare; None: none of them. Raises VerificationError."""
        start.restore()
        expected = reference()
        start.restore()
        found = run()
        wrong = list(differences(expected, found, self.bounds, settled))
        if not wrong:
            return Verified(expected.num_compared, self.bounds)
        start.restore()
        unstable = tuple(item.what for item in differences(expected, reference(), Bounds(), None))
        within = Bounds("plain PyTorch itself gives other results in every run")
        far = {item.what for item in differences(expected, found, within, settled)}
        wrong = [item for item in wrong if item.what not in unstable or item.what in far]
        if not wrong:
            return Verified(expected.num_compared, self.bounds, unstable)
        raise VerificationError(self._text(start, wrong, expected.num_compared))

    def _text(self, start: RandomState, wrong: list[FirstDifference], num_compared: int) -> str:
        place = locate(self.model, self.compilation, self.inputs, self.conditions, start, self.bounds)
        lines = [
            f"expected the compiled programs to do what the model does, {self.bounds.text}, found that {len(wrong)} of {num_compared} "
            "results of the first microbatch differ from those of plain PyTorch",
            f"the first difference in forward order: {place or owner_first(self.compilation.trace, wrong)}",
            *(f"{item}" for item in wrong[:_MOST_LINES]),
        ]
        if len(wrong) > _MOST_LINES:
            lines.append(f"and {len(wrong) - _MOST_LINES} more")
        return "\n".join([*lines, f"nothing has been trained; {_WAY_OUT}"])


def _tolerated_bounds(compilation: Compilation, inputs: Inputs, shown: Collection[str]) -> Bounds:
    """The tolerated differences."""
    plan = compilation.plan
    shared = frozenset(item.name for item in plan.shared_parameters)
    used = [use.op for use in plan.kernels if use.count and not use.reason]
    if used:
        return Bounds(f"fused kernels compute {', '.join(used)}", shared)
    masks = _written_out(inputs, shown)
    if masks:
        return Bounds(f"the program is for every {masks[0]}, and plain PyTorch leaves one of ones out", shared)
    return Bounds("", shared)


def _written_out(inputs: Inputs, shown: Collection[str]) -> list[str]:
    """Inputs at whose values Hugging Face's masks look in eager, and do not in a recording: see `smpc.tracer.patches`."""
    if "transformers" not in sys.modules:
        return []
    leaves, structure = flatten(inputs)
    return [
        input_path(path)
        for leaf, path in zip(leaves, structure.paths(), strict=True)
        if isinstance(leaf, Tensor) and path not in shown and (_is_ones(leaf, path) or "position_ids" in path)
    ]


def _is_ones(leaf: Tensor, path: str) -> bool:
    return "mask" in path and bool((leaf == 1).all())
