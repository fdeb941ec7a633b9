"""Saving and loading of state dicts, at once or in the background, in the format of torch.distributed.checkpoint."""
