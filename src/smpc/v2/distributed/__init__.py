"""Checkpoints, and the FSDP functions that scripts call."""
