"""Measurements while a rank runs: spans of instructions, clocks, live bytes, messages."""
