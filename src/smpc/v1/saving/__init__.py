"""Checkpoints of the SMP v1 API, partial and full."""
