"""Placement problems that are given as numbers, without a model: what they are, files of them, and their solution."""
