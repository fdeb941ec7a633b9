"""What scripts use around checkpoints."""
