"""What a careless or hostile user gives the command line: files of every kind, and options of every kind.

    documents(valid)      texts of JSON that are like a valid document, but for some places
    contents(form)        bytes of a file: a document, or anything else
    odd_paths(folder)     names of what is no file, or cannot be read
    NUMBERS, TEXTS        values of options

Sizes are either small or beyond every bound: those between take long and are allowed.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

DIGITS = "9" * 5000
HUGE = (10**18, 2**31 - 1, 2**63, 10**30, 10**200, -1, -(10**30), 65_537, 1_048_577)
STRINGS = (
    "",
    "\x1b[31m",
    "</script>",
    "a\nb",
    "'\"",
    "\u202e",
    "\ud800",
    "x" * 5000,
    "../../etc/passwd",
    "{rank}",
    "list",
    "1f1b",
)
LITERALS = (  # texts that stand for a value where Python's own writer would not put them
    DIGITS,
    f"-{DIGITS}",
    "1e999",
    "-1e999",
    "NaN",
    "Infinity",
    "[" * 5000,
    "[" * 200 + "]" * 200,
    '{"a":' * 200 + "1" + "}" * 200,
    "nul",
    "",
)
NUMBERS = st.sampled_from(
    ["0", "-0", "-1", "1", "2", "3", "4", "6", "1.5", "nan", "inf", "-inf", "1e9", "0x10", "1_0", " 2", "\u0662", "", "x", "--", "1048577",
     "999999999", "99999999999", str(2**63), str(10**30), f"-{10**30}", DIGITS, "\x1b[2J"]
)  # fmt: skip
TEXTS = st.one_of(st.sampled_from([*STRINGS, "a" * 5000, "a:b", ":", "no.such", "\udcff"]), st.text(max_size=20))

_scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 9), st.sampled_from(HUGE), st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(STRINGS), st.text(max_size=8),
)  # fmt: skip
VALUES = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += _places(item, (*path, key))
    return found


@st.composite
def mutated(draw: st.DrawFn, valid: Any) -> Any:
    """A document like the valid one, with up to three places left out, or with another value."""
    document = copy.deepcopy(valid)
    for _ in range(draw(st.integers(0, 3))):
        path = draw(st.sampled_from(_places(document)))
        if not path:
            continue
        holder = document
        for key in path[:-1]:
            holder = holder[key]
        if draw(st.integers(0, 4)) == 0:
            del holder[path[-1]]
        elif isinstance(holder, dict) and draw(st.integers(0, 4)) == 0:
            holder[draw(st.sampled_from(STRINGS))] = draw(VALUES)
        else:
            holder[path[-1]] = draw(VALUES)
    return document


@st.composite
def documents(draw: st.DrawFn, valid: Any) -> str:
    """A mutated document as JSON, now and then with a literal that no writer would write."""
    text = json.dumps(draw(mutated(valid)))
    if draw(st.integers(0, 3)) == 0:
        places = [i for i, c in enumerate(text) if c in ":["]
        at = draw(st.sampled_from(places)) + 1 if places else 0
        end = next((i for i in range(at, len(text)) if text[i] in ",]}"), len(text))
        text = text[:at] + draw(st.sampled_from(LITERALS)) + text[end:]
    return text


def contents(text: st.SearchStrategy[str]) -> st.SearchStrategy[bytes]:
    """A file's bytes: mostly this text, else cut off, doubled or none at all."""
    encoded = text.map(lambda t: t.encode("utf-8", "surrogatepass"))
    odd = st.sampled_from(
        [b"", b"\x00", b"\xff\xfe\x00", b"\x80\x04K\x01.", b"PK\x03\x04", b"[" * 100_000, b"{" * 100_000, b'"' * 5, b"1", b"[]", b"null",
         b"\xef\xbb\xbf{}", b"x" * 200_000, b"," * 200_000, b"\n" * 1000]
    )  # fmt: skip
    cut = st.tuples(encoded, st.integers(0, 400)).map(lambda pair: pair[0][: pair[1]])
    return st.one_of(encoded, encoded, encoded, cut, encoded.map(lambda b: b + b), odd, st.binary(max_size=60))


def make_odd_paths(folder: Path) -> tuple[str, ...]:
    """Names in that folder of what is no readable file."""
    made = []
    for suffix in (".json", ".toml", ".csv", ".py", ".png", ""):
        (folder / f"folder{suffix}").mkdir()
        os.mkfifo(folder / f"pipe{suffix}")
        os.symlink(f"loop{suffix}", folder / f"loop{suffix}")
        os.symlink("/dev/zero", folder / f"endless{suffix}")
        os.symlink("/dev/null", folder / f"nothing{suffix}")
        made += [
            str(folder / f"{name}{suffix}") for name in ("folder", "pipe", "loop", "endless", "nothing", "missing")
        ]
        made += [
            str(folder / ("x" * 300 + suffix)),
            str(folder / "missing" / f"in{suffix}"),
            f"nul\0{suffix}",
            f"new\nline{suffix}",
        ]
        made += [f"\udcff\udcfe{suffix}", f"\x1b[31m{suffix}", suffix]
    return (*made, "/", "/dev/zero", "/dev/null", "~", "-", "--", "a" * 5000, "/".join("a" * 3000))


@st.composite
def csv_texts(draw: st.DrawFn) -> str:
    """A schedule: the right one for two stages, shuffled, or with other cells."""
    rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    cells = st.sampled_from(
        ["0F0", "1B1", "0I0", "0W0", "", " 0F1 ", "(0F1;1B0)OVERLAP_F_B", "1SEND_F0", "9999999F0", f"{DIGITS}F0", f"0B{DIGITS}", "0F131072",
         "131073F0", "\u0660F0", "x" * 200_000, '"', "\x1b", "0F-1", "()OVERLAP_F_B", "(;)OVERLAP_F_B"]
    )  # fmt: skip
    for _ in range(draw(st.integers(0, 3))):
        row = draw(st.sampled_from(rows))
        if draw(st.booleans()):
            row.insert(draw(st.integers(0, len(row))), draw(cells))
        elif row:
            row.pop(draw(st.integers(0, len(row) - 1)))
    return "\n".join(",".join(row) for row in rows * draw(st.sampled_from([1, 1, 1, 2, 0])))


DEVICE = {
    "name": "x", "memory_bandwidth": 1e12, "memory": "80GB", "source": "s", "transport": "nccl", "peak_flops": {"float32": 1e12},
    "inside_host": {"devices": 8, "bandwidth": 1e9, "latency": 1e-6}, "between_hosts": {"bandwidth": 1e9, "latency": 0},
}  # fmt: skip


def as_toml(document: Any) -> str:
    """A document as TOML, as far as that has a form for it; what it has none for is left out."""
    if not isinstance(document, dict):
        return f"x = {_toml_value(document)}\n"
    plain = {k: v for k, v in document.items() if not isinstance(v, dict)}
    lines = [f"{json.dumps(k)} = {_toml_value(v)}" for k, v in plain.items()]
    for key, table in document.items():
        if isinstance(table, dict):
            lines += [f"[{json.dumps(key)}]", *(f"{json.dumps(k)} = {_toml_value(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    return "{}" if value is None else json.dumps(value)


def toml_texts(valid: Any) -> st.SearchStrategy[str]:
    """Mutated documents as TOML, now and then with literals that are its own."""
    extra = st.sampled_from(
        ["", "", "", f"z = {DIGITS}\n", f"z = 0x{'f' * 5000}\n", "z = inf\n", "z = -nan\n", "z = 1979-05-27\n", f"z = {'[' * 5000}\n",
         "z = " + "[" * 100 + "]" * 100 + "\n", "a.b.c.d.e = 1\n", "z = 9999-99-99\n", "ranks = ['99999999xh100']\n", "ranks = [1]\n"]
    )  # fmt: skip
    return st.tuples(extra, mutated(valid).map(as_toml)).map("".join)
