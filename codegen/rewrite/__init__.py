"""Rewrites of traces: one folder or file each."""
