"""Checks that a model still has the parameters that it had when it was placed on its ranks: stages and optimizers hold
these objects.

kept = KeptParameters(model)
model.layer.weight = nn.Parameter(...)
kept.check()                                    # StepError: parameter 'layer.weight' was replaced by another one ...
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from smpc.errors import StepError


class KeptParameters:
    """The parameters of a model, by module. The environment's guards notice modules that are added later."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._named = dict(model.named_parameters())
        self._tables = [(module._parameters, dict(module._parameters)) for module in model.modules()]

    def check(self, *, thoroughly: bool = False) -> None:
        """StepError if one was added, removed or replaced; `thoroughly`: also in new modules."""
        if not thoroughly and all(_is_same(table, before) for table, before in self._tables if before or table):
            return
        now = dict(self._model.named_parameters())
        for name in dict.fromkeys((*self._named, *now)):
            if self._named.get(name) is not now.get(name):
                raise changed_parameter(name, self._named, now)


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
