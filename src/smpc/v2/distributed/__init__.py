"""Checkpoints, and what scripts call of FSDP."""
