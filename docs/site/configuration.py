"""The table of all configuration keys, from the declarations that configurations are checked by."""

from __future__ import annotations

import dataclasses
from typing import Any

from smpc.compile.options import PipelineOptions
from smpc.config import Config
from smpc.config.key import Key, keys_of
from smpc.v2.session.config import SessionConfig

HEAD = """# All configuration keys

Made from the declarations that configurations are checked by (`smpc.config`). A script gives a dict, or a JSON or TOML file, to `smp.init`,
and the JSON object in `SM_HP_MP_PARAMETERS` overrides it. `smpc compile` has the same keys as options, `--config FILE` for all of them, and
`smpc.partition` as arguments. What is wrong in a configuration is one error that names every key, before anything starts.

"""
COLUMNS = "| key | where | type | default | may be | meaning |\n| --- | --- | --- | --- | --- | --- |\n"
V2 = """
## SMP v2

Keys of `smpc.v2.init`; [Coming from SMP v2](smp_v2.md) says how they go together.

"""


def page() -> str:
    """The page in Markdown."""
    script, compiler = _keys(Config), _keys(PipelineOptions)
    lines = []
    for name in [*script, *(name for name in compiler if name not in script)]:
        places = [
            *(["`smp.init`"] if name in script else []),
            *([_option(name, compiler[name][1])] if name in compiler and compiler[name][1].flag else []),
            *(["`smpc.partition`"] if name in compiler else []),
        ]
        field, key = script.get(name) or compiler[name]
        lines.append(_line(name, "<br>".join(places), field, key, compiler.get(name)))
    own = [_line(name, "`smpc.v2.init`", *found) for name, found in _keys(SessionConfig).items()]
    return HEAD + COLUMNS + "\n".join(lines) + "\n" + V2 + COLUMNS + "\n".join(own) + "\n"


def _keys(cls: type) -> dict[str, tuple[dataclasses.Field[Any], Key]]:
    return {field.name: (field, key) for field, key in keys_of(cls)}


def _option(name: str, key: Key) -> str:
    long = f"`--{name.replace('_', '-')}`"
    return f"`{key.flag.short}`, {long}" if key.flag and key.flag.short else long


def _line(
    name: str,
    where: str,
    field: dataclasses.Field[Any],
    key: Key,
    other: tuple[dataclasses.Field[Any], Key] | None = None,
) -> str:
    default = key.derived or _value(field.default)
    if other is not None and not key.derived and _value(other[0].default) != default and other[0].default is not None:
        default += f"; for plans {_value(other[0].default)}"
    meaning = key.meaning
    for text in (key.unsupported, key.no_effect):
        meaning += f". {text[0].upper()}{text[1:]}" if text else ""
    cells = (f"`{name}`", where, f"`{field.type}`", default, _bounds(key), meaning)
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _value(default: Any) -> str:
    if default is None or default == "" or default == ():
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _bounds(key: Key) -> str:
    if key.options:
        return ", ".join(f"`{option}`" for option in key.options)
    low, high = key.minimum, key.maximum
    if low is None:
        return ""
    return f"at least {low:g}" if high is None else f"{low:g} to {high:g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
