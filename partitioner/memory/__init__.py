"""Predicted bytes of a stage: held from forward to backward, and beyond that while it runs."""
