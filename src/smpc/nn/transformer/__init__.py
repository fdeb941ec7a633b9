"""Transformer layers and language models split over tensor-parallel ranks."""
