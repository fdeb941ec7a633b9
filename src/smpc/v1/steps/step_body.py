"""A user's step function together with its rules for splitting; what it is called with, before and after splitting.

Terms
    arguments     parameter name -> value, as the function's signature binds them. Each keyword that only a `**kwargs` takes has its own
                  name; all of `*args` is one argument called by its name
    body          the function and its rules
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from smpc.errors import StepError
from smpc.v1.steps.microbatch import check_argument, map_tensors, split_argument

Arguments = dict[str, Any]


class StepBody:
    """The function under `@smp.step`.

    `non_split_inputs`: names of arguments that every microbatch gets whole. `input_split_axes`: name -> axis, 0 for the others.
    `detach_outputs`: what the function returns loses its history.
    Raises StepError for names that the function does not have.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        non_split_inputs: Iterable[str],
        input_split_axes: Mapping[str, int],
        detach_outputs: bool,
    ) -> None:
        if isinstance(non_split_inputs, Iterable) and not isinstance(non_split_inputs, str):
            non_split_inputs = list(non_split_inputs)  # it may be an iterator
        _check_options(function, non_split_inputs, input_split_axes)
        self.function = function
        self.detach_outputs = detach_outputs
        self.name = f"{function.__module__}.{function.__qualname__}"
        self.number = zlib.crc32(self.name.encode())  # the same on every rank
        self._signature = inspect.signature(function)
        self._whole = frozenset(non_split_inputs)
        self._axes = dict(input_split_axes)
        self._keywords = self._parameter_of_kind(inspect.Parameter.VAR_KEYWORD)
        self._check_names()

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """The arguments of a call. Raises TypeError as the call itself would."""
        arguments: Arguments = dict(self._signature.bind(*args, **kwargs).arguments)
        if self._keywords in arguments:
            arguments.update(arguments.pop(self._keywords))
        return arguments

    def call(self, arguments: Arguments) -> Any:
        """What the function returns for these arguments."""
        known = {name: value for name, value in arguments.items() if name in self._signature.parameters}
        more = {name: value for name, value in arguments.items() if name not in known}
        bound = inspect.BoundArguments(self._signature, known)
        return self.function(*bound.args, **bound.kwargs, **more)

    def split(self, arguments: Arguments, num_microbatches: int, device: torch.device) -> list[Arguments]:
        """The arguments of every microbatch, their tensors on the device.

        Raises StepError, with a line for every tensor that does not divide.
        """
        split_names = [name for name in arguments if name not in self._whole]
        wrong = [
            line
            for name in split_names
            for line in check_argument(arguments[name], name, num_microbatches, self._axes.get(name, 0))
        ]
        if wrong:
            more = "drop the last batch, change microbatches, or name the argument in non_split_inputs"
            raise StepError("\n".join([f"step function {self.name} cannot split its batch; {more}", *wrong]))
        moved = {name: _moved(value, device) for name, value in arguments.items()}
        columns = {
            name: split_argument(value, name, num_microbatches, self._axes.get(name, 0))
            if name in split_names
            else [value] * num_microbatches
            for name, value in moved.items()
        }
        return [
            {name: _moved(column[index], device) for name, column in columns.items()}
            for index in range(num_microbatches)
        ]

    def _parameter_of_kind(self, kind: Any) -> str:
        return next((p.name for p in self._signature.parameters.values() if p.kind is kind), "")

    def _check_names(self) -> None:
        if self._keywords:
            return
        known = list(self._signature.parameters)
        unknown = [name for name in (*sorted(self._whole), *self._axes) if name not in known]
        if unknown:
            raise StepError(
                f"step function {self.name}: non_split_inputs and input_split_axes name the parameters "
                f"{', '.join(known) or '(none)'}; found {', '.join(unknown)}"
            )


def _check_options(function: Any, whole: Any, axes: Any) -> None:
    """Raise StepError, with a line for each, for options of the wrong type: a str would be taken for the names of its letters."""
    wrong = []
    if not isinstance(whole, list) or not all(isinstance(name, str) for name in whole):
        wrong.append(f"non_split_inputs: expected a list of names, found {whole!r}")
    if not isinstance(axes, Mapping):
        wrong.append(f"input_split_axes: expected a dict from name to axis, found {axes!r}")
    else:
        wrong += [
            f"input_split_axes: expected an int as the axis of {name!r}, found {axis!r}"
            for name, axis in axes.items()
            if not isinstance(axis, int) or isinstance(axis, bool)
        ]
    if wrong:
        raise StepError("\n".join([f"step function {getattr(function, '__qualname__', function)}:", *wrong]))


def _moved(value: Any, device: torch.device) -> Any:
    return map_tensors(value, lambda tensor: tensor.to(device, non_blocking=True))
