"""Checkpoints in the format of torch.distributed.checkpoint, saved and loaded by the state dicts that a script has."""
