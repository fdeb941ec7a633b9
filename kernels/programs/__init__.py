"""The Triton programs of the ops."""
