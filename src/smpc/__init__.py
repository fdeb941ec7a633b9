"""smpc: model-parallel training for PyTorch."""
