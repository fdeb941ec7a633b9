"""Changes of a model after it was compiled: hooks where a program would not run them, and parameters that were replaced.

    on a module that is cut          it is computed node by node, and never called; or in one of its calls, and called in another
    on a parameter of several ranks  each rank would see its own part of the gradient

Torch numbers all hooks of a process, so a step after which no hook was added checks nothing.

Checks that a model still has the parameters that it had when it was placed on its ranks: stages and optimizers hold
these objects.

    kept = KeptParameters(model)
    model.layer.weight = nn.Parameter(...)
    kept.check()                                    # StepError: parameter 'layer.weight' was replaced by another one ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from smpc.codegen.printer import attribute_source
from smpc.codegen.program import StageCode
from smpc.errors import PartitionError, StepError
from smpc.sharding.dtensors import has_hooks
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


class KeptParameters:
    """The parameters of a model, by module. The environment's guards notice modules that are added later."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._named = dict(model.named_parameters())
        self._every = dict(model.named_parameters(remove_duplicate=False))
        self._forms = {name: (parameter.shape, parameter.dtype) for name, parameter in self._every.items()}
        self._tables = [(module._parameters, dict(module._parameters)) for module in model.modules()]

    @property
    def are_there(self) -> bool:
        """Whether no module has others."""
        return all(_is_same(table, before) for table, before in self._tables if before or table)

    @property
    def are_as_they_were(self) -> bool:
        """Whether they are there, and have their dtypes: a conversion of the model changes parameters in place."""
        return self.are_there and all(self._every[name].dtype is dtype for name, (_, dtype) in self._forms.items())

    def check(self, *, thoroughly: bool = False) -> None:
        """StepError if one was added, removed or replaced; `thoroughly`: also in new modules."""
        if not thoroughly and self.are_there:
            return
        now = dict(self._model.named_parameters())
        for name in dict.fromkeys((*self._named, *now)):
            if self._named.get(name) is not now.get(name):
                raise changed_parameter(name, self._named, now)

    def check_replaced(self) -> None:
        """StepError unless programs can run over the model's current parameters in the place of the kept ones: with the same names, shapes
        and dtypes, whole, and one where there was one under several names."""
        now = dict(self._model.named_parameters(remove_duplicate=False))
        first = {id(parameter): name for name, parameter in reversed(self._every.items())}
        for name in dict.fromkeys((*self._every, *now)):
            if name not in now or name not in self._every:
                raise changed_parameter(name, self._every, now)
            (shape, dtype), found, owner = self._forms[name], now[name], first[id(self._every[name])]
            if isinstance(found, DTensor) or (found.shape, found.dtype) != (shape, dtype):
                what = "a DTensor" if isinstance(found, DTensor) else f"{found.dtype} of shape {list(found.shape)}"
                raise StepError(
                    f"parameter {name!r}: expected {dtype} of shape {list(shape)}, as when the model was sharded, found "
                    f"{what}; to shard parameters as well, call fully_shard of the module that shard has returned; convert models before "
                    "they are sharded"
                )
            if found is not now[owner]:
                raise StepError(
                    f"parameter {name!r}: expected the same as {owner!r}, as when the model was sharded, found another one; "
                    "make them one again, for instance by model.tie_weights()"
                )


class StateHook:
    """`check(model)` before the model's `state_dict()`, and `check(None)` before it is pickled. Copies of the model have none of it."""

    def __init__(self, check: Callable[[nn.Module | None], None]) -> None:
        self._check = check

    def __call__(self, model: nn.Module, *_: Any) -> None:
        """As torch calls it: also with the prefix, and whether to keep variables."""
        self._check(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> StateHook:
        return StateHook(_accept)

    def __reduce__(self) -> tuple[Any, ...]:
        self._check(None)
        return StateHook, (_accept,)


def _accept(model: nn.Module | None) -> None:
    """Every model."""


def changed_parameter(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> StepError:
    """The text of the error for a parameter that was replaced."""
    what = "was added" if name not in before else "was removed" if name not in now else "was replaced by another one"
    return StepError(
        f"parameter {name!r} {what} after the first program was installed, whose stages have the parameters of then; make a new runtime "
        "and optimizer for the model as it is, or write new values into parameters in place: "
        "`with torch.no_grad(): parameter.copy_(value)`"
    )


def _is_same(table: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return len(table) == len(before) and all(a is b for a, b in zip(table.values(), before.values(), strict=True))
