"""Where a configuration comes from: dicts, JSON text and files.

A source is the flat dict of parameters, or the nested form of a SageMaker estimator:
`{"smdistributed": {"modelparallel": {"enabled": true, "parameters": {...}}}, "mpi": {...}}`.

Names and values of parameters are not looked at here; what cannot be read raises ConfigError, what has no such form ConfigTypeError, and
both say where.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smpc.errors import ConfigError, ConfigTypeError


def unwrap(source: Any, origin: str) -> dict[str, Any]:
    """The flat parameters inside a source, which may be nested the way a SageMaker estimator takes it."""
    path = origin
    for level, beside in (("smdistributed", ("mpi",)), ("modelparallel", ()), ("parameters", ("enabled",))):
        if not isinstance(source, Mapping):
            raise ConfigTypeError(f"{path}: expected a mapping of parameters, found {type(source).__name__}")
        if level not in source:
            continue
        if extra := [str(name) for name in source if name not in (level, *beside)]:
            raise ConfigError(f"{path}: unexpected beside {level}: {', '.join(extra)}")
        if source.get("enabled", True) is not True:
            raise ConfigError(f"{path}: expected enabled: true, found {source['enabled']!r}")
        source, path = source[level], f"{path}.{level}"
    if not isinstance(source, Mapping):
        raise ConfigTypeError(f"{path}: expected a mapping of parameters, found {type(source).__name__}")
    if odd := [name for name in source if not isinstance(name, str)]:
        raise ConfigTypeError(f"{path}: expected names as keys, found {', '.join(map(repr, odd))}")
    return dict(source)


def parse_json(text: str, origin: str) -> dict[str, Any]:
    """Parse a JSON object, naming line and column of what is malformed; refuses a key given twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            names = [name for name, _ in pairs]
            twice = [name for name in result if names.count(name) > 1]
            raise ConfigError(f"{origin}: duplicate key {', '.join(twice)}; keep one")
        return result

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{origin}: malformed JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from None
    except RecursionError:
        raise ConfigError(f"{origin}: malformed JSON: nested too deeply") from None
    if not isinstance(value, dict):
        raise ConfigTypeError(f"{origin}: expected a JSON object, found {type(value).__name__}")
    return value


def read_file(path: str | Path) -> dict[str, Any]:
    """Read a `.json` or `.toml` configuration file, its keys unchecked. ConfigError names the file."""
    path = Path(path)
    if path.suffix not in (".json", ".toml"):
        raise ConfigError(f"{path}: expected a .json or .toml file")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the config file: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text at byte {error.start}") from None
    if path.suffix == ".json":
        return parse_json(text, str(path))
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: malformed TOML: {error}") from None
