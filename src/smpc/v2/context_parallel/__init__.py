"""Sequences that several ranks share."""
