"""Numbers that people write and read: how large they may be, and sizes and counts as text.

The limits are larger than any real job needs, and small enough to be handled in finite time and memory. Values from the command line, a
file or the environment are checked against these before anything of that size is made.

Memory sizes as people write them:

parse_bytes("80GB")      80 * 10^9, the maker's gigabytes        parse_bytes("79.6GiB")    79.6 * 2^30
parse_bytes("512 MiB")   blanks and case do not matter           parse_bytes(1 << 30)      bytes
at_least(13_421_772_900) "12.51 GiB": rounded up, so that what is said to do, does

Numbers as text, in the unit in which they have one to three digits before the point:

format_bytes(1536)                       "1.5 KiB"
scaled(12_345_678, ("", "K", "M"), 1000) "12.3 M"
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import MappingProxyType

from smpc.errors import ConfigError

MAX_RANKS = 65_536  # of any degree
MAX_PIPELINE_RANKS = (
    4_096  # that a model is split over; with more, it takes long to find that the model has fewer pieces
)
MAX_LOCAL_RANKS = 1_024  # processes that one launcher starts
MAX_WORLD_SIZE = 1_048_576
MAX_PIECES = 1_024  # of the model on one rank
MAX_MICROBATCHES = 16_384
MAX_STEPS = 131_072  # stages x microbatches: a schedule has an action or three for each
MAX_SEARCHED_STEPS = 16_384  # ... that `list` searches for
MAX_SECONDS = 31_536_000.0  # a year
MAX_BYTES = 1 << 60
MAX_COUNT = (1 << 31) - 1  # of anything else
MAX_SEED = (1 << 62) - 1
MAX_INPUT_BYTES = 1 << 36  # of the sample inputs that are given by shape: they are allocated, though hardly written
MAX_MICROBATCH_BYTES = 1 << 31  # of one microbatch of them: a module that cannot be recorded is run on it
MAX_MASK_BYTES = 1 << 32  # of those among them that are filled with ones


def size_violation(num_stages: int, num_microbatches: int, *, searched: bool = False) -> str:
    """What is wrong with so many stages and microbatches, "" if nothing; `searched`: by the schedule `list`."""
    if num_microbatches > MAX_MICROBATCHES:
        return f"microbatches: expected at most {MAX_MICROBATCHES}, found {shown(num_microbatches)}"
    most = MAX_SEARCHED_STEPS if searched else MAX_STEPS
    if num_stages * num_microbatches > most:
        what = "the list schedule, which is searched for" if searched else "a schedule"
        return f"microbatches: expected at most {most} stages x microbatches for {what}, found {shown(num_stages)} x {num_microbatches}"
    return ""


def shown(value: object) -> str:
    """A value as messages show it, shortened. Python refuses to print numbers of more than 4300 digits."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of about {int(value.bit_length() * 0.30103) + 1} digits"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:150]}... ({len(text)} characters)"


_PREFIXES = "KMGTP"
_UNITS = MappingProxyType(
    {"": 1, "b": 1}
    | {f"{p.lower()}b": 1000**i for i, p in enumerate(_PREFIXES, 1)}
    | {f"{p.lower()}ib": 1024**i for i, p in enumerate(_PREFIXES, 1)}
)
_SIZE = re.compile(
    r"\s*([0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:e\+?([0-9]{1,2}))?\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII
)


def parse_bytes(size: str | float, what: str) -> int:
    """Bytes of a size; `what` names the setting in the ConfigError for anything but a positive size."""
    given = shown(size)
    if isinstance(size, str):
        found = _SIZE.fullmatch(size)
        unit = _UNITS.get(found[3].lower()) if found is not None else None
        if found is not None and unit is not None:
            size = float(found[1]) * 10.0 ** int(found[2] or 0) * unit
    if isinstance(size, (str, bool)) or not 1 <= size <= MAX_BYTES:
        raise ConfigError(
            f"{what}: expected a size such as 80GB (10^9 bytes), 79.6GiB (2^30 bytes) or a number of bytes, at most 1 EiB, found {given}"
        )
    return int(size)


def at_least(num_bytes: int) -> str:
    """The size in a unit that reads well, rounded up in the second decimal."""
    power = max(0, min(len(_PREFIXES), (int(num_bytes).bit_length() - 1) // 10))
    if power == 0:
        return f"{num_bytes} B"
    return f"{-(-num_bytes * 100 // 1024**power) / 100:.2f} {_PREFIXES[power - 1]}iB"


def format_bytes(num_bytes: float) -> str:
    """1536 -> `1.5 KiB`."""
    if num_bytes < 0:
        return f"-{format_bytes(-num_bytes)}"
    return scaled(num_bytes, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), 1024)


def scaled(value: float, units: Sequence[str], base: int) -> str:
    """A number in the unit in which it has one to three digits before the point; each unit is `base` of the one before."""
    index = 0
    while value >= 999.5 and index < len(units) - 1:
        value /= base
        index += 1
    text = f"{value:.0f}" if index == 0 or value >= 100 else f"{value:.1f}"
    return f"{text} {units[index]}".rstrip()
