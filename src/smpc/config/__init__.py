"""The configuration: its keys, the rules between them, and where it is read from."""

from smpc.config.config import KEYS, PLACEMENT_STRATEGIES, Config
from smpc.config.rules import MODULES, SCHEDULES
from smpc.config.user_files import parse_json, parse_toml, read_text
from smpc.config.violations import read_file

__all__ = [
    "KEYS",
    "MODULES",
    "PLACEMENT_STRATEGIES",
    "SCHEDULES",
    "Config",
    "parse_json",
    "parse_toml",
    "read_file",
    "read_text",
]
