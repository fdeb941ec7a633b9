"""Paths: how a trace names the parameters, buffers, modules and tensors of a model.

    h.0.weight            parts with dots between them: a parameter, buffer, module or tensor attribute
    tables..'cos'         a tensor that a dict, list or tuple of the module holds: its key as a Python literal, after two dots

A part may hold any character but a dot: keys of ModuleDicts are data. No part is empty, so that nothing but an item has two dots: the
first item of a list `a` is `a..0`, and a module of the name `a[0]` is `a[0]`.
"""

from __future__ import annotations

import ast
import keyword
import unicodedata
from typing import Any

import torch
from torch import nn

from smpc.errors import TraceError

_ITEM = ".."
_LITERALS = (bool, bytes, float, int, str, type(None))


def item_path(owner: str, key: Any) -> str | None:
    """The path of `owner[key]`; None for a key that is not a literal, and for an owner without a path."""
    return f"{owner}{_ITEM}{key!r}" if _is_literal(key) and all(owner.split(".")) else None


def split_item(path: str) -> tuple[str, str]:
    """The dotted part of a path, and the literal of the key of an item, "" if it is none: `a..0` gives `a` and `0`."""
    dotted, _, key = path.partition(_ITEM)
    return dotted, key


def item_of(holder: Any, key: str) -> Any:
    """A holder's value under the key of that literal."""
    return holder[ast.literal_eval(key)]


def check_module_names(model: nn.Module) -> None:
    """Raise TraceError if a module has a name that a path cannot hold: torch takes any with `setattr`."""
    for prefix, module in model.named_modules():
        for name in () if isinstance(module, torch.jit.ScriptModule) else module._modules:
            if not name or "." in name:
                what = "is empty" if not name else "has a dot"
                where = (
                    f"{prefix!r} ({type(module).__name__})" if prefix else f"the model itself ({type(module).__name__})"
                )
                raise TraceError(
                    f"{where} has a module whose name {what}: {name!r}; names of modules are joined by dots, so give it another one"
                )


def is_plain_name(name: str) -> bool:
    """Whether `x.name` in a class reads the attribute of exactly that name.

    Python reads identifiers in their NFKC form, and those that begin with two underscores as `_Class__name`.
    """
    is_name = name.isidentifier() and not keyword.iskeyword(name) and unicodedata.normalize("NFKC", name) == name
    return is_name and not (name.startswith("__") and not name.endswith("__"))


def is_index(name: str) -> bool:
    """Whether a name is the decimal form of a number, as `ModuleList` has them: "10", but not "01"."""
    return name.isascii() and name.isdigit() and (name == "0" or name[0] != "0")


def _is_literal(key: Any) -> bool:
    if type(key) is tuple:
        return all(_is_literal(part) for part in key)
    return type(key) in _LITERALS and key == key and key not in (float("inf"), float("-inf"))
