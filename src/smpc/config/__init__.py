"""The configuration: its keys, the rules between them, and where it is read from."""

from smpc.config.config import KEYS, PLACEMENT_STRATEGIES, Config
from smpc.config.rules import MODULES, SCHEDULES
from smpc.config.sources import parse_json, read_file

__all__ = ["KEYS", "MODULES", "PLACEMENT_STRATEGIES", "SCHEDULES", "Config", "parse_json", "read_file"]
