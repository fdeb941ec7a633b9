"""Checks a configuration: reads and merges its sources, and reports all violations in one error.

    report = Report(Schema.of(MyConfig, broken_rules))      a dataclass whose fields are made by `smpc.config.key.key`
    report.add_source("config", {"degree": 2})              later sources win
    report.add_environment(os.environ)                      the JSON object of SM_HP_MP_PARAMETERS
    report.check(report.values).raise_if_any()
    MyConfig(**report.values)

All violations are reported together, one line each: `ConfigTypeError` if a type is among them, else `ConfigError`; if all values are
valid but one is not implemented, `ConfigUnsupportedError`.

Sources are dicts, JSON text and files. A source has the flat dict of parameters, or the nested form of a SageMaker estimator:
`{"smdistributed": {"modelparallel": {"enabled": true, "parameters": {...}}}, "mpi": {"enabled": true, "processes_per_host": 8}}`, or with
`torch_distributed` in place of `mpi`. `mpi.processes_per_host` becomes a parameter of that name. A source that cannot be read raises
ConfigError, one of another form ConfigTypeError; both say where.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from smpc.config.key import Key, keys_of
from smpc.config.numbers import shown
from smpc.config.user_files import parse_json, parse_toml, read_text
from smpc.errors import ConfigError, ConfigTypeError, ConfigUnsupportedError, printable

# The keys of the launcher's part of a nested configuration, beside `enabled`.
_LAUNCHERS: MappingProxyType[str, tuple[str, ...]] = MappingProxyType(
    {"mpi": ("processes_per_host", "custom_mpi_options"), "torch_distributed": ()}
)


def unwrap(source: Any, origin: str) -> dict[str, Any]:
    """The flat parameters inside a source, which may be nested the way a SageMaker estimator takes it."""
    path = printable(origin)
    beside_it: dict[str, Any] = {}
    for level, beside in (("smdistributed", tuple(_LAUNCHERS)), ("modelparallel", ()), ("parameters", ("enabled",))):
        if not isinstance(source, Mapping):
            raise ConfigTypeError(f"{path}: expected a mapping of parameters, found {type(source).__name__}")
        if level not in source:
            continue
        if extra := [str(name) for name in source if name not in (level, *beside)]:
            raise ConfigError(f"{path}: unexpected beside {level}: {printable(', '.join(extra))}")
        if source.get("enabled", True) not in (True, 1):
            raise ConfigError(f"{path}: expected enabled: true, found {shown(source['enabled'])}")
        for launcher in beside:
            if launcher in _LAUNCHERS and launcher in source:
                beside_it |= _of_launcher(source[launcher], launcher, path)
        source, path = source[level], f"{path}.{level}"
    if not isinstance(source, Mapping):
        raise ConfigTypeError(f"{path}: expected a mapping of parameters, found {type(source).__name__}")
    if odd := [name for name in source if not isinstance(name, str)]:
        raise ConfigTypeError(f"{path}: expected names as keys, found {', '.join(map(shown, odd))}")
    return beside_it | dict(source)


def _of_launcher(options: Any, launcher: str, path: str) -> dict[str, Any]:
    """The job's parameters from the launcher's part."""
    path = f"{path}.{launcher}"
    if not isinstance(options, Mapping):
        raise ConfigTypeError(f"{path}: expected a mapping of options, found {type(options).__name__}")
    known = ("enabled", *_LAUNCHERS[launcher])
    if extra := [str(name) for name in options if name not in known]:
        raise ConfigError(f"{path}: expected {', '.join(known)}, found {printable(', '.join(extra))}")
    enabled = options.get("enabled", True)
    if enabled not in (True, False, 0, 1):
        raise ConfigTypeError(f"{path}.enabled: expected true or false, found {shown(enabled)}")
    return {"processes_per_host": options["processes_per_host"]} if enabled and "processes_per_host" in options else {}


def read_file(path: str | Path) -> dict[str, Any]:
    """Read a `.json` or `.toml` configuration file, its keys unchecked. ConfigError names the file."""
    path = Path(path)
    if path.suffix not in (".json", ".toml"):
        raise ConfigError(f"{printable(str(path))}: expected a .json or .toml file")
    text = read_text(path, str(path))
    return parse_json(text, str(path)) if path.suffix == ".json" else parse_toml(text, str(path))


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
