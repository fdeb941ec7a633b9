"""Where a configuration comes from: dicts, JSON text and files.

A source is the flat dict of parameters, or the nested form of a SageMaker estimator: `{"smdistributed": {"modelparallel": {"enabled":
true, "parameters": {...}}}, "mpi": {"enabled": true, "processes_per_host": 8}}`, or with `torch_distributed` in place of `mpi`.
`mpi.processes_per_host` becomes a parameter of that name.

Names and values of parameters are not checked here. A source that cannot be read raises ConfigError, one of another form
ConfigTypeError; both say where.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from smpc.config.files import parse_json, parse_toml, read_text
from smpc.config.limits import shown
from smpc.errors import ConfigError, ConfigTypeError, printable

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
