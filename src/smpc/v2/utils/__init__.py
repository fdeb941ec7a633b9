"""Helpers that scripts call."""
