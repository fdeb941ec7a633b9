"""Layers of transformed models."""
