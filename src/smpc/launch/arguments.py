"""Arguments of a script with the variables of the rank that gets them: what `--expand-args` asks for.

    $NAME, ${NAME}    the value of a variable in the rank's environment; one that is not set stays as it is written
    ~, ~/...          HOME of that environment, at the beginning of an argument alone

Nothing else is special, and no shell is involved: an argument stays one argument, whatever the value holds.

    >>> expanded(("--log", "${RANK}.txt", "~/data", "$NOWHERE"), {"RANK": "3", "HOME": "/home/me"})
    ('--log', '3.txt', '/home/me/data', '$NOWHERE')
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})", re.ASCII)


def expanded(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """The arguments of one rank."""
    return tuple(_expanded(argument, environment) for argument in arguments)


def _expanded(argument: str, environment: Mapping[str, str]) -> str:
    home = environment.get("HOME", "")
    if home and (argument == "~" or argument.startswith("~/")):
        argument = home.rstrip("/") + argument[1:]
    return _VARIABLE.sub(lambda found: environment.get(found[1] or found[2], found[0]), argument)
