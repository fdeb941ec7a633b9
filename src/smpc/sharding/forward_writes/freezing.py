"""A whole parameter that a script freezes, or unfreezes, is frozen in parts, too, and the other way round.

torch copies `requires_grad` from the parts as it makes a parameter whole. A forward without a backward leaves parameters whole, and
`model.parameters()` has these then:

    parts     trains  ----------------------------------- frozen, too
    whole     trains (a forward)    frozen by the script    frozen (the next forward)

Else they would train again after the next update, without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any


class FollowedFreezing:
    """See above. `groups`: torch's groups of the parameters of units."""

    def __init__(self, groups: Iterable[Any]) -> None:
        self._trains: dict[int, bool] = {}  # of parameters, by identity, as they were made whole
        for group in groups:
            group._to_unsharded = functools.partial(self._make_whole, group, group._to_unsharded)
            group._to_sharded = functools.partial(self._follow_first, group, group._to_sharded)
            group.pre_forward = functools.partial(self._follow_first, group, group.pre_forward)

    def _make_whole(self, group: Any, original: Callable[[], None]) -> None:
        """In place of what makes a group's parameters whole."""
        original()
        self._trains.update((id(each), each.sharded_param.requires_grad) for each in group.fsdp_params)

    def _follow_first(self, group: Any, original: Callable[..., Any], *args: Any) -> Any:
        """In place of what uses whole parameters, or lets go of them."""
        if group.is_unsharded:
            for each in group.fsdp_params:
                self._follow(each)
        return original(*args)

    def _follow(self, parameter: Any) -> None:
        part, whole = parameter.sharded_param, parameter._unsharded_param
        if part.requires_grad != whole.requires_grad:  # one of them is as it was
            trains = not self._trains[id(parameter)]
            self._trains[id(parameter)] = trains
            part.requires_grad_(trains)
            whole.requires_grad_(trains)
