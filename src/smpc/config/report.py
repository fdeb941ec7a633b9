"""Checks a configuration: merges its sources, and reports all violations in one error.

    report = Report(Schema.of(MyConfig, broken_rules))      a dataclass whose fields are made by `smpc.config.key.key`
    report.add_source("config", {"degree": 2})              later sources win
    report.add_environment(os.environ)                      the JSON object of SM_HP_MP_PARAMETERS
    report.check(report.values).raise_if_any()
    MyConfig(**report.values)

All violations are reported together, one line each: `ConfigTypeError` if a type is among them, else `ConfigError`; if all values are
valid but one is not implemented, `ConfigUnsupportedError`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from smpc.config.files import parse_json
from smpc.config.key import Key, keys_of
from smpc.config.limits import shown
from smpc.config.sources import unwrap
from smpc.errors import ConfigError, ConfigTypeError, ConfigUnsupportedError, printable

ENVIRONMENT_VARIABLE = "SM_HP_MP_PARAMETERS"
_KINDS: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str, "str | Mapping[str, str]": str}

Rules = Callable[[Mapping[str, Any], Callable[[str], str]], Iterator[str]]  # see `smpc.config.rules`


@dataclass(frozen=True, slots=True)
class Schema:
    """The keys of a configuration, the rules between them, and other names that keys have."""

    fields: Mapping[str, dataclasses.Field[Any]]
    keys: Mapping[str, Key]
    rules: Rules
    aliases: Mapping[str, str]

    @staticmethod
    def of(cls: type, rules: Rules, aliases: Mapping[str, str] = MappingProxyType({})) -> Schema:
        """The schema that a dataclass declares."""
        declared = list(keys_of(cls))
        return Schema({f.name: f for f, _ in declared}, {f.name: key for f, key in declared}, rules, aliases)

    def as_written_in_python(self, name: str, value: Any) -> Any:
        """The value; a 0 or 1 for a boolean key becomes a boolean."""
        is_flag = name in self.keys and str(self.fields[name].type) == "bool" and type(value) is int and value in (0, 1)
        return bool(value) if is_flag else value

    def closest(self, name: str) -> str:
        """`; did you mean X?` with the closest known name, or nothing."""
        matches = difflib.get_close_matches(name[:100], [*self.keys, *self.aliases], n=1, cutoff=0.5)
        return f"; did you mean {matches[0]}?" if matches else ""


class Report:
    """Collects sources and their violations."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self.values: dict[str, Any] = {}
        self.types: list[str] = []
        self.errors: list[str] = []
        self.unsupported: list[str] = []
        self._origins: dict[str, str] = {}

    def add_source(self, origin: str, source: Any) -> None:
        """Merge a source over the earlier ones, resolving aliases inside it."""
        spelt: dict[str, str] = {}
        for written, found in unwrap(source, origin).items():
            name = self._schema.aliases.get(written, written)
            value = self._schema.as_written_in_python(name, found)
            if name not in self._schema.keys:
                closest = self._schema.closest(written)
                self.errors.append(f"Unrecognized config parameter {printable(written)}{closest} ({origin})")
            elif name in spelt and self.values[name] != value:
                self.errors.append(
                    f"{name}: {spelt[name]} = {shown(self.values[name])} and {written} = {shown(value)} set the same "
                    f"parameter to different values; keep one ({origin})"
                )
            else:
                spelt[name] = written
                self.values[name] = value
                self._origins[name] = origin

    def add_environment(self, environ: Mapping[str, str]) -> None:
        """Merge the JSON object in an environment, if there is one."""
        text = environ.get(ENVIRONMENT_VARIABLE, "")
        if text.strip():
            self.add_source(ENVIRONMENT_VARIABLE, parse_json(text, ENVIRONMENT_VARIABLE))

    def check(self, values: Mapping[str, Any]) -> Report:
        """Check types, bounds, options and dependencies of the given values."""
        given = {name: v for name, v in values.items() if v is not None or not self._schema.keys[name].derived}
        sound = {name: value for name, value in given.items() if self._check_value(name, value)}
        self.errors.extend(self._schema.rules(sound, self._where))
        for name, value in sound.items():
            advice = self._schema.keys[name].unsupported
            if advice and value != self._schema.fields[name].default:
                self.unsupported.append(f"{name}: {value!r} is not implemented yet; {advice}{self._where(name)}")
        return self

    def raise_if_any(self) -> None:
        """Raise one error that lists every violation."""
        if self.types:
            raise ConfigTypeError("\n".join(self.types + self.errors))
        if self.errors:
            raise ConfigError("\n".join(self.errors))
        if self.unsupported:
            raise ConfigUnsupportedError("\n".join(self.unsupported))

    def _check_value(self, name: str, value: Any) -> bool:
        """Whether a value has the right type and is within its bounds and options; reports it if not."""
        written = str(self._schema.fields[name].type)
        if isinstance(value, Mapping) and "Mapping" in written:
            return self._check_texts(name, value)
        known, kind = self._schema.keys[name], _KINDS[written]
        accepted: tuple[type, ...] = (int, float) if kind is float else (kind,)
        fits = isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))
        if not fits:
            found = f"{type(value).__name__} {shown(value)}"
            expected = written.replace(" | ", " or ").replace("Mapping", "dict")
            self.types.append(f"{name}: expected {expected}, found {found}{self._where(name)}")
            return False
        if known.options and value not in known.options:
            self.errors.append(
                f"{name}: expected one of {', '.join(known.options)}, found {shown(value)}{self._where(name)}"
            )
            return False
        violation = known.out_of_bounds(name, value) if kind in (int, float) else ""
        if violation:
            self.errors.append(f"{violation}{self._where(name)}")
        elif known.limit is not None and value > known.limit:
            self.errors.append(f"{name}: expected at most {known.limit}, found {shown(value)}{self._where(name)}")
            return False
        return not violation

    def _check_texts(self, name: str, value: Mapping[Any, Any]) -> bool:
        """Whether a mapping is a non-empty one from str to str; reports it if not."""
        wrong = [
            f"{shown(k)}: {shown(v)}" for k, v in value.items() if not isinstance(k, str) or not isinstance(v, str)
        ]
        if wrong:
            self.types.append(f"{name}: expected str: str, found {', '.join(wrong)}{self._where(name)}")
        if not value:
            self.errors.append(f"{name}: expected at least one entry, found {value!r}{self._where(name)}")
        return bool(value) and not wrong

    def _where(self, name: str) -> str:
        return f" ({self._origins[name]})" if name in self._origins else ""
