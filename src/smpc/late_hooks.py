"""Hooks that a script registers after its model was compiled, where a program would not run them.

    on a module that is cut          it is computed node by node, and never called; or in one of its calls, and called in another
    on a parameter of several ranks  each rank would see its own part of the gradient

Torch numbers all hooks of a process, so a step after which no hook was added checks nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn
from torch.utils.hooks import RemovableHandle

from smpc.codegen.printer import attribute_source
from smpc.codegen.program import StageCode
from smpc.errors import PartitionError, StepError
from smpc.executor.sharded_state import has_hooks
from smpc.tracer.ir import Trace
from smpc.tracer.recording.untraceable import check_hooks, hook_of


class LateHooks:
    """Watches the hooks of one compiled model. `codes`: of all stages; `shared`: the parameters of several."""

    def __init__(self, model: nn.Module, trace: Trace, codes: Sequence[StageCode], shared: Iterable[str] = ()) -> None:
        whole = {path for code in codes for path in code.modules}
        calls = Counter(call.fqn for call in trace.calls[1:])
        whole -= {path for path, number in calls.items() if path in whole and 1 < number != _num_calls(path, codes)}
        self._cut = [(fqn, model.get_submodule(fqn)) for fqn in calls if not _is_inside(fqn, whole)]
        self._model = model
        self._shared = tuple(shared)
        self.seen = -1  # the number of the next hook at the last check

    def check(self) -> None:
        """StepError for a hook that would not run, PartitionError for one that would see part of a gradient."""
        if self.seen == RemovableHandle.next_id:
            return
        _check_parameters(self._model, self._shared)
        check_hooks(self._model)
        for fqn, module in self._cut:
            kind = hook_of(module)
            if kind:
                raise StepError(
                    f"module {fqn!r} has a {kind} now, but was cut, and is not called each time, in the programs compiled before; "
                    "register it before the first step, and it stays whole"
                )
        self.seen = RemovableHandle.next_id


def _num_calls(path: str, codes: Iterable[StageCode]) -> int:
    """How often the stages call a module whole."""
    forms = {f"{attribute_source(path, by_name=by_name)}(" for by_name in (False, True)}
    return sum(code.source.count(form) for code in codes for form in forms)


def _is_inside(fqn: str, whole: set[str]) -> bool:
    parts = fqn.split(".")
    return any(".".join(parts[:length]) in whole for length in range(1, len(parts) + 1))


def _check_parameters(model: nn.Module, shared: Iterable[str]) -> None:
    parameters = dict(model.named_parameters())
    hooked = [name for name in shared if name in parameters and has_hooks(parameters[name])]
    if hooked:
        raise PartitionError(
            f"expected no hooks on parameters that several stages use, found one on {', '.join(hooked)}: each stage would call it "
            "with its own part of the gradient, microbatch by microbatch; change the gradient after the step instead, or keep the modules "
            "that share it on one stage (smp.partition, smp.set_partition)"
        )
