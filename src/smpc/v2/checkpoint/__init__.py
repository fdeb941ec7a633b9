"""Functions that scripts use around checkpoints."""
