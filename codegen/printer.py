"""Python source, as a person would write it: of nodes and module calls, and of a rank's whole program.

    Node torch.Tensor.add(x, y)                      x + y
    Node torch.nn.functional.gelu(x)                 F.gelu(x)
    Node _operator.getitem(x, (slice(None), 0))      x[:, 0]
    Node builtins.getattr(x, "T")                    x.T
    attribute transformer.h.0.ln_1.weight            self.transformer.h[0].ln_1.weight
    attribute heads.x-y                              getattr(self.heads, 'x-y')

Names come from data (keys of a ModuleDict or of a dict of inputs, say): what is not a plain name is printed as a string, never as code.

Names in scope of the printed code: `torch`, `F` (torch.nn.functional), `importlib`, `function` (of `smpc.tracer.targets`), `tensor_ops`
(of `smpc.executor`), `self`.

`emit_rank` writes a rank's program as one file that a person can read, import and step through. Its stage classes are, to the letter, the
code that the executor runs. Its INSTRUCTIONS are the program that the executor runs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from smpc.codegen.program import Channel, RankProgram
from smpc.tracer import targets
from smpc.tracer.constants import Ref, is_plain_name, to_source
from smpc.tracer.ir import Autocast, Node, NodeKind
from smpc.tracer.structure import LEAF, Structure, is_index, split_item
from smpc.tracer.targets import TENSOR_OPS

Namer = Callable[[str], str]


# `a.add(b)` is what Python calls for `a + b`; reversed operators have their operands swapped.
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "matmul": "@", "pow": "**", "eq": "==", "ne": "!=", "lt": "<",
    "le": "<=", "gt": ">", "ge": ">=", "__eq__": "==", "__and__": "&", "__or__": "|", "__xor__": "^", "__pow__": "**", "__floordiv__": "//",
}  # fmt: skip
_REVERSED = {"__rsub__": "-", "__rpow__": "**", "__rdiv__": "/", "__rfloordiv__": "//", "__rmatmul__": "@"}
_PREFIX = {"__neg__": "-", "__invert__": "~"}
_KEYS = (bool, int, str)  # of dicts that can be written down: their own classes, whose `repr` is a literal


def uses_tensor_ops(source: str) -> bool:
    """Whether printed code calls what tensor-parallel stages call."""
    return "tensor_ops." in source


def attribute_source(path: str, *, by_name: bool = False) -> str:
    """The expression for a parameter, buffer or module of a stage: "h.0.weight" is `self.h[0].weight`.

    `by_name`: `getattr(self.h, '0').weight`, for modules of the user's, in which `[0]` may be another one or nothing.
    """
    dotted, key = split_item(path)
    source = "self"
    for part in dotted.split("."):
        if is_index(part) and not by_name:
            source += f"[{part}]"
        else:
            source = _member(source, part)
    return f"{source}[{key}]" if key else source


def _assignment(path: str, value: str) -> str:
    """The statement that rebinds an attribute of a stage."""
    owner, _, name = path.rpartition(".")
    source = attribute_source(owner) if owner else "self"
    return f"{source}.{name} = {value}" if is_plain_name(name) else f"setattr({source}, {name!r}, {value})"


def _member(owner: str, name: str) -> str:
    return f"{owner}.{name}" if is_plain_name(name) else f"getattr({owner}, {name!r})"


def _keyword_argument(name: str, source: str) -> str:
    return f"{name}={source}" if is_plain_name(name) else f"**{{{name!r}: {source}}}"


def in_text(name: str) -> str:
    """A name as it may be in a docstring of printed code, which it cannot end."""
    plain = all(c.isprintable() and c not in "\"'\\" for c in name)
    return name if plain else name.encode("unicode_escape").decode().replace('"', '\\"').replace("'", "\\'")


def node_source(node: Node, name_of: Namer) -> str:
    """The statement or expression that evaluates a node; assignments to items and attributes are statements."""
    if node.kind is NodeKind.SET_ATTR:
        return _assignment(node.target, to_source(node.args[0], name_of))
    if node.kind is NodeKind.CALL_MODULE:
        return _module_source(node, name_of)
    return _function_source(node, name_of)


def _module_source(node: Node, name_of: Namer) -> str:
    """A call of a module, by itself or by what calls it on a rank's part."""
    module, kwargs = attribute_source(node.target), dict(node.kwargs)
    caller = next((name for name in targets.CALLERS if name in kwargs), None)
    if caller is None:
        return f"{module}({_arguments(node, name_of)})"
    names, group = kwargs.pop(caller)
    alone = dataclasses.replace(node, kwargs=tuple(kwargs.items()))
    before = (module, repr(names), to_source(group, name_of))
    return f"{_printed_callee(caller)}({', '.join((*before, _arguments(alone, name_of)))})"


def is_statement(node: Node) -> bool:
    """Whether a node prints as a statement that has no value."""
    return node.kind is NodeKind.SET_ATTR or node.target in (targets.SETITEM, targets.SETATTR)


def call_source(fqn: str, arguments: Structure, leaves: tuple[Any, ...], name_of: Namer, bare: bool = False) -> str:
    """A call of a module with the arguments it was recorded with; `arguments` is the structure of (args, kwargs).

    `bare`: by nn.Module's `__call__` in place of one that the class has.
    """
    sources = iter([to_source(leaf, name_of) for leaf in leaves])
    args, kwargs = arguments.children
    parts = [_tree_source(child, sources) for child in args.children]
    for key, child in zip(kwargs.keys, kwargs.children, strict=True):
        parts.append(_keyword_argument(key, _tree_source(child, sources)))
    if bare:
        return f"torch.nn.Module.__call__({', '.join((attribute_source(fqn), *parts))})"
    return f"{attribute_source(fqn)}({', '.join(parts)})"


def context_source(grad_enabled: bool, autocast: Autocast | None) -> str:
    """The `with` items that restore grad mode and autocast; "" where nothing differs from the surroundings."""
    items = [] if grad_enabled else ["torch.no_grad()"]
    if autocast is not None:
        caches = "" if autocast.caches else ", cache_enabled=False"
        items.append(
            f"torch.autocast({autocast.device_type!r}, torch.{autocast.dtype}, enabled={autocast.enabled}{caches})"
        )
    return ", ".join(items)


# Around several contexts in which torch casts each parameter once: it changes nothing, but torch forgets the casts only at its end.
AUTOCAST_SCOPE = "torch.autocast('cpu', enabled=torch.is_autocast_enabled('cpu'))"


def _function_source(node: Node, name_of: Namer) -> str:
    target, args = node.target, node.args
    if target == targets.GETATTR:
        return _member(_operand(args[0], name_of), str(args[1]))
    if target == targets.SETATTR:
        owner, value = _operand(args[0], name_of), to_source(args[2], name_of)
        return f"{owner}.{args[1]} = {value}" if is_plain_name(args[1]) else f"setattr({owner}, {args[1]!r}, {value})"
    if target == targets.GETITEM:
        return f"{_operand(args[0], name_of)}[{_printed_index(args[1], name_of)}]"
    if target == targets.SETITEM:
        return f"{_operand(args[0], name_of)}[{_printed_index(args[1], name_of)}] = {to_source(args[2], name_of)}"
    owner, _, method = target.rpartition(".")
    if owner == "torch.Tensor" and is_plain_name(method) and args and isinstance(args[0], Ref):
        if len(args) == 2 and not node.kwargs and _is_operand(args[1]):
            if method in _INFIX:
                return f"{_operand(args[0], name_of)} {_INFIX[method]} {_operand(args[1], name_of)}"
            if method in _REVERSED:
                return f"{_operand(args[1], name_of)} {_REVERSED[method]} {_operand(args[0], name_of)}"
        if len(args) == 1 and not node.kwargs and method in _PREFIX:
            return f"{_PREFIX[method]}{_operand(args[0], name_of)}"
        return f"{_operand(args[0], name_of)}.{method}({_arguments(node, name_of, skip=1)})"
    return f"{_printed_callee(target)}({_arguments(node, name_of)})"


def _printed_callee(target: str) -> str:
    """A function as the printed code names it."""
    if not all(map(is_plain_name, target.split("."))):
        return f"function({target!r})"
    if target.startswith("torch.nn.functional."):
        return "F." + target.rpartition(".")[2]
    if target.startswith(f"{targets.TENSOR_OPS}."):
        return "tensor_ops." + target.rpartition(".")[2]
    return target if _is_attribute_of_torch(target) else f"function({target!r})"


@functools.cache
def _is_attribute_of_torch(target: str) -> bool:
    """Whether `import torch` is enough to write the target as it is."""
    first, *parts = target.split(".")
    found: Any = torch
    try:
        for part in parts:
            found = getattr(found, part)
    except AttributeError:
        return False
    return first == "torch"


def _arguments(node: Node, name_of: Namer, skip: int = 0) -> str:
    parts = [to_source(arg, name_of) for arg in node.args[skip:]]
    parts += [_keyword_argument(key, to_source(value, name_of)) for key, value in node.kwargs]
    return ", ".join(parts)


def _is_operand(value: Any) -> bool:
    return isinstance(value, Ref) or (type(value) in (int, float, bool) and value == value)


def _operand(value: Any, name_of: Namer) -> str:
    source = to_source(value, name_of)
    return source if isinstance(value, Ref) or not source.startswith("-") else f"({source})"


def _printed_index(value: Any, name_of: Namer) -> str:
    """An index as the printed code has it between brackets."""
    if type(value) is tuple and value:
        inner = ", ".join(_index_item(item, name_of) for item in value)
        return f"{inner}," if len(value) == 1 else inner
    return _index_item(value, name_of)


def _index_item(value: Any, name_of: Namer) -> str:
    if not isinstance(value, slice):
        return to_source(value, name_of)
    start, stop, step = ("" if x is None else to_source(x, name_of) for x in (value.start, value.stop, value.step))
    return f"{start}:{stop}" + (f":{step}" if step else "")


def _tree_source(structure: Structure, leaves: Any) -> str:
    """Source of a nested argument whose leaves are already printed."""
    if structure.kind == LEAF:
        return str(next(leaves))
    inner = [_tree_source(child, leaves) for child in structure.children]
    if structure.kind == "tuple":
        return f"({inner[0]},)" if len(inner) == 1 else f"({', '.join(inner)})"
    if structure.kind == "list":
        return f"[{', '.join(inner)}]"
    if structure.kind == "dict":
        pairs = (f"{key!r}: {value}" for key, value in zip(structure.keys, inner, strict=True))
        return "{" + ", ".join(pairs) + "}"
    assert structure.kind == "slice", structure.kind
    return f"slice({', '.join(inner)})"


def is_plain(structure: Structure) -> bool:
    """Whether `call_source` can print an argument of this structure."""
    if structure.kind not in (LEAF, "tuple", "list", "dict", "slice"):
        return False
    if structure.kind == "dict" and not all(type(key) in _KEYS for key in structure.keys):
        return False
    return all(is_plain(child) for child in structure.children)


def is_addressable(structure: Structure) -> bool:
    """Whether every leaf of a returned value can be reached by an expression; members of sets cannot."""
    if structure.kind in ("set", "frozenset"):
        return False
    if structure.kind in ("dict", "mapping") and not all(type(key) in _KEYS for key in structure.keys):
        return False
    if structure.kind in ("dataclass", "object") and not all(map(is_plain_name, structure.keys)):
        return False
    return all(is_addressable(child) for child in structure.children)


_HEADER = '''"""Rank {rank} of {num_ranks}: {schedule} schedule, {num_microbatches} microbatches.

Written by smpc from plan {fingerprint}. To step through it:

    from smpc.codegen.stage import build_stage   # gives a stage the parameters of your model

{channels}
"""

import importlib

import torch
import torch.nn.functional as F

{tensor_ops}from smpc.codegen.stage import StageModule
from smpc.tracer.targets import function

'''


def emit_rank(program: RankProgram) -> str:
    """The file's text; the same program gives the same bytes."""
    indices = [stage.index for stage in program.stages]
    channels = [c for c in program.channels if c.source in indices or c.destination in indices]
    package, _, tensor_ops = TENSOR_OPS.rpartition(".")
    parallel = any(uses_tensor_ops(stage.source) for stage in program.stages)
    header = _HEADER.format(
        tensor_ops=f"from {package} import {tensor_ops}\n" if parallel else "",
        rank=program.rank,
        num_ranks=program.num_ranks,
        schedule=in_text(program.schedule),
        num_microbatches=program.num_microbatches,
        fingerprint=program.fingerprint,
        channels="\n".join(describe_channel(channel) for channel in channels) or "No edges.",
    )
    classes = "\n\n".join(stage.source for stage in program.stages)
    stages = ", ".join(f"{stage.index}: {stage.class_name}" for stage in program.stages)
    instructions = "".join(f'    "{instruction}",\n' for instruction in program.instructions)
    return f"{header}\n{classes}\n\nSTAGES = {{{stages}}}\n\nINSTRUCTIONS = (\n{instructions})\n"


def describe_channel(channel: Channel) -> str:
    """One line: `edge 1: stage 0 (rank 0) -> stage 1 (rank 1): h_3 float32[4,128,256]`."""
    source = "model inputs" if channel.source < 0 else f"stage {channel.source}"
    values = ", ".join(f"{name} {spec}" for name, spec in zip(channel.values, channel.specs, strict=True))
    return in_text(
        f"edge {channel.index}: {source} (rank {channel.source_rank}) -> "
        f"stage {channel.destination} (rank {channel.destination_rank}): {values}"
    )
