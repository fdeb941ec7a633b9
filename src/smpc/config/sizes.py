"""Memory sizes as people write them.

parse_bytes("80GB")      80 * 10^9, the maker's gigabytes        parse_bytes("79.6GiB")    79.6 * 2^30
parse_bytes("512 MiB")   blanks and case do not matter           parse_bytes(1 << 30)      bytes
at_least(13_421_772_900) "12.51 GiB": rounded up, so that what is said to do, does
"""

from __future__ import annotations

import re
from types import MappingProxyType

from smpc.config.limits import MAX_BYTES, shown
from smpc.errors import ConfigError

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
