"""What a module that is called whole leaves in Python: attributes that it sets, lists and dicts that it puts something into.

    self.loss = load.square().mean()        a block of experts, called whole as its routing depends on values
    losses.append(...)                      a list that the block has, or one that it was given

A recording does not see it: copies of the module have run, on invented values. Code around the module that reads it goes on with what was
there before, such as no loss at all. So what is found in the copies is put in place for the rest of the recording: a tensor that belongs to
no recorded call, which nobody can use, and for another value on which two runs do not agree something that is an error wherever it is used.
Numbers and words on which they agree stay what they were before.

What a module does to containers among its arguments is an error of the module around it, which is then called whole in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from smpc.errors import TraceError
from smpc.tracer.ir import TensorSpec
from smpc.tracer.structure import Structure, flatten

RETURN_IT = "what to do: have that module return it, or compute it outside of it"
_USUAL = frozenset(vars(nn.Module()))
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_DEPTH = 4  # of objects in objects
_OPERATORS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "pow", "rpow", "matmul", "rmatmul",
    "neg", "abs", "lt", "le", "gt", "ge", "eq", "ne", "bool", "int", "float", "index", "len", "iter", "getitem", "setitem", "contains",
    "call", "and", "or", "xor", "invert",
)  # fmt: skip

Path = tuple[tuple[str, Any], ...]  # ("module", name), ("attribute", name), ("item", key)


class Unknown:
    """In place of a value that a module called whole has computed."""

    def __init__(self, text: str = "") -> None:
        self._text = text

    def __deepcopy__(self, memo: dict[int, Any]) -> Unknown:
        return self

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Called by torch where it is an argument."""
        next(each for each in _all((*args, *(kwargs or {}).values())) if isinstance(each, cls))._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        raise TraceError(f"forward uses {self._text}, which a module that is called whole has computed; {RETURN_IT}")

    __hash__ = object.__hash__


for _name in _OPERATORS:
    setattr(Unknown, f"__{_name}__", Unknown._refuse)


def _all(values: Any) -> Iterator[Any]:
    for value in values:
        yield value
        if isinstance(value, list | tuple):
            yield from _all(value)


@dataclass(frozen=True, slots=True)
class Left:
    """A value in place of another: a TensorSpec for a tensor, `Unknown` for what two runs do not agree on."""

    path: Path
    value: Any


def held(module: nn.Module) -> dict[Path, Any]:
    """What the modules inside hold, by the paths to it; the tensors of a container are there by themselves."""
    found: dict[Path, Any] = {}
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if key not in _USUAL and not key.startswith("_smpc"):
                _walk((("module", name), ("attribute", key)), value, found, set())
    return found


def _walk(path: Path, value: Any, found: dict[Path, Any], above: set[int]) -> None:
    found[path] = value
    if (
        len(path) > _DEPTH
        or id(value) in above
        or isinstance(value, (Tensor, nn.Module, ModuleType, type, *_PLAIN))
        or callable(value)
    ):
        return
    inner: list[tuple[tuple[str, Any], Any]] = []
    if isinstance(value, dict):
        inner = [(("item", key), each) for key, each in value.items() if isinstance(key, (str, int))]
    elif isinstance(value, list | tuple):
        inner = [(("item", place), each) for place, each in enumerate(value)]
    elif hasattr(value, "__dict__"):
        inner = [(("attribute", key), each) for key, each in vars(value).items()]
    for step, each in inner:
        _walk((*path, step), each, found, above | {id(value)})


def changes(before: dict[Path, Any], after: dict[Path, Any]) -> tuple[Left, ...]:
    """What a run has put in the place of something else, the outermost of it alone."""
    found: list[Left] = []
    done: set[Path] = set()
    for path, value in after.items():
        if any(path[:end] in done for end in range(1, len(path))) or _is_same(before, path, value):
            continue
        done.add(path)
        found.append(Left(path, _described(value)))
    gone = dict.fromkeys(path[:-1] for path in before if path not in after and path[:-1] in after)
    found += [Left(path, Unknown) for path in gone if not any(path[:end] in done for end in range(1, len(path) + 1))]
    return tuple(found)


def _is_same(before: dict[Path, Any], path: Path, value: Any) -> bool:
    if path not in before:
        return False
    old = before[path]
    return old is value or (type(old) is type(value) and isinstance(value, _PLAIN) and old == value)


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorSpec.of(value)
    if type(value) in (list, tuple):
        return type(value)(_described(each) for each in value)
    if type(value) is dict:
        return {key: _described(each) for key, each in value.items()}
    return value if isinstance(value, _PLAIN) else Unknown


def agreed(first: tuple[Left, ...], second: tuple[Left, ...]) -> tuple[Left, ...]:
    """The tensors that two runs have left alike, and `Unknown` in place of what they do not agree on."""
    others = {each.path: each.value for each in second}
    found = [Left(each.path, _merged(each.value, others.pop(each.path, Unknown))) for each in first]
    return (*(each for each in found if not _is_plain(each.value)), *(Left(path, Unknown) for path in others))


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, _PLAIN) or (isinstance(value, list | tuple) and all(map(_is_plain, value)))


def _merged(first: Any, second: Any) -> Any:
    if isinstance(first, TensorSpec) and isinstance(second, TensorSpec) and first.shape == second.shape:
        return first
    return first if type(first) is type(second) and first == second else Unknown


class LeftBehind:
    """What is in place of what modules called whole have left, in one recording."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._undo: dict[str, list[Callable[[], None]]] = {}  # by the module's name, in the order in which to call them
        self._texts: dict[int, tuple[Tensor, str]] = {}  # by identity

    def text(self, tensor: Tensor) -> str:
        """For people, what a tensor stands for; "" if it is another."""
        return self._texts[id(tensor)][1] if id(tensor) in self._texts else ""

    def put(self, module: nn.Module, fqn: str, left: tuple[Left, ...]) -> None:
        """Puts what copies of a module have left into it."""
        undo = self._undo.setdefault(fqn, [])
        for each in left:
            holder: Any = module
            try:
                for kind, step in each.path[:-1]:
                    holder = _step(holder, kind, step)
            except (LookupError, AttributeError, TypeError):  # something else has been put there
                continue
            kind, step = each.path[-1]
            undo.insert(0, _put(holder, kind, step, self._made(each.value, f"attribute {_text(fqn, each.path)}")))

    def take_back(self, fqn: str = "") -> None:
        """What calls of a module have left in it, or of modules inside, is not there any more."""
        for name in [name for name in self._undo if not fqn or name == fqn or name.startswith(f"{fqn}.")]:
            for undo in self._undo.pop(name):
                undo()

    def _made(self, value: Any, text: str) -> Any:
        if value is Unknown:
            return Unknown(text)
        if isinstance(value, TensorSpec):
            fake = torch.empty_strided(value.shape, value.stride, dtype=value.torch_dtype, device=self._device)
            self._texts[id(fake)] = fake, f"{text}, which a module that is called whole has computed"
            return fake
        if type(value) in (list, tuple):
            return type(value)(self._made(each, text) for each in value)
        return {key: self._made(each, text) for key, each in value.items()} if type(value) is dict else value


def _step(holder: Any, kind: str, step: Any) -> Any:
    if kind == "module":
        return holder.get_submodule(step)
    return holder[step] if kind == "item" else vars(holder)[step]


def _put(holder: Any, kind: str, step: Any, value: Any) -> Callable[[], None]:
    """Puts a value into an object, a list or a dict; returns what takes it out again."""
    if kind == "item" and isinstance(holder, list):
        before = list(holder)
        holder[step : step + 1] = [value]
        return lambda: holder.__setitem__(slice(None), before)
    table = vars(holder) if kind == "attribute" else holder
    old = dict(table)
    table[step] = value

    def undo() -> None:
        if step in old:
            table[step] = old[step]
        else:
            table.pop(step, None)

    return undo


def are_changed(arguments: Any, leaves: Sequence[Any], structure: Structure) -> bool:
    """Whether containers among arguments hold something else than these leaves."""
    found, shape = flatten(arguments)
    return shape != structure or any(one is not other for one, other in zip(found, leaves, strict=True))


def _text(fqn: str, path: Path) -> str:
    parts = [fqn]
    for kind, step in path:
        parts.append(f"[{step!r}]" if kind == "item" else f".{step}" if step else "")
    return "".join(parts).lstrip(".")
