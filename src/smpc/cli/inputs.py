"""`--input NAME=DTYPE[d0,d1]`: sample inputs given by shape.

    input_ids=int64[8,512]     NAME is a parameter of the model's forward, DTYPE a dtype of torch, [] a scalar

The values are zeros, ones for masks (a mask of zeros hides everything): a trace depends on shapes, and on values only
where the model's own Python looks at them.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smpc.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

FORM = "NAME=DTYPE[d0,d1], for example input_ids=int64[8,512]"
_SYNTAX = re.compile(r"(?P<name>[A-Za-z_]\w*)\s*=\s*(?P<dtype>\w+)\s*\[(?P<shape>[\d\s,]*)\]")
_COMMON_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One sample input. `dtype` is torch's name without the prefix."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        """A tensor of that shape on the CPU."""
        import torch

        make = torch.ones if self.name.endswith("mask") else torch.zeros
        return make(self.shape, dtype=getattr(torch, self.dtype))


def parse_inputs(texts: Sequence[str]) -> tuple[InputSpec, ...]:
    """The specs of all `--input` options; ConfigError lists everything that is wrong with any."""
    specs: list[InputSpec] = []
    violations: list[str] = []
    for text in texts:
        try:
            spec = _parse(text)
        except ConfigError as error:
            violations.append(f"--input {text!r}: {error}")
            continue
        if spec.name in [other.name for other in specs]:
            violations.append(f"--input {text!r}: {spec.name!r} is given twice; keep one")
        specs.append(spec)
    if violations:
        raise ConfigError("\n".join(violations))
    return tuple(specs)


def check_names(specs: Sequence[InputSpec], model: nn.Module) -> None:
    """Raise ConfigError if the model's forward cannot be called with these inputs by name."""
    parameters = inspect.signature(model.forward).parameters
    kinds = inspect.Parameter
    known = [p.name for p in parameters.values() if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in parameters.values()) and not _is_transformers(model)
    given = [spec.name for spec in specs]
    violations = []
    for name in given:
        if name not in known and not takes_any:
            hint = _closest(name, known)
            takes = ", ".join(known) or "no named inputs"
            violations.append(
                f"--input {name}: {type(model).__name__}.forward has no input {name!r}{hint}; it takes {takes}"
            )
    missing = [
        p.name for p in parameters.values() if p.default is kinds.empty and p.name in known and p.name not in given
    ]
    if missing and not violations:
        violations.append(f"--input: {type(model).__name__}.forward also needs {', '.join(missing)}; give {FORM}")
    if violations:
        raise ConfigError("\n".join(violations))


def _parse(text: str) -> InputSpec:
    import torch

    match = _SYNTAX.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"expected {FORM}")
    dtype = getattr(torch, match["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        hint = _closest(match["dtype"], _COMMON_DTYPES)
        raise ConfigError(f"unknown dtype {match['dtype']!r}{hint}; expected one of {', '.join(_COMMON_DTYPES)}")
    sizes = [size.strip() for size in match["shape"].split(",")] if match["shape"].strip() else []
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ConfigError(f"expected sizes of at least 1 in [{match['shape']}], as in {FORM}")
    return InputSpec(match["name"], str(dtype).removeprefix("torch."), tuple(int(size) for size in sizes))


def _is_transformers(model: nn.Module) -> bool:
    # Its models' **kwargs carry options for attention kernels, never inputs.
    return any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__)


def _closest(name: str, known: Sequence[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""
